"""The tables of dualwrite, except those of jobs, and the conversion of the state table's rows.

They belong to a separate MetaData, so that autogenerate of the user's alembic does not treat them as the user's tables.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, Final, Literal, NamedTuple

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    DateTime,
    Dialect,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    RowMapping,
    Select,
    String,
    Table,
    Text,
    UniqueConstraint,
    and_,
    bindparam,
    func,
    insert,
    literal_column,
    null,
    or_,
    select,
    update,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine

from dualwrite.errors import StoredStateError
from dualwrite.state import MAX_TOPIC_LENGTH, ProducerKind
from dualwrite.stores.identity import StoreIdentity
from dualwrite.stores.positions import MAX_GROUP_LENGTH
from dualwrite.stores.rows import MAX_OWNER_LENGTH, StateRow, parse_lost, row_of, values_of
from dualwrite.transactional_id import LANE_MARK, name_of

MYSQL: Final = ("mysql", "mariadb")
"""SQLAlchemy's names."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime in UTC, also where the database (SQLite, MariaDB, MySQL) stores no time zone.

    PostgreSQL sends it as a number: as a text it would depend on the session's DateStyle and TimeZone.
    """

    impl = DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """MySQL's DATETIME has whole seconds by default; its TIMESTAMP would depend on the session's time zone."""
        return dialect.type_descriptor(mysql.DATETIME(fsp=6) if dialect.name in MYSQL else DateTime(timezone=True))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """To what the driver accepts: if the stored value has no offset, it must be in UTC."""
        if value is None:
            return None
        value = value.astimezone(UTC)
        return value if dialect.name == "postgresql" else value.replace(tzinfo=None)

    def column_expression(self, column: ColumnElement[Any]) -> ColumnElement[Any]:
        """What is selected."""
        return _Sent(column, type_=self)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        """To UTC, whatever the session's time zone is."""
        del dialect
        if value is None:
            return None
        if isinstance(value, datetime):
            return value.replace(tzinfo=UTC)  # it has none: see process_bind_param
        return _EPOCH + timedelta(microseconds=int(value))


class _Sent(FunctionElement[Any]):
    """A time as the database sends it: on PostgreSQL as microseconds since 1970."""

    inherit_cache = True

    def __init__(self, column: ColumnElement[Any], type_: TypeEngine[Any]) -> None:
        super().__init__(column)
        self.type = type_


@compiles(_Sent)
def _as_it_is(element: _Sent, compiler: SQLCompiler, **options: Any) -> str:
    return compiler.process(element.clauses, **options)


@compiles(_Sent, "postgresql")
def _as_number(element: _Sent, compiler: SQLCompiler, **options: Any) -> str:
    return f"(extract(epoch FROM {compiler.process(element.clauses, **options)}) * 1000000)::bigint"


class Words(TypeDecorator[str]):
    """A text; as bytes if the session's client_encoding is SQL_ASCII (PostgreSQL), or the driver was told to give bytes."""

    impl = String
    cache_ok = True

    def process_result_value(self, value: Any, dialect: Dialect) -> str | None:
        """To a str."""
        del dialect
        return None if value is None else decoded(value)


class LongWords(Words):
    """The same without a limit.

    Args:
        size: On MySQL, "medium" for up to 16 MiB instead of 64 KiB, "long" for up to 4 GiB.
    """

    impl = Text
    cache_ok = True

    def __init__(self, *, size: Literal["medium", "long"] | None = None) -> None:
        super().__init__()
        self.size = size

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if self.size is None or dialect.name not in MYSQL:
            return super().load_dialect_impl(dialect)
        return mysql.MEDIUMTEXT() if self.size == "medium" else mysql.LONGTEXT()


