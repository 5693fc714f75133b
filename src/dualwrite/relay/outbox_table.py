"""An outbox table in a SQL database: made in the generic layout; or by any layout checked, and its rows as a `Source`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from sqlalchemy import URL, Connection, Engine, Select, literal_column, select, text
from sqlalchemy.exc import SQLAlchemyError

from dualwrite.errors import ConfigurationError, InvalidMessageError, StoreError
from dualwrite.kafka.base import Message
from dualwrite.relay.layout import GENERIC, OutboxLayout, RowMapper
from dualwrite.relay.outbox_sql import LIMITS, MYSQL, Shard, is_integer, is_time, statements, table_of
from dualwrite.relay.source import Source, fitting
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.engines import dialect_of, make_engine, parse_url
from dualwrite.stores.sql.home import quoted
from dualwrite.stores.sql.sql_errors import ErrorMap

_MAX_IDS: Final = 500
"""Ids in one statement, except on PostgreSQL, where they are one parameter: SQLite had a limit of 999 parameters."""

_SQLITE_COLUMNS: Final = text("SELECT name, type FROM pragma_table_info(:name)")

Row = Sequence[Any]


class OutboxTable(Source):
    """The rows of an outbox, or of a shard of it.

    Args:
        store: The database.
        layout: The table and its columns.
        shard: Only rows of this shard.

    Raises:
        ConfigurationError: The table or a column does not exist, or the ids have no order.
        StoreUnavailableError: The database can't be reached.
    """

    def __init__(self, store: SqlStateStore, layout: OutboxLayout, shard: Shard | None = None) -> None:
        self._layout = layout
        self._mapper = RowMapper(layout)
        self._id = layout.read_columns.index(layout.id)
        self._store = store
        self._dialect = store.engine.dialect.name
        self._has_time_texts = self._dialect == "sqlite" and layout.not_before is not None
        types = self._checked_types()
        if layout.order_by is None and not is_integer(self._dialect, types[layout.id]):
            raise _no_order(layout)
        self._sql = statements(layout, types, self._dialect, shard)
        if shard is None or not shard.number:  # those of the other shards differ in a number
            self._check_statements()

    @property
    def name(self) -> str:
        return self._layout.table

    def _checked_types(self) -> Mapping[str, Any]:
        """The type of each column, as the driver or SQLite's declaration has it."""
        table, database = self._layout.table, self._store.description
        try:
            found = self._store.short_transactions.query(self._types, f"looking at the table {table}")
        except StoreError as error:
            if error.retriable:
                raise
            raise _no_table(table, database, str(error.cause or error.what)) from error
        if not found:
            raise _no_table(table, database, "there is no such table")
        missing = [column for column in self._layout.columns if column not in found]
        if missing:
            raise ConfigurationError(
                f"The table {table!r} in {database} has no column {', '.join(map(repr, missing))}.",
                cause=f"it has the columns {', '.join(found)}",
                next_step="add them, or give the layout the names of the table's columns (None: there is none)",
            )
        for name in ("not_before", "created"):
            column = getattr(self._layout, name)
            if column is not None and not is_time(self._dialect, found[column]):
                raise ConfigurationError(
                    f"The column {column!r} of {table!r} in {database}, the layout's {name}, has no type for times.",
                    next_step="convert it, for example to timestamptz or datetime(6), or leave it out",
                )
        return found

    def _check_statements(self) -> None:
        for option, statement in self._sql.checks.items():
            try:
                self._store.short_transactions.query(partial(_run, statement=statement), f"trying {option}")
            except StoreError as error:
                if error.retriable:
                    raise
                raise ConfigurationError(
                    f"The option {option} of the outbox {self.name!r} is no SQL that {self._store.description} can run.",
                    cause=str(error.cause or error.what),
                    next_step="check the names and types in it",
                ) from error

    def _types(self, connection: Connection) -> Mapping[str, Any]:
        table = table_of(self._layout.table)
        if self._dialect == "sqlite":
            found = connection.execute(_SQLITE_COLUMNS, {"name": table.name}).all()
            return {row[0]: row[1].upper() for row in found}
        nothing = select(text("*")).select_from(table).where(literal_column("1 = 0"))
        cursor: Any = connection.execute(nothing).cursor
        return {each[0]: each[1] for each in cursor.description}

    # --- the contract of a source -----------------------------------------------------------------------------------------

    def has_rows(self, connection: Connection) -> bool:
        return connection.execute(self._sql.any).first() is not None

    def read(self, connection: Connection, most: int, size: int) -> tuple[Sequence[Row], bool]:
        if self._dialect == "postgresql":
            connection.execute(LIMITS)
        found = connection.execute(self._sql.sizes, {"most": most}).all()
        fit = fitting((row[1] for row in found), size)
        if self._dialect not in MYSQL:
            return connection.execute(self._sql.read, {"most": fit}).all() if fit else (), fit < len(found)
        rows: list[Row] = []
        for ids in _in_chunks([row[0] for row in found[:fit]]):
            rows += connection.execute(self._sql.read, {"ids": ids}).all()
        return rows, fit < len(found)

    def messages(self, row: Row) -> Sequence[Message]:
        if self._has_time_texts and row[-1] is not None:
            raise InvalidMessageError(
                f"The column {self._layout.not_before!r} has {row[-1]!r}, which SQLite can't read as a time.",
                next_step="write times as 2026-11-28 12:00:00, with a T instead of the space if you like, with fractions of a "
                "second, and with Z or +01:00 at the end if they are not in UTC; a replay publishes the row at once",
            )
        return (self._mapper(row),)

    def remove(self, connection: Connection, rows: Sequence[Row]) -> None:
        ids = [row[self._id] for row in rows]
        chunks = [ids] if self._dialect == "postgresql" else _in_chunks(ids)
        removed = sum(connection.execute(self._sql.remove, {"ids": some}).rowcount for some in chunks)
        if removed != len(ids):
            raise StoreError(
                f"{removed} rows of {self.name!r} were removed instead of the {len(ids)} that were read: all is undone.",
                cause=f"the column {self._layout.id!r} is not unique, or a trigger or a policy keeps rows from being removed",
                next_step="make it unique, and let the relay's user remove the rows",
            )

    def identify(self, row: Row) -> str:
        return str(row[self._id])

    def all_columns(self, connection: Connection, row: Row) -> Mapping[str, Any]:
        """All columns; those that a message is made of as `read` has returned them."""
        found = connection.execute(self._sql.whole, {"id": row[self._id]}).mappings().one()
        read = dict(zip(self._layout.read_columns, row[: len(self._layout.read_columns)], strict=True))
        return {**{str(name): value for name, value in found.items()}, **read}

    # --- for people -------------------------------------------------------------------------------------------------------

    def waiting(self) -> tuple[int, int, float | None]:
        """What is in the outbox now. Counts its rows.

        Returns:
            The number of rows that could be published now; of those whose `not_before` is in the future; and the age of the
            oldest of the former in seconds, None if there is none, or the layout has no `created`.

        Raises:
            StoreError: The database can't be reached, or has refused the query.
        """
        return self._store.short_transactions.query(self._waiting, f"counting the rows of {self.name}")

    def _waiting(self, connection: Connection) -> tuple[int, int, float | None]:
        later = None if self._sql.later is None else connection.scalar(self._sql.later)
        oldest = None if self._sql.oldest is None else connection.scalar(self._sql.oldest)
        age = None if oldest is None else max(0.0, float(oldest))
        return connection.scalar(self._sql.count) or 0, later or 0, age


