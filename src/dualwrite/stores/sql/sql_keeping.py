"""Leases and consumed positions in SQL tables: primary keys and conditional updates decide who gets an id, or moves one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from itertools import chain
from typing import Any, Final

from sqlalchemy import Connection, Select, bindparam, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from dualwrite.errors import PositionMovedError, StoreError
from dualwrite.observability.logs import SubjectLogger
from dualwrite.stores.leases import Lease, LeaseStore
from dualwrite.stores.positions import Move, Partition, Position, Positions, in_order, moved
from dualwrite.stores.rows import MAX_OWNER_LENGTH
from dualwrite.stores.sql.dialect import ErrorClass
from dualwrite.stores.sql.joined_transaction import JoinedTransaction
from dualwrite.stores.sql.short import ShortTransactions, clock_column, database_clock
from dualwrite.stores.sql.sql_transaction import SqlStoreTransaction
from dualwrite.stores.sql.tables import begins_with_prefix, lease_table, position_table, prefix_parameters
from dualwrite.stores.store_transaction import StoreTransaction

log = SubjectLogger(__name__)

_NOBODY: Final = ""
"""The owner of an id that was released. Rows are not deleted: that would need one more privilege."""

_MAX_IDS: Final = 500
"""Ids in one statement: SQLite had a limit of 999 parameters."""

_AMONG: Final = lease_table.c.transactional_id.in_(bindparam("ids", expanding=True))
_OURS: Final = (_AMONG, lease_table.c.owner == bindparam("owner_"))
_RENEW: Final = update(lease_table).where(*_OURS).values(leased_until=bindparam("until"), lease_ms=bindparam("ms"))
_READ_OURS: Final = select(lease_table.c.transactional_id).where(*_OURS)
_RELEASE: Final = update(lease_table).where(*_OURS).values(owner=_NOBODY, leased_until=bindparam("now"))
_ACQUIRE: Final = update(lease_table).where(lease_table.c.transactional_id == bindparam("id"))
_SHORTEN: Final = _ACQUIRE.values(leased_until=bindparam("until"))
_INSERT: Final = insert(lease_table)
_LISTED: Final = begins_with_prefix(lease_table.c.transactional_id), lease_table.c.owner != _NOBODY

_OF_GROUP: Final = position_table.c.group_id == bindparam("group")
_OF_ONE: Final = (
    _OF_GROUP,
    position_table.c.topic == bindparam("of_topic"),
    position_table.c.partition_number == bindparam("of_partition"),
)
_CHECK_TABLE: Final = select(position_table.c.group_id).where(position_table.c.group_id == "").limit(1)
_READ: Final = select(position_table).where(_OF_GROUP)
_READ_ONE: Final = select(position_table).where(*_OF_ONE)
_MOVE: Final = (
    update(position_table)
    .where(
        *_OF_ONE, position_table.c.next_offset == bindparam("expected"), position_table.c.topic_id == bindparam("expected_id")
    )
    .values(next_offset=bindparam("next"), topic_id=bindparam("next_id"), updated_at=bindparam("now"))
)
_INSERT_POSITION: Final = insert(position_table)
_COUNT: Final = select(func.count()).select_from(position_table).where(_OF_GROUP)
_DELETE: Final = delete(position_table).where(_OF_GROUP)
_GROUPS: Final = select(position_table.c.group_id).where(begins_with_prefix(position_table.c.group_id)).distinct()


class SqlLeases(LeaseStore):
    """The leases of a SQL database, in the table `kafka_transaction_lease`.

    The clock is read at the beginning of each transaction. If the transaction then waits for a lock, its time is in the past:
    it leases fewer ids, and for a shorter time, never more.
    """

    def __init__(self, short: ShortTransactions) -> None:
        self._short = short

    def acquire(self, ids: Collection[str], owner: str, *, seconds: float) -> frozenset[str]:
        """In one transaction, which locks the rows in the order of their ids, as that of every other owner."""
        owner = owner[:MAX_OWNER_LENGTH]

        def work(connection: Connection) -> frozenset[str]:
            found = {
                row.transactional_id: row for row in connection.execute(_locking(connection.dialect.name), {"ids": sorted(ids)})
            }
            clock = next(iter(found.values())).clock if found else database_clock(connection)
            times = _times(clock, seconds)
            free = {name for name, row in found.items() if row.owner in (owner, _NOBODY) or row.leased_until <= times["now"]}
            _shorten(connection, [row for name, row in found.items() if name not in free])
            values = {"owner": owner, "leased_until": times["until"], "lease_ms": round(seconds * 1000)}
            for statement, names in ((_ACQUIRE, free), (_INSERT, set(ids) - found.keys())):
                if names:
                    key = "id" if statement is _ACQUIRE else "transactional_id"
                    connection.execute(statement, [{key: name, **values} for name in sorted(names)])
            return frozenset(free | (set(ids) - found.keys()))

        return self._short.run_inserting(work, "leasing an id", min(ids)) if ids else frozenset()

    def renew(self, ids: Collection[str], owner: str, *, seconds: float) -> frozenset[str]:
        owner = owner[:MAX_OWNER_LENGTH]

        def work(some: list[str], connection: Connection) -> list[str]:
            ours = {"ids": some, "owner_": owner}
            until = _times(database_clock(connection), seconds)["until"]
            connection.execute(_RENEW, {**ours, "until": until, "ms": round(seconds * 1000)})
            return list(connection.scalars(_READ_OURS, ours))

        chunks = [self._short.run(partial(work, some), "renewing leases") for some in _in_chunks(ids)]
        return frozenset(chain.from_iterable(chunks))

    def release(self, ids: Collection[str], owner: str) -> None:
        owner = owner[:MAX_OWNER_LENGTH]

        def work(some: list[str], connection: Connection) -> None:
            connection.execute(_RELEASE, {"ids": some, "owner_": owner, "now": _times(database_clock(connection), 0)["now"]})

        for some in _in_chunks(ids):
            self._short.run(partial(work, some), "releasing ids")

    def entries(self, prefix: str = "") -> list[Lease]:
        def work(connection: Connection) -> list[Lease]:
            rows = connection.execute(_listing(connection.dialect.name), prefix_parameters(prefix)).all()
            return [_lease(row, row.clock) for row in rows]

        return sorted(self._short.query(work, "listing the leases"), key=lambda each: each.transactional_id)


@cache
def _locking(dialect: str) -> Select[Any]:
    """The rows of ids, locked, each with the database's clock."""
    return select(lease_table, clock_column(dialect)).where(_AMONG).order_by(lease_table.c.transactional_id).with_for_update()


