"""The statements on the rows of the state and on the database's identity."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, Row, Select, bindparam, insert, select, update

from dualwrite.stores.identity import StoreIdentity
from dualwrite.stores.sql.table import begins_with_prefix, columns_of, lease_table, prefix_parameters, state_row
from dualwrite.stores.sql.table import state_table as t
from dualwrite.stores.sql.table import store_table as s
from dualwrite.stores.state_row import StateRow

_READ: Final = select(t).where(t.c.transactional_id == bindparam("id"))
_LOCK: Final = _READ.with_for_update()
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


def list_ids(connection: Connection, prefix: str) -> list[str]:
    """The ids that begin with `prefix`, sorted, without tombstones."""
    found = connection.scalars(_LIST, prefix_parameters(prefix)).all()
    return sorted(found)  # sorted here, since collations differ between databases


# --- which database this is ---------------------------------------------------------------------------------------------------


def read_identity(connection: Connection) -> StoreIdentity | None:
    """The identity of the database, or None."""
    found = connection.scalar(_IDENTITY)
    return None if found is None else StoreIdentity.parse(found)


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