def _run(connection: Connection, statement: Select[Any]) -> None:
    connection.execute(statement).all()


def _in_chunks(ids: Sequence[Any]) -> Iterator[list[Any]]:
    return (list(ids[start : start + _MAX_IDS]) for start in range(0, len(ids), _MAX_IDS))


def _no_table(table: str, database: str, cause: str) -> ConfigurationError:
    return ConfigurationError(
        f"The outbox table {table!r} in {database} can't be read.",
        cause=cause,
        next_step="give the layout the table's name (schema.name, if it is in another schema), and the relay's user the "
        "privileges to read, lock and remove its rows; `dualwrite relay create-table` makes a new table",
    )


def _no_order(layout: OutboxLayout) -> ConfigurationError:
    return ConfigurationError(
        f"The column {layout.id!r} of {layout.table!r} is no integer, so it does not say in which order rows are published.",
        next_step="give the layout order_by=…: a column that grows from one insert to the next (such as a bigserial or an "
        "auto_increment), or the id itself if it does, as ULIDs and UUIDs of version 7 do",
    )


# --- the order of ids -----------------------------------------------------------------------------------------------------

_POSTGRESQL: Final = text(
    """
    WITH id(attrelid, attnum) AS (
        SELECT a.attrelid, a.attnum FROM pg_catalog.pg_attribute a
        WHERE a.attrelid = pg_catalog.to_regclass(:table) AND a.attname = :column
    )
    SELECT CAST(s.seqrelid AS pg_catalog.regclass)::text, s.seqcache FROM pg_catalog.pg_sequence s
    WHERE s.seqcache > 1 AND s.seqrelid IN (
        SELECT d.objid FROM pg_catalog.pg_depend d JOIN id ON d.refobjid = id.attrelid AND d.refobjsubid = id.attnum
        UNION SELECT d.refobjid FROM pg_catalog.pg_depend d
        JOIN pg_catalog.pg_attrdef f ON f.oid = d.objid JOIN id ON f.adrelid = id.attrelid AND f.adnum = id.attnum
    )
    """
)
_MARIADB: Final = text(
    "SELECT REGEXP_SUBSTR(COLUMN_DEFAULT, '(?<=nextval[(]).*(?=[)])') FROM information_schema.COLUMNS "
    "WHERE TABLE_SCHEMA = COALESCE(:schema, DATABASE()) AND TABLE_NAME = :table AND COLUMN_NAME = :column "
    "AND COLUMN_DEFAULT LIKE 'nextval(%'"
)


