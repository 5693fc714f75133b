"""A scene on RocksDB: one process, whose stores share the open database; nothing waits, what was read is compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from dualwrite.stores.base import Claim, StoreTransaction, TxnStateStore
from dualwrite.stores.key_values import ROWS
from dualwrite.stores.rocksdb import RocksDBStore, TransactionBatch
from dualwrite.testing.stores import ClaimsWait, StoreCapabilities, StoreScene
from fixtures.pace import LIMIT

_LENGTH = 8


class WatchedStore(RocksDBStore):
    """A store whose transactions can be ended from outside."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.begun: list[StoreTransaction] = []

    def begin(self, claim: Claim) -> StoreTransaction:
        """As the base class, and records the transaction."""
        self.begun.append(super().begin(claim))
        return self.begun[-1]


class RocksDBScene(StoreScene):
    """A scene in a folder.

    Args:
        path: Where the database is, or will be created.
    """

    capabilities: ClassVar[StoreCapabilities] = StoreCapabilities(claims_wait=ClaimsWait.NEVER, crashes=True)

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        with self.open() as store:
            store.claim("the scene's own", "the scene", timeout=LIMIT)  # the first claim makes the database

    def open(self) -> WatchedStore:
        return WatchedStore(self._path, lock_timeout=LIMIT)

    def put(self, handle: TransactionBatch, number: int) -> None:
        handle.put(number.to_bytes(_LENGTH, "big"), b"")

    def numbers(self) -> list[int]:
        with self.open() as store:
            store.check()
            return [int.from_bytes(key, "big") for key in store.rdict.keys()]  # noqa: SIM118  (no dict)

    def corrupt(self, transactional_id: str) -> None:
        with self.open() as store:
            store.check()
            family = store.rdict.get_column_family(ROWS)
            family[transactional_id.encode()] = b'{"fence": "many"}'
            family.close()

    def ways_to_end(self, handle: TransactionBatch) -> Mapping[str, Callable[[], Any]]:
        calls = (handle.commit, handle.rollback, handle.write, handle.clear, handle.close, handle.__enter__)
        return {call.__name__: call for call in calls}

    def remove(self, handle: TransactionBatch, number: int) -> None:
        handle.delete(number.to_bytes(_LENGTH, "big"))

    def crash(self, store: TxnStateStore) -> None:
        """Roll back what the store has begun, which writes nothing: the same result as a kill.

        The database itself can't crash here, since it runs in this process; the crash tests kill processes.
        """
        assert isinstance(store, WatchedStore)
        for transaction in store.begun:
            transaction.rollback()
