"""The statements on the rows of the state and on the database's identity."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    and_,
    bindparam,
    insert,
    literal_column,
    null,
    or_,
    select,
    update,
)

from dualwrite.stores.identity import StoreIdentity
from dualwrite.stores.sql.table import begins_with_prefix, columns_of, lease_table, prefix_parameters, state_row
from dualwrite.stores.sql.table import state_table as t
from dualwrite.stores.sql.table import store_table as s
from dualwrite.stores.state_row import StateRow

_READ: Final = select(t).where(t.c.transactional_id == bindparam("id"))
_LOCK: Final = _READ.with_for_update()
_AMONG: Final = t.c.transactional_id.in_(bindparam("ids", expanding=True))
_READ_ALL: Final = select(t).where(_AMONG)
_THIS_STORE: Final = select(s.c.identity).where(s.c.number == 1).scalar_subquery().label("this_store")
_LOCK_ALL: Final = select(t, _THIS_STORE).where(_AMONG).order_by(t.c.transactional_id).with_for_update()
_LOCK_ONLY: Final = select(t, null().label("this_store")).where(_AMONG).order_by(t.c.transactional_id).with_for_update()
_SINGLE_ROW: Final = select(literal_column("1").label("one")).subquery("single_row")
_WRITE_ALL: Final = update(t).where(t.c.transactional_id == bindparam("id"))
_INSERT: Final = insert(t)
_LIST: Final = select(t.c.transactional_id).where(begins_with_prefix(t.c.transactional_id), t.c.forgotten.is_(False))
_IDENTITY: Final = select(s.c.identity).where(s.c.number == 1)

ALL_COLUMNS: Final[tuple[Select[Any], ...]] = (
    *(select(table).where(table.c.transactional_id == "").limit(1) for table in (t, lease_table)),
    _IDENTITY,
)
"""One query for each table, which fails if the table or one of its columns is missing."""


def first_row(connection: Connection, query: Select[Any]) -> Row[Any] | None:
    """The first row of the result, if there is one."""
    return connection.execute(query).first()


# --- rows ---------------------------------------------------------------------------------------------------------------------


def read_row(connection: Connection, transactional_id: str) -> StateRow | None:
    """The row of an id, or None."""
    found = connection.execute(_READ, {"id": transactional_id}).mappings().one_or_none()
    return None if found is None else state_row(found)


def lock_row(connection: Connection, transactional_id: str) -> StateRow | None:
    """The row of an id, locked until the end of the transaction."""
    found = connection.execute(_LOCK, {"id": transactional_id}).mappings().one_or_none()
    return None if found is None else state_row(found)


def write_row(connection: Connection, row: StateRow) -> None:
    """Write all columns of a row that exists."""
    connection.execute(update(t).where(t.c.transactional_id == row.transactional_id).values(**columns_of(row)))


class LockedRows(NamedTuple):
    """Rows that are locked until the end of the transaction.

    Args:
        rows: By their ids; ids without a row are missing.
        identity: That of the database, if it was read: not on MariaDB and MySQL.
    """

    rows: dict[str, StateRow]
    identity: StoreIdentity | None


def lock_rows(connection: Connection, ids: Collection[str]) -> LockedRows:
    """Lock rows one after the other, in the order of their ids, as everybody does who locks several.

    What is read in this transaction afterwards is not older than the locks, under REPEATABLE READ either: on MariaDB and MySQL
    its snapshot begins with the first reading without a lock, so this statement has none.
    """
    lock = _LOCK_ONLY if connection.dialect.name in ("mariadb", "mysql") else _LOCK_ALL
    found = connection.execute(lock, {"ids": list(ids)}).mappings().all()
    identity = _identity_in(found[0]["this_store"]) if found else None
    return LockedRows({row.transactional_id: row for row in map(state_row, found)}, identity)


def read_rows(connection: Connection, ids: Collection[str]) -> dict[str, StateRow]:
    """The rows of ids, by their ids."""
    found = connection.execute(_READ_ALL, {"ids": list(ids)}).mappings()
    return {row.transactional_id: row for row in map(state_row, found)}


def write_rows(connection: Connection, rows: Collection[StateRow], *, existing: Collection[str]) -> None:
    """Write rows: all columns of those that exist, the others as new ones."""
    changed = [{"id": row.transactional_id, **columns_of(row)} for row in rows if row.transactional_id in existing]
    made = [
        {"transactional_id": row.transactional_id, **columns_of(row)} for row in rows if row.transactional_id not in existing
    ]
    for statement, parameters in ((_WRITE_ALL, changed), (_INSERT, made)):
        if parameters:
            connection.execute(statement, parameters if len(parameters) > 1 else parameters[0])


class LookedAt(NamedTuple):
    """What an opening reads first.

    Args:
        identity: Of the database; None if it has none.
        marks: What distinguishes the database from a copy, if that was asked for.
        rows: The rows.
    """

    identity: StoreIdentity | None
    marks: str | None
    rows: list[StateRow]


def look_at(connection: Connection, ids: Collection[str], lanes_prefix: str, marks: ColumnElement[Any] | None) -> LookedAt:
    """The rows of ids, the rows whose ids begin with the prefix, without tombstones, and the identity, in one query.

    Args:
        connection: The connection.
        ids: The ids.
        lanes_prefix: The prefix.
        marks: The column with the database's marks.
    """
    found = connection.execute(_looking(marks), {"ids": list(ids), **prefix_parameters(lanes_prefix)}).mappings().all()
    rows = [state_row(each) for each in found if each["transactional_id"] is not None]
    return LookedAt(_identity_in(found[0]["this_store"]), found[0]["these_marks"], rows)


@cache
def _looking(marks: ColumnElement[Any] | None) -> Select[Any]:
    lanes = and_(begins_with_prefix(t.c.transactional_id), t.c.forgotten.is_(False))
    # the fences of all rows are at least 1; on MySQL, SQLAlchemy warns if no condition is about both sides of the join
    is_wanted = and_(t.c.fence >= _SINGLE_ROW.c.one, or_(_AMONG, lanes))
    column = null() if marks is None else marks
    return select(t, _THIS_STORE, column.label("these_marks")).select_from(_SINGLE_ROW.outerjoin(t, is_wanted))


def list_ids(connection: Connection, prefix: str) -> list[str]:
    """The ids that begin with `prefix`, sorted, without tombstones."""
    found = connection.scalars(_LIST, prefix_parameters(prefix)).all()
    return sorted(found)  # sorted here, since collations differ between databases


# --- which database this is ---------------------------------------------------------------------------------------------------


def read_identity(connection: Connection) -> StoreIdentity | None:
    """The identity of the database, or None."""
    return _identity_in(connection.scalar(_IDENTITY))


def _identity_in(text: str | None) -> StoreIdentity | None:
    return None if text is None else StoreIdentity.parse(text)


def replace_identity(connection: Connection, identity: StoreIdentity, expected: StoreIdentity | None) -> bool:
    """Store the identity if the stored one is `expected` (None: there is none), and return whether it was."""
    if expected is None:
        connection.execute(insert(s).values(number=1, identity=str(identity)))
        return True
    kept = update(s).where(s.c.number == 1, s.c.identity == str(expected))
    return connection.execute(kept.values(identity=str(identity))).rowcount == 1


def identity_or_first(connection: Connection, first: StoreIdentity) -> StoreIdentity:
    """The identity of the database; `first` is stored in this transaction if there is none yet."""
    found = read_identity(connection)
    if found is not None:
        return found
    replace_identity(connection, first, None)
    return first
