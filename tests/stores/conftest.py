"""Fixtures of the store tests: the first claim of the id, on each kind of store."""

from __future__ import annotations

import pytest
from store_scene import first_claim

from dualwrite.stores.base import Claim
from dualwrite.stores.sql import SqlStateStore


@pytest.fixture
def claim(store: SqlStateStore) -> Claim:
    return first_claim(store)


@pytest.fixture
def postgres_claim(postgres_store: SqlStateStore) -> Claim:
    return first_claim(postgres_store)


@pytest.fixture
def mariadb_claim(mariadb_store: SqlStateStore) -> Claim:
    return first_claim(mariadb_store)


@pytest.fixture
def proxied_claim(proxied_store: SqlStateStore) -> Claim:
    return first_claim(proxied_store)
