"""Leases in the table `kafka_transaction_lease`: the primary key and conditional updates decide who gets an id.

The clock is read at the beginning of each transaction. If the transaction then waits for a lock, its time is in the past: it
leases fewer ids, and for a shorter time, never more.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from itertools import chain
from typing import Any, Final

from sqlalchemy import Connection, Select, bindparam, insert, select, update

from dualwrite.errors import StoreError
from dualwrite.stores.leases import Lease, LeaseStore
from dualwrite.stores.sql.clock import clock_column, database_clock
from dualwrite.stores.sql.dialect import ErrorClass
from dualwrite.stores.sql.short import ShortTransactions
from dualwrite.stores.sql.table import begins_with_prefix, prefix_parameters
from dualwrite.stores.sql.table import lease_table
from dualwrite.stores.state_row import MAX_OWNER_LENGTH

_NOBODY: Final = ""
"""The owner of an id that was released. Rows are not deleted: that would need one more privilege."""

_MAX_IDS: Final = 500
"""Ids in one statement: SQLite had a limit of 999 parameters."""

_AMONG: Final = lease_table.c.transactional_id.in_(bindparam("ids", expanding=True))
_OURS: Final = (_AMONG, lease_table.c.owner == bindparam("owner_"))
_RENEW: Final = update(lease_table).where(*_OURS).values(leased_until=bindparam("until"))
_READ_OURS: Final = select(lease_table.c.transactional_id).where(*_OURS)
_RELEASE: Final = update(lease_table).where(*_OURS).values(owner=_NOBODY, leased_until=bindparam("now"))
_ACQUIRE: Final = update(lease_table).where(lease_table.c.transactional_id == bindparam("id"))
_INSERT: Final = insert(lease_table)
_LISTED: Final = begins_with_prefix(lease_table.c.transactional_id), lease_table.c.owner != _NOBODY


class SqlLeases(LeaseStore):
    """The leases of a SQL database.

    Args:
        short: Runs our own transactions.
    """

    def __init__(self, short: ShortTransactions) -> None:
        self._short = short

    def acquire(self, ids: Collection[str], owner: str, *, seconds: float) -> frozenset[str]:
        """See LeaseStore; in one transaction, which locks the rows in the order of their ids, as that of every other owner."""
        owner = owner[:MAX_OWNER_LENGTH]

        def work(connection: Connection) -> frozenset[str]:
            found = {
                row.transactional_id: row for row in connection.execute(_locking(connection.dialect.name), {"ids": sorted(ids)})
            }
            clock = next(iter(found.values())).clock if found else database_clock(connection)
            times = _times(clock, seconds)
            free = {name for name, row in found.items() if row.owner in (owner, _NOBODY) or row.leased_until <= times["now"]}
            values = {"owner": owner, "leased_until": times["until"]}
            for statement, names in ((_ACQUIRE, free), (_INSERT, set(ids) - found.keys())):
                if names:
                    key = "id" if statement is _ACQUIRE else "transactional_id"
                    connection.execute(statement, [{key: name, **values} for name in sorted(names)])
            return frozenset(free | (set(ids) - found.keys()))

        if not ids:
            return frozenset()
        try:
            return self._short.run(work, "leasing an id", min(ids))
        except StoreError as error:
            if not self._short.is_caused_by(error, ErrorClass.DUPLICATE):  # another owner has just inserted a row
                raise
            return self._short.run(work, "leasing an id", min(ids))

    def renew(self, ids: Collection[str], owner: str, *, seconds: float) -> frozenset[str]:
        """See LeaseStore."""
        owner = owner[:MAX_OWNER_LENGTH]

        def work(some: list[str], connection: Connection) -> list[str]:
            ours = {"ids": some, "owner_": owner}
            connection.execute(_RENEW, {**ours, "until": _times(database_clock(connection), seconds)["until"]})
            return list(connection.scalars(_READ_OURS, ours))

        chunks = [self._short.run(partial(work, some), "renewing leases") for some in _in_chunks(ids)]
        return frozenset(chain.from_iterable(chunks))

    def release(self, ids: Collection[str], owner: str) -> None:
        """See LeaseStore."""
        owner = owner[:MAX_OWNER_LENGTH]

        def work(some: list[str], connection: Connection) -> None:
            connection.execute(_RELEASE, {"ids": some, "owner_": owner, "now": _times(database_clock(connection), 0)["now"]})

        for some in _in_chunks(ids):
            self._short.run(partial(work, some), "releasing ids")

    def entries(self, prefix: str = "") -> list[Lease]:
        """See LeaseStore."""

        def work(connection: Connection) -> list[Lease]:
            rows = connection.execute(_listing(connection.dialect.name), prefix_parameters(prefix)).all()
            return [
                Lease(row.transactional_id, row.owner, (row.leased_until - _times(row.clock, 0)["now"]).total_seconds())
                for row in rows
            ]

        return sorted(self._short.query(work, "listing the leases"), key=lambda each: each.transactional_id)


@cache
def _locking(dialect: str) -> Select[Any]:
    """The rows of ids, locked, each with the database's clock."""
    return select(lease_table, clock_column(dialect)).where(_AMONG).order_by(lease_table.c.transactional_id).with_for_update()


@cache
def _listing(dialect: str) -> Select[Any]:
    """The leases of the ids that begin with a prefix, each with the database's clock."""
    return select(lease_table, clock_column(dialect)).where(*_LISTED)


def _times(clock: float, seconds: float) -> dict[str, datetime]:
    """Now by the database's clock, and when a lease of so many seconds ends."""
    now = datetime.fromtimestamp(float(clock), UTC)
    return {"now": now, "until": now + timedelta(seconds=seconds)}


def _in_chunks(ids: Collection[str]) -> list[list[str]]:
    every = sorted(ids)
    return [every[start : start + _MAX_IDS] for start in range(0, len(every), _MAX_IDS)]