def decoded(value: Any) -> str:
    """A text that the driver may have returned as bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


TABLE_NAME: Final = "kafka_transaction_state"
STORE_TABLE_NAME: Final = "kafka_transaction_store"
LEASE_TABLE_NAME: Final = "kafka_transaction_lease"
POSITION_TABLE_NAME: Final = "kafka_consumed_offset"
DEAD_LETTER_TABLE_NAME: Final = "dualwrite_dead_letter"
JOURNAL_TABLE_NAME: Final = "dualwrite_journal"
LATER_TABLE_NAME: Final = "dualwrite_journal_later"
GATE_TABLE_NAME: Final = "dualwrite_journal_gate"
VERSION_TABLE_NAME: Final = "kafka_transaction_state_version"
_UUID_LENGTH: Final = 36

metadata: Final = MetaData()

state_table: Final = Table(
    TABLE_NAME,
    metadata,
    Column("transactional_id", Words(255), primary_key=True),
    Column("fence", BigInteger, nullable=False),
    Column("generation", Integer, nullable=False, server_default="0"),
    Column("prepared_transaction_state", Words(64), nullable=False, server_default=""),
    Column("prepared_generation", Integer, nullable=False, server_default="0"),
    Column("delivery", LongWords(), nullable=True),
    Column("resolved_generation", Integer, nullable=False, server_default="0"),
    Column("transaction_number", BigInteger, nullable=False, server_default="0"),
    Column("lost", LongWords(size="medium"), nullable=False),
    Column("owner", Words(MAX_OWNER_LENGTH), nullable=False, server_default=""),
    Column("claim_token", Words(32), nullable=False, server_default=""),
    Column("updated_at", UtcDateTime, nullable=False),
    Column("forgotten", Boolean, nullable=False),
    Column("cluster_id", Words(255), nullable=False, server_default=""),
    Column("store_id", Words(32), nullable=False, server_default=""),
    Column("generation_kind", Words(16), nullable=False, server_default=ProducerKind.LIBRDKAFKA.value),
)


store_table: Final = Table(
    STORE_TABLE_NAME,
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("identity", LongWords(), nullable=False),
)
"""One row, with the number 1: which database this is (`StoreIdentity`)."""


lease_table: Final = Table(
    LEASE_TABLE_NAME,
    metadata,
    Column("transactional_id", Words(255), primary_key=True),
    Column("owner", Words(MAX_OWNER_LENGTH), nullable=False),
    Column("leased_until", UtcDateTime, nullable=False),
    Column("lease_ms", BigInteger, nullable=False),
)
"""One row for each id that was ever leased, with the length of the lease. A released id has the owner ''."""


position_table: Final = Table(
    POSITION_TABLE_NAME,
    metadata,
    Column("group_id", Words(MAX_GROUP_LENGTH), primary_key=True),
    Column("topic", Words(MAX_TOPIC_LENGTH), primary_key=True),
    Column("partition_number", Integer, primary_key=True, autoincrement=False),
    Column("next_offset", BigInteger, nullable=False),
    Column("topic_id", Words(_UUID_LENGTH), nullable=False, server_default=""),
    Column("updated_at", UtcDateTime, nullable=False),
)
"""One row for each consumer group and partition that was read: the next offset."""


dead_letter_table: Final = Table(
    DEAD_LETTER_TABLE_NAME,
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("relay", Words(255), nullable=False),
    Column("source_table", Words(255), nullable=False),
    Column("source_id", Words(255), nullable=False),
    Column("source_row", LongWords(size="long"), nullable=False),
    Column("topic", Words(MAX_TOPIC_LENGTH), nullable=True),
    Column("error_kind", Words(255), nullable=False),
    Column("error", LongWords(), nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("failed_at", UtcDateTime, nullable=False),
)
"""One row for each row of an outbox that could not be sent; `source_row` is that row as JSON."""


gate_table: Final = Table(
    GATE_TABLE_NAME,
    metadata,
    Column("prefix", Words(255), primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("changed_at", UtcDateTime, nullable=False),
    Column("changed_by", Words(MAX_OWNER_LENGTH), nullable=False),
    Column("max_entries", BigInteger, nullable=True),
    Column("max_size", BigInteger, nullable=True),
    Column("max_age_ms", BigInteger, nullable=True),
    Column("failure", LongWords(), nullable=True),
)
"""One row for each prefix with a journal. `epoch` counts its openings and closings: the gate is open while it is odd.

