"""What the RocksDB tests share: an id, states, and user databases."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from rocksdict import Options, Rdict

from dualwrite.state import PreparedTxnState
from dualwrite.stores.base import Claim, StoreTransaction
from dualwrite.stores.rocksdb import RocksDBStore

ID = "orders"
STATE = PreparedTxnState(4711, 3)
FAMILIES = ("customers", "orders")
STATE_FAMILY = "kafka_transaction_state"


def make_database(path: Path, *, raw: bool) -> Rdict:
    """A user's database, with existing column families and data."""
    rdict = Rdict(str(path), Options(raw_mode=raw))
    for name in FAMILIES:
        rdict.create_column_family(name, Options(raw_mode=raw))[b"before"] = b"1"
    return rdict


def recorded(store: RocksDBStore, claim: Claim, number: int = 1) -> StoreTransaction:
    transaction = store.begin(claim)
    transaction.handle.put(b"chair", b"%d" % number, cf="orders")
    transaction.record(STATE, generation=0, transaction_number=number)
    return transaction


def stored(store: RocksDBStore, key: Any = b"chair", family: str = "orders") -> Any:
    """What is committed, read without the store."""
    return store.rdict.get_column_family(family).get(key)


def run_python(code: str, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run in a separate process."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )
