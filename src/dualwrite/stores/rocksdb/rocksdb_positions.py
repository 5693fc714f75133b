"""Positions in RocksDB: keys in the column family `kafka_consumed_offset`, written in the same batch as the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from dualwrite.errors import StoredStateError
from dualwrite.stores.positions import (
    Move,
    Partition,
    Position,
    Positions,
    check_expected,
    in_order,
    parse_position,
    position_text,
)
from dualwrite.stores.rocksdb.database import OpenDatabase
from dualwrite.stores.rocksdb.locks import LockRequest
from dualwrite.stores.store_transaction import StoreTransaction

FAMILY: Final = "kafka_consumed_offset"

_SEPARATOR: Final = b"\0"  # can't occur in a group's id or in a topic
_DIGITS: Final = 10
_LOCK_TIMEOUT: Final = 30.0  # seconds


class RocksDBPositions(Positions):
    """Only one process can open the database; its threads lock a position until their transaction has ended.

    Keys and values are bytes in either mode of rocksdict.

    `would_create` says that there is no database yet: reading must not create one at a mistyped path.
    """

    def __init__(self, database: Callable[[], OpenDatabase], would_create: Callable[[], bool]) -> None:
        self._database = database
        self._would_create = would_create

    def prepare(self) -> None:
        """Creates the column family."""
        self._database().make_family(FAMILY)

    def read(self, group_id: str) -> Mapping[Partition, Position]:
        return {position.key: position for _, position in self._stored(group_id.encode() + _SEPARATOR)}

    def move(self, transaction: StoreTransaction, group_id: str, moves: Iterable[Move]) -> None:
        family = transaction.handle.column_family(FAMILY)
        for one in in_order(moves):
            key = _key(group_id, one.key)
            transaction.handle.lock(_lock_name(key), f"moving the position {one.after}", _LOCK_TIMEOUT)
            check_expected(group_id, one, _found(one.key, family.get(key)))
            family.put(key, position_text(one.after))

    def reset(self, group_id: str, moves: Iterable[Move]) -> None:
        self.prepare()
        database, ordered = self._database(), in_order(moves)
        keys = [_key(group_id, one.key) for one in ordered]
        with _locked(database, keys, doing := "resetting positions"):
            for key, one in zip(keys, ordered, strict=True):
                check_expected(group_id, one, _found(one.key, database.family(FAMILY).get(key)))
            texts = [position_text(one.after) for one in ordered]
            database.write({FAMILY: zip(keys, texts, strict=True)}, doing)

    def forget(self, group_id: str) -> int:
        keys = sorted(key for key, _ in self._stored(group_id.encode() + _SEPARATOR))
        if keys:
            database = self._database()
            # a transaction that has moved one must have ended, or it would bring it back
            with _locked(database, keys, doing := "forgetting the positions of a group"):
                database.write({FAMILY: [(key, None) for key in keys]}, doing)
        return len(keys)

    def groups(self, prefix: str = "") -> list[str]:
        return sorted({key.split(_SEPARATOR)[0].decode() for key, _ in self._stored(prefix.encode())})

    def _stored(self, start: bytes) -> Iterator[tuple[bytes, Position]]:
        if self._would_create():
            return
        self.prepare()
        database = self._database()
        try:
            for key, value in database.family(FAMILY).items(from_key=start):
                if not isinstance(key, bytes) or not key.startswith(start):
                    break
                _, topic, partition = key.split(_SEPARATOR)
                yield key, parse_position((topic.decode(), int(partition)), value)
        except StoredStateError:
            raise
        except Exception as error:  # rocksdict has no exception class of its own
            raise database.failed("reading positions", error) from error


def _key(group_id: str, partition: Partition) -> bytes:
    return _SEPARATOR.join((group_id.encode(), partition[0].encode(), b"%0*d" % (_DIGITS, partition[1])))


@contextmanager
def _locked(database: OpenDatabase, keys: Iterable[bytes], doing: str) -> Iterator[None]:
    with ExitStack() as held:
        for key in keys:
            request = LockRequest(_lock_name(key), doing, is_id=False)
            held.enter_context(database.locks.held(request, _LOCK_TIMEOUT))
        yield


def _lock_name(key: bytes) -> str:
    """No transactional id begins with this character."""
    return _SEPARATOR.decode() + key.decode()


def _found(partition: Partition, value: Any) -> Position | None:
    return None if value is None else parse_position(partition, value)