The limits are those of the process that has opened it the last time; `failure` is why entries can't be published.
"""


def _columns_of_messages() -> tuple[Column[Any], ...]:
    return (
        Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
        Column("prefix", Words(255), nullable=False),
        Column("topic", Words(MAX_TOPIC_LENGTH), nullable=False),
        Column("message_key", LargeBinary().with_variant(mysql.LONGBLOB(), *MYSQL), nullable=True),
        Column("message_value", LargeBinary().with_variant(mysql.LONGBLOB(), *MYSQL), nullable=True),
        Column("headers", LongWords(size="long"), nullable=True),
        Column("partition_number", Integer, nullable=True),
        Column("sent_at_ms", BigInteger, nullable=False),
        Column("has_own_time", Boolean, nullable=False),
        Column("size", Integer, nullable=False),
    )


journal_table: Final = Table(
    JOURNAL_TABLE_NAME,
    metadata,
    *_columns_of_messages(),
    Index("ix_dualwrite_journal_prefix", "prefix", "id"),
)
"""One row for each message of a unit that was committed while the gate was open, until it is published."""


later_table: Final = Table(
    LATER_TABLE_NAME,
    metadata,
    *_columns_of_messages(),
    Column("due_ms", BigInteger, nullable=False),
    Column("cancel_id", Words(255), nullable=True),
    UniqueConstraint("prefix", "cancel_id", name="uq_dualwrite_journal_later"),
    Index("ix_dualwrite_journal_later_due", "prefix", "due_ms", "id"),
)
"""One row for each message that waits for its time, `due_ms` since 1970; `cancel_id` names it, if it may be cancelled."""


def begins_with_prefix(column: ColumnElement[str]) -> ColumnElement[bool]:
    """The condition that a text begins with the prefix in `prefix_parameters`.

    By substr instead of LIKE: nothing to escape, and SQLite's LIKE is case-insensitive. Without a prefix its result is not
    used: with MariaDB's sql_mode ORACLE it is NULL.
    """
    length = bindparam("length", type_=Integer)
    return or_(length == 0, func.substr(column, 1, length) == bindparam("prefix"))


def prefix_parameters(prefix: str) -> dict[str, str | int]:
    """The parameters of `begins_with_prefix`."""
    return {"prefix": prefix, "length": len(prefix)}


def state_row(columns: RowMapping) -> StateRow:
    """A stored row as the contract's value.

    Raises:
        StoredStateError: The prepared state, the kind of producer or the list of lost transactions can't be parsed.
    """
    transactional_id = columns["transactional_id"]
    try:
        values = {**columns, "delivery": columns["delivery"] or ""}
        return row_of(transactional_id, values, parse_lost(transactional_id, columns["lost"]))
    except StoredStateError as error:
        error.transactional_id = transactional_id
        raise


def columns_of(row: StateRow) -> dict[str, Any]:
    """The row's columns except the key; `state_row` reads them."""
    values = values_of(row)
    return {**values, "lost": json.dumps(values["lost"])}


_AMONG: Final = state_table.c.transactional_id.in_(bindparam("ids", expanding=True))
_READ_ALL: Final = select(state_table).where(_AMONG)
_THIS_STORE: Final = select(store_table.c.identity).where(store_table.c.number == 1).scalar_subquery().label("this_store")
_LOCK_ALL: Final = select(state_table, _THIS_STORE).where(_AMONG).order_by(state_table.c.transactional_id).with_for_update()
_LOCK_ONLY: Final = (
    select(state_table, null().label("this_store")).where(_AMONG).order_by(state_table.c.transactional_id).with_for_update()
)
_SINGLE_ROW: Final = select(literal_column("1").label("one")).subquery("single_row")
_WRITE_ALL: Final = update(state_table).where(state_table.c.transactional_id == bindparam("id"))
_INSERT: Final = insert(state_table)
_LIST: Final = select(state_table.c.transactional_id).where(
    begins_with_prefix(state_table.c.transactional_id), state_table.c.forgotten.is_(False)
)
_IS_LANE: Final = func.substr(state_table.c.transactional_id, 1, bindparam("lanes_length", type_=Integer)) == bindparam("lanes")
_AROUND: Final = select(state_table.c.transactional_id, state_table.c.cluster_id).where(
    begins_with_prefix(state_table.c.transactional_id),
    state_table.c.forgotten.is_(False),
    or_(_IS_LANE, state_table.c.cluster_id != bindparam("seen")),
)
_IDENTITY: Final = select(store_table.c.identity).where(store_table.c.number == 1)