def why_unordered(store: SqlStateStore, layout: OutboxLayout) -> str | None:
    """Why rows may be published in another order than that of their inserts, as a sentence; None if nothing shows it.

    Each session takes a block of numbers from a sequence with a cache, and uses it up later.
    """
    table, column = layout.table, layout.order_by or layout.id
    try:
        found = store.short_transactions.query(partial(_sequence, table=table, column=column), f"looking at the ids of {table}")
    except StoreError:  # no privilege to read a sequence, for example
        return None
    if found is None or found[1] <= 1:
        return None
    return (
        f"The sequence {found[0]} of {table}.{column} has CACHE {found[1]}: each session uses up a block of ids, so rows of a "
        "key may be published in another order than that of their inserts. "
        f"ALTER SEQUENCE {found[0]} {'CACHE 1' if store.engine.dialect.name == 'postgresql' else 'NOCACHE'} keeps it."
    )


def _sequence(connection: Connection, table: str, column: str) -> tuple[str, int] | None:
    """The sequence that the column's numbers are from, and how many of them it hands out at once."""
    of, dialect = table_of(table), connection.dialect
    if dialect.name == "postgresql":
        full = ".".join(quoted(dialect.name, part) for part in (of.schema, of.name) if part is not None)
        row = connection.execute(_POSTGRESQL, {"table": full, "column": column}).first()
        return None if row is None else (row[0], row[1])
    if not getattr(dialect, "is_mariadb", False):  # the others have none
        return None
    sequence = connection.scalar(_MARIADB, {"schema": of.schema, "table": of.name, "column": column})
    if not sequence:
        return None
    query = f"SELECT cache_size FROM {sequence}"  # noqa: S608  (quoted, as the database has it)
    return sequence, connection.exec_driver_sql(query, execution_options={"no_parameters": True}).scalar_one()


# --- making one ------------------------------------------------------------------------------------------------------------

