"""Leases in the table `kafka_transaction_lease`: the primary key and conditional updates decide who gets an id.

The clock is read at the beginning of each transaction. If the transaction then waits for a lock, its time is in the past: it
leases fewer ids, and for a shorter time, never more.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain
from typing import Final

from sqlalchemy import Connection, bindparam, insert, or_, select, update

from dualwrite.errors import StoreError
from dualwrite.stores.leases import Lease, LeaseStore
from dualwrite.stores.sql.clock import database_clock
from dualwrite.stores.sql.dialect import ErrorClass
from dualwrite.stores.sql.short import ShortTransactions
from dualwrite.stores.sql.table import begins_with_prefix, prefix_parameters
from dualwrite.stores.sql.table import lease_table as t
from dualwrite.stores.state_row import MAX_OWNER_LENGTH

_NOBODY: Final = ""
"""The owner of an id that was released. Rows are not deleted: that would need one more privilege."""

_MAX_IDS: Final = 500
"""Ids in one statement: SQLite had a limit of 999 parameters."""

_OURS: Final = (t.c.transactional_id.in_(bindparam("ids", expanding=True)), t.c.owner == bindparam("owner_"))
_RENEW: Final = update(t).where(*_OURS).values(leased_until=bindparam("until"))
_READ_OURS: Final = select(t.c.transactional_id).where(*_OURS)
_RELEASE: Final = update(t).where(*_OURS).values(owner=_NOBODY, leased_until=bindparam("now"))
_ACQUIRE: Final = (
    update(t)
    .where(
        t.c.transactional_id == bindparam("id"),
        or_(t.c.owner == bindparam("owner_"), t.c.owner == _NOBODY, t.c.leased_until <= bindparam("now")),
    )
    .values(owner=bindparam("owner_"), leased_until=bindparam("until"))
)
_EXISTS: Final = select(t.c.transactional_id).where(t.c.transactional_id == bindparam("id"))
_INSERT: Final = insert(t)
_LIST: Final = select(t).where(begins_with_prefix(t.c.transactional_id), t.c.owner != _NOBODY)


class SqlLeases(LeaseStore):
    """The leases of a SQL database.

    Args:
        short: Runs our own transactions.
    """

    def __init__(self, short: ShortTransactions) -> None:
        self._short = short

    def acquire(self, ids: Collection[str], owner: str, *, seconds: float) -> frozenset[str]:
        """See LeaseStore; one transaction for each id, so that no two owners wait for each other."""
        owner = owner[:MAX_OWNER_LENGTH]
        return frozenset(name for name in sorted(ids) if self._acquire(name, owner, seconds))

    def _acquire(self, transactional_id: str, owner: str, seconds: float) -> bool:
        def work(connection: Connection) -> bool:
            parameters = {"id": transactional_id, "owner_": owner, **_times(connection, seconds)}
            if connection.execute(_ACQUIRE, parameters).rowcount == 1:
                return True
            if connection.scalar(_EXISTS, {"id": transactional_id}) is not None:
                return False
            row = {"transactional_id": transactional_id, "owner": owner, "leased_until": parameters["until"]}
            connection.execute(_INSERT, row)
            return True

        try:
            return self._short.run(work, "leasing an id", transactional_id)
        except StoreError as error:
            if not self._short.is_caused_by(error, ErrorClass.DUPLICATE):  # another owner has just inserted the row
                raise
            return self._short.run(work, "leasing an id", transactional_id)

    def renew(self, ids: Collection[str], owner: str, *, seconds: float) -> frozenset[str]:
        """See LeaseStore."""
        owner = owner[:MAX_OWNER_LENGTH]

        def work(some: list[str], connection: Connection) -> list[str]:
            ours = {"ids": some, "owner_": owner}
            connection.execute(_RENEW, {**ours, "until": _times(connection, seconds)["until"]})
            return list(connection.scalars(_READ_OURS, ours))

        chunks = [self._short.run(partial(work, some), "renewing leases") for some in _in_chunks(ids)]
        return frozenset(chain.from_iterable(chunks))

    def release(self, ids: Collection[str], owner: str) -> None:
        """See LeaseStore."""
        owner = owner[:MAX_OWNER_LENGTH]

        def work(some: list[str], connection: Connection) -> None:
            connection.execute(_RELEASE, {"ids": some, "owner_": owner, "now": _times(connection, 0)["now"]})

        for some in _in_chunks(ids):
            self._short.run(partial(work, some), "releasing ids")

    def entries(self, prefix: str = "") -> list[Lease]:
        """See LeaseStore."""

        def work(connection: Connection) -> list[Lease]:
            now = _times(connection, 0)["now"]
            rows = connection.execute(_LIST, prefix_parameters(prefix))
            return [Lease(row.transactional_id, row.owner, (row.leased_until - now).total_seconds()) for row in rows]

        return sorted(self._short.query(work, "listing the leases"), key=lambda each: each.transactional_id)


def _times(connection: Connection, seconds: float) -> dict[str, datetime]:
    """Now by the database's clock, and when a lease of so many seconds ends."""
    now = datetime.fromtimestamp(database_clock(connection), UTC)
    return {"now": now, "until": now + timedelta(seconds=seconds)}


def _in_chunks(ids: Collection[str]) -> list[list[str]]:
    every = sorted(ids)
    return [every[start : start + _MAX_IDS] for start in range(0, len(every), _MAX_IDS)]
