"""Positions in RocksDB: keys in the column family `kafka_consumed_offset`, written in the same batch as the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
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
from dualwrite.stores.rocksdb.database import LockRequest, OpenDatabase, lock_for
from dualwrite.stores.store_transaction import StoreTransaction

FAMILY: Final = "kafka_consumed_offset"

_SEPARATOR: Final = b"\0"  # can't occur in a group's id or in a topic
_DIGITS: Final = 10
_LOCK_TIMEOUT: Final = 30.0  # seconds


class RocksDBPositions(Positions):
    """See Positions. Only one process can open the database; its threads lock a position until their transaction has ended.

    Keys and values are bytes in either mode of rocksdict.

    Args:
        database: Gives the open database, with the locks that all stores of this process on it share.
        would_create: Whether there is no database yet: reading must not create one at a mistyped path.
    """

    def __init__(self, database: Callable[[], OpenDatabase], would_create: Callable[[], bool]) -> None:
        self._database = database
        self._would_create = would_create

    def prepare(self) -> None:
        """Creates the column family."""
        self._database().make_family(FAMILY, None)

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
        database = self._database()
        changes: dict[bytes, bytes | None] = {}
        with ExitStack() as requests:
            for one in in_order(moves):
                key = _key(group_id, one.key)
                _locked(requests, database, key, f"resetting the position {one.after}")
                check_expected(group_id, one, _found(one.key, database.family(FAMILY).get(key)))
                changes[key] = position_text(one.after)
            database.write(FAMILY, changes, "resetting positions")

    def forget(self, group_id: str) -> int:
        found = sorted(key for key, _ in self._stored(group_id.encode() + _SEPARATOR))
        if not found:
            return 0
        database = self._database()
        with ExitStack() as requests:
            for key in found:  # a transaction that has moved it must have ended, or it would bring it back
                _locked(requests, database, key, "forgetting the positions of a group")
            database.write(FAMILY, dict.fromkeys(found), "forgetting the positions of a group")
        return len(found)

    def groups(self, prefix: str = "") -> list[str]:
        return sorted({key.split(_SEPARATOR)[0].decode() for key, _ in self._stored(prefix.encode())})

    def _stored(self, start: bytes) -> Iterator[tuple[bytes, Position]]:
        if self._would_create():
            return
        self.prepare()
        database = self._database()
        try:
            rows = database.family(FAMILY).items(from_key=start)
            for key, value in rows:
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


def _locked(requests: ExitStack, database: OpenDatabase, key: bytes, doing: str) -> None:
    """Lock a position until the end of `requests`."""
    request = LockRequest(_lock_name(key), "", doing)
    requests.callback(request.release)
    lock_for(database.locks, request, _LOCK_TIMEOUT)


def _lock_name(key: bytes) -> str:
    """No transactional id begins with this character."""
    return _SEPARATOR.decode() + key.decode()


def _found(partition: Partition, value: Any) -> Position | None:
    return None if value is None else parse_position(partition, value)