_ALL_COLUMNS: Final[tuple[Select[Any], ...]] = (
    *(select(table).where(table.c.transactional_id == "").limit(1) for table in (state_table, lease_table)),
    _IDENTITY,
)


def check_tables(connection: Connection) -> None:
    """Read from each table; an error of the database shows that one of them, or of their columns, is missing."""
    for query in _ALL_COLUMNS:
        connection.execute(query).first()


# --- rows ---------------------------------------------------------------------------------------------------------------------


class LockedRows(NamedTuple):
    """Rows that are locked until the end of the transaction, by their ids; with the identity, except on MariaDB and MySQL."""

    rows: dict[str, StateRow]
    identity: StoreIdentity | None


def lock_rows(connection: Connection, ids: Collection[str]) -> LockedRows:
    """Lock rows one after the other, in the order of their ids, as everybody does who locks several.

    What is read in this transaction afterwards is not older than the locks, under REPEATABLE READ either: on MariaDB and MySQL
    its snapshot begins with the first reading without a lock, so this statement has none.
    """
    lock = _LOCK_ONLY if connection.dialect.name in MYSQL else _LOCK_ALL
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
    """What an opening reads first; `marks` are what distinguishes the database from a copy, if that was asked for."""

    identity: StoreIdentity | None
    marks: str | None
    rows: list[StateRow]


def look_at(connection: Connection, ids: Collection[str], lanes_prefix: str, marks: ColumnElement[Any] | None) -> LookedAt:
    """The rows of ids, the rows whose ids begin with the prefix, without tombstones, and the identity, in one query."""
    found = connection.execute(_looking(marks), {"ids": list(ids), **prefix_parameters(lanes_prefix)}).mappings().all()
    rows = [state_row(each) for each in found if each["transactional_id"] is not None]
    return LookedAt(_identity_in(found[0]["this_store"]), found[0]["these_marks"], rows)


@cache
def _looking(marks: ColumnElement[Any] | None) -> Select[Any]:
    lanes = and_(begins_with_prefix(state_table.c.transactional_id), state_table.c.forgotten.is_(False))
    # the fences of all rows are at least 1; on MySQL, SQLAlchemy warns if no condition is about both sides of the join
    is_wanted = and_(state_table.c.fence >= _SINGLE_ROW.c.one, or_(_AMONG, lanes))
    column = null() if marks is None else marks
    return select(state_table, _THIS_STORE, column.label("these_marks")).select_from(
        _SINGLE_ROW.outerjoin(state_table, is_wanted)
    )


def look_around(connection: Connection, transactional_id: str, cluster_id: str | None) -> tuple[list[str], dict[str, str]]:
    """The lanes of an id and, with a cluster, what `TxnStateStore.elsewhere` returns for its name, in one query."""
    lanes, name = transactional_id + LANE_MARK, name_of(transactional_id)
    parameters = {**prefix_parameters(name), "lanes": lanes, "lanes_length": len(lanes), "seen": cluster_id}
    found = {row.transactional_id: row.cluster_id for row in connection.execute(_AROUND, parameters)}
    elsewhere = {each: on for each, on in found.items() if on not in ("", cluster_id) and name_of(each) == name}
    return [each for each in found if each.startswith(lanes)], elsewhere


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
        connection.execute(insert(store_table).values(number=1, identity=str(identity)))
        return True
    kept = update(store_table).where(store_table.c.number == 1, store_table.c.identity == str(expected))
    return connection.execute(kept.values(identity=str(identity))).rowcount == 1


def locked_identity(connection: Connection, first: StoreIdentity) -> StoreIdentity:
    """As `identity_or_first`, locked until the end of the transaction: names get their clusters one after the other (rule CL).

    By an UPDATE, not SELECT FOR UPDATE: under REPEATABLE READ a transaction that has waited for it begins again.
    """
    connection.execute(update(store_table).where(store_table.c.number == 1).values(identity=store_table.c.identity))
    return identity_or_first(connection, first)


def identity_or_first(connection: Connection, first: StoreIdentity) -> StoreIdentity:
    """The identity of the database; `first` is stored in this transaction if there is none yet."""
    found = read_identity(connection)
    if found is not None:
        return found
    replace_identity(connection, first, None)
    return first
