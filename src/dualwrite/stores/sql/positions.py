"""Positions in a SQL database: rows of `kafka_consumed_offset`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import Connection, bindparam, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from dualwrite.errors import PositionMovedError, StoreError
from dualwrite.stores.positions import Move, Partition, Position, Positions, in_order, moved
from dualwrite.stores.sql.dialect import ErrorClass
from dualwrite.stores.sql.short import ShortTransactions
from dualwrite.stores.sql.table import begins_with_prefix, prefix_parameters
from dualwrite.stores.sql.table import position_table
from dualwrite.stores.sql.transaction import SqlStoreTransaction
from dualwrite.stores.transaction import StoreTransaction

_OF_GROUP: Final = position_table.c.group_id == bindparam("group")
_OF_ONE: Final = (_OF_GROUP, position_table.c.topic == bindparam("of_topic"), position_table.c.partition_number == bindparam("of_partition"))
_CHECK_TABLE: Final = select(position_table.c.group_id).where(position_table.c.group_id == "").limit(1)
_READ: Final = select(position_table).where(_OF_GROUP)
_READ_ONE: Final = select(position_table).where(*_OF_ONE)
_MOVE: Final = (
    update(position_table)
    .where(*_OF_ONE, position_table.c.next_offset == bindparam("expected"), position_table.c.topic_id == bindparam("expected_id"))
    .values(next_offset=bindparam("next"), topic_id=bindparam("next_id"), updated_at=bindparam("now"))
)
_INSERT: Final = insert(position_table)
_COUNT: Final = select(func.count()).select_from(position_table).where(_OF_GROUP)
_DELETE: Final = delete(position_table).where(_OF_GROUP)
_GROUPS: Final = select(position_table.c.group_id).where(begins_with_prefix(position_table.c.group_id)).distinct()

Execute = Callable[..., Any]


class SqlPositions(Positions):
    """See Positions. The statements run on the transaction's own connection, whatever the user's `tx.db` is.

    Args:
        short: Runs our own transactions.
    """

    def __init__(self, short: ShortTransactions) -> None:
        self._short = short

    def prepare(self) -> None:
        """See Positions; `dualwrite db upgrade` creates the table."""
        self._short.query(lambda connection: connection.execute(_CHECK_TABLE).first(), "looking for positions")

    def read(self, group_id: str) -> Mapping[Partition, Position]:
        """See Positions."""
        found = self._short.query(
            lambda connection: connection.execute(_READ, {"group": group_id}).all(), "reading the positions of a group"
        )
        return {position.key: position for position in map(_position, found)}

    def move(self, transaction: StoreTransaction, group_id: str, moves: Iterable[Move]) -> None:
        """See Positions; an update whose condition does not hold changes no row; the primary key rejects a second insert."""
        assert isinstance(transaction, SqlStoreTransaction)
        with transaction.own_statements() as connection:  # not tx.session: it would flush the user's objects, and costs more
            for one in in_order(moves):
                try:
                    _move(connection.execute, group_id, one)
                except IntegrityError as error:  # PostgreSQL accepts no other statement before the rollback
                    raise moved(group_id, one, None) from error

    def reset(self, group_id: str, moves: Iterable[Move]) -> None:
        """See Positions."""
        ordered = in_order(moves)
        done = False

        def work(connection: Connection) -> None:
            nonlocal done
            for one in ordered:
                try:
                    _move(connection.execute, group_id, one)
                except PositionMovedError as error:
                    if not (done and error.found == one.after.offset):  # a COMMIT whose response was lost has moved it
                        raise
            done = True

        try:
            self._short.run(work, "moving the positions of a group")
        except StoreError as error:
            if not self._short.is_caused_by(error, ErrorClass.DUPLICATE):  # inserted meanwhile
                raise
            raise moved(group_id, ordered[0], None) from error

    def forget(self, group_id: str) -> int:
        """See Positions."""
        counted = 0  # the maximum over all attempts: a COMMIT whose response was lost may have deleted them already

        def work(connection: Connection) -> None:
            nonlocal counted
            counted = max(counted, connection.execute(_COUNT, {"group": group_id}).scalar_one())
            connection.execute(_DELETE, {"group": group_id})

        self._short.run(work, "forgetting the positions of a group")
        return counted

    def groups(self, prefix: str = "") -> list[str]:
        """See Positions."""
        return sorted(
            self._short.query(
                lambda connection: connection.scalars(_GROUPS, prefix_parameters(prefix)).all(),
                "listing the groups with positions",
            )
        )


def _move(execute: Execute, group_id: str, one: Move) -> None:
    where = {"group": group_id, "of_topic": one.after.topic, "of_partition": one.after.partition}
    now = datetime.now(UTC)
    if one.before is not None:
        values = {"next": one.after.offset, "next_id": one.after.topic_id, "now": now}
        condition = {"expected": one.before.offset, "expected_id": one.before.topic_id}
        if execute(_MOVE, {**where, **condition, **values}).rowcount == 1:
            return
    found = execute(_READ_ONE, where).first()
    if one.before is not None or found is not None:
        raise moved(group_id, one, None if found is None else _position(found))
    row = {
        "group_id": group_id,
        "topic": one.after.topic,
        "partition_number": one.after.partition,
        "next_offset": one.after.offset,
        "topic_id": one.after.topic_id,
        "updated_at": now,
    }
    execute(_INSERT, row)


def _position(row: Any) -> Position:
    return Position(row.topic, row.partition_number, row.next_offset, row.topic_id, row.updated_at)
