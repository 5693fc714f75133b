"""Stores on a user's database: from a path and from an open Rdict, in raw mode and not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rocksdb_scene import FAMILIES, ID, make_database
from rocksdict import Rdict

from dualwrite.stores.base import Claim
from dualwrite.stores.rocksdb import RocksDBStore
from fixtures.pace import LIMIT
from fixtures.tiers import thinned


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "db"


@pytest.fixture(params=thinned(["path", "path raw", "rdict", "rdict raw"], kept=["path", "rdict raw"]))
def source(request: pytest.FixtureRequest, path: Path) -> Iterator[Path | Rdict]:
    """What a RocksDBStore is created from; the database contains user data."""
    raw = "raw" in request.param
    rdict = make_database(path, raw=raw)
    if "rdict" in request.param:
        yield rdict
        rdict.close()
    else:
        rdict.close()
        del rdict
        yield path


@pytest.fixture
def store(source: Path | Rdict) -> Iterator[RocksDBStore]:
    with RocksDBStore(source) as store:
        yield store


@pytest.fixture
def rival(source: Path | Rdict) -> Iterator[RocksDBStore]:
    """Another store in the same process."""
    with RocksDBStore(source, lock_timeout=0.3) as store:
        yield store


@pytest.fixture
def claim(store: RocksDBStore) -> Claim:
    return store.claim(ID, "tests", timeout=LIMIT)


@pytest.fixture
def fresh(path: Path) -> Iterator[RocksDBStore]:
    """A database that the store creates, with the user's column families."""
    with RocksDBStore(path, column_families=dict.fromkeys(FAMILIES)) as store:
        yield store


@pytest.fixture
def fresh_claim(fresh: RocksDBStore) -> Claim:
    return fresh.claim(ID, "tests", timeout=LIMIT)