_CREATE_SECONDS: Final = 10.0
_GENERIC_COLUMNS: Final = {
    "postgresql": (
        "id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY",
        "topic text NOT NULL",
        "key bytea",
        "value bytea",
        "headers json",
        "partition_number integer",
        "not_before timestamptz",
        "created_at timestamptz NOT NULL DEFAULT now()",
    ),
    "mysql": (
        "id bigint AUTO_INCREMENT PRIMARY KEY",
        "topic varchar(249) NOT NULL",
        "`key` varbinary(3000)",
        "value longblob",
        "headers json",
        "partition_number integer",
        "not_before datetime(6)",
        "created_at datetime(6) NOT NULL DEFAULT (utc_timestamp(6))",
    ),
    "sqlite": (
        "id integer PRIMARY KEY AUTOINCREMENT",
        "topic text NOT NULL",
        '"key" blob',
        "value blob",
        "headers text",
        "partition_number integer",
        "not_before text",
        "created_at text NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now'))",
    ),
}


def table_sql(database: str | URL | Engine, table: str = GENERIC.table, *, channel: str | None = None) -> list[str]:
    """The statements that create an outbox in the generic layout. Does not connect to the database.

    Args:
        database: A URL as for the store, or an engine.
        table: The table's name, `name` or `schema.name`.
        channel: A channel for NOTIFY, which a trigger does after each statement that inserts rows (PostgreSQL).

    Raises:
        ConfigurationError: There is no such layout for the database, or it has no NOTIFY.
    """
    dialect = database.dialect if isinstance(database, Engine) else parse_url(database)[0].get_dialect()()
    name = "mysql" if dialect.name == "mariadb" else dialect.name
    if name not in _GENERIC_COLUMNS:
        raise ConfigurationError(f"There is no outbox for the database {name!r}.")
    if channel is not None and name != "postgresql":
        raise ConfigurationError("Only PostgreSQL has NOTIFY.", next_step="leave the channel out: the relay polls")
    preparer = dialect.identifier_preparer

    def quote(part: str) -> str:
        return part if preparer.quote(part) == part else quoted(dialect.name, part)

    full = ".".join(map(quote, table.split(".")))
    lines = ",\n  ".join(_GENERIC_COLUMNS[name])
    options = " ENGINE=InnoDB CHARACTER SET utf8mb4" if name == "mysql" else ""
    made = [f"CREATE TABLE {full} (\n  {lines}\n){options}"]
    if channel is not None:
        schema, _, last = table.rpartition(".")
        trigger, literal = quote(f"{last}_notify"), channel.replace("'", "''")
        function = f"{quote(schema)}.{trigger}" if schema else trigger
        body = f"BEGIN PERFORM pg_notify('{literal}', ''); RETURN NULL; END"
        made += [
            f"CREATE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS $$ {body} $$",
            f"CREATE TRIGGER {trigger} AFTER INSERT ON {full} FOR EACH STATEMENT EXECUTE FUNCTION {function}()",
        ]
    return made


def create_table(database: str | URL | Engine, table: str = GENERIC.table, *, channel: str | None = None) -> None:
    """Create an outbox in the generic layout, with the statements of `table_sql`.

    Args: as `table_sql`.

    Raises:
        ConfigurationError: As `table_sql`.
        StoreError: The database has refused it, for example because the table exists, or can't be reached.
    """
    statements = table_sql(database, table, channel=channel)
    if isinstance(database, Engine):
        engine, dialect = database, dialect_of(database)
    else:
        url, dialect = parse_url(database)
        engine = make_engine(
            url, dialect, **dialect.engine_options(url, connect_timeout=_CREATE_SECONDS, lock_timeout=_CREATE_SECONDS)
        )
    try:
        with engine.begin() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement, execution_options={"no_parameters": True})
    except (SQLAlchemyError, engine.dialect.loaded_dbapi.Error) as error:
        raise ErrorMap(engine, dialect).translated(error, f"creating the table {table}") from error
    finally:
        if engine is not database:
            engine.dispose()