@cache
def _listing(dialect: str) -> Select[Any]:
    """The leases of the ids that begin with a prefix, each with the database's clock."""
    return select(lease_table, clock_column(dialect)).where(*_LISTED)


def _lease(row: Any, clock: float) -> Lease:
    left = (row.leased_until - _times(clock, 0)["now"]).total_seconds()
    return Lease(row.transactional_id, row.owner, left, row.lease_ms / 1000)


def _shorten(connection: Connection, held: Iterable[Any]) -> None:
    """Shorten the impossible ones of other owners' leases; the rows are locked."""
    for row in held:
        # the clock that came with the row may be that of before the wait for its lock, and its owner has renewed it since
        if _lease(row, row.clock).is_impossible and _lease(row, now := database_clock(connection)).is_impossible:
            connection.execute(_SHORTEN, {"id": row.transactional_id, "until": _times(now, row.lease_ms / 1000)["until"]})
            text = "the database's clock has gone back; shortened the lease of %r to its length"
            log.warning(text, row.owner, transactional_id=row.transactional_id)


def _times(clock: float, seconds: float) -> dict[str, datetime]:
    """Now by the database's clock, and when a lease of so many seconds ends."""
    now = datetime.fromtimestamp(float(clock), UTC)
    return {"now": now, "until": now + timedelta(seconds=seconds)}


def _in_chunks(ids: Collection[str]) -> list[list[str]]:
    every = sorted(ids)
    return [every[start : start + _MAX_IDS] for start in range(0, len(every), _MAX_IDS)]


class SqlPositions(Positions):
    """See Positions. The statements run on the transaction's own connection, whatever the user's `tx.db` is."""

    def __init__(self, short: ShortTransactions) -> None:
        self._short = short

    def prepare(self) -> None:
        """`dualwrite db upgrade` creates the table."""
        self._short.check_rights("processor")
        self._short.query(lambda connection: connection.execute(_CHECK_TABLE).first(), "looking for positions")

    def read(self, group_id: str) -> Mapping[Partition, Position]:
        found = self._short.query(
            lambda connection: connection.execute(_READ, {"group": group_id}).all(), "reading the positions of a group"
        )
        return {position.key: position for position in map(_position, found)}

    def move(self, transaction: StoreTransaction, group_id: str, moves: Iterable[Move]) -> None:
        """An update whose condition does not hold changes no row; the primary key rejects a second insert."""
        assert isinstance(transaction, SqlStoreTransaction | JoinedTransaction)
        with transaction.own_statements() as connection:  # not tx.session: it would flush the user's objects, and costs more
            for one in in_order(moves):
                try:
                    _move(connection, group_id, one)
                except IntegrityError as error:  # PostgreSQL accepts no other statement before the rollback
                    raise moved(group_id, one, None) from error

    def reset(self, group_id: str, moves: Iterable[Move]) -> None:
        ordered = in_order(moves)
        done = False

        def work(connection: Connection) -> None:
            nonlocal done
            for one in ordered:
                try:
                    _move(connection, group_id, one)
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
        return self._short.delete(_COUNT, _DELETE, {"group": group_id}, "forgetting the positions of a group")

    def groups(self, prefix: str = "") -> list[str]:
        return sorted(
            self._short.query(
                lambda connection: connection.scalars(_GROUPS, prefix_parameters(prefix)).all(),
                "listing the groups with positions",
            )
        )


def _move(connection: Connection, group_id: str, one: Move) -> None:
    where = {"group": group_id, "of_topic": one.after.topic, "of_partition": one.after.partition}
    now = datetime.now(UTC)
    if one.before is not None:
        values = {"next": one.after.offset, "next_id": one.after.topic_id, "now": now}
        condition = {"expected": one.before.offset, "expected_id": one.before.topic_id}
        if connection.execute(_MOVE, {**where, **condition, **values}).rowcount == 1:
            return
    found = connection.execute(_READ_ONE, where).first()
    if one.before is not None or found is not None:
        raise moved(group_id, one, None if found is None else _position(found))
    at = {"group_id": group_id, "topic": one.after.topic, "partition_number": one.after.partition}
    to = {"next_offset": one.after.offset, "topic_id": one.after.topic_id, "updated_at": now}
    connection.execute(_INSERT_POSITION, {**at, **to})


def _position(row: Any) -> Position:
    return Position(row.topic, row.partition_number, row.next_offset, row.topic_id, row.updated_at)
