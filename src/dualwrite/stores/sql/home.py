"""Where our tables are: looked up once, when the first store on an engine opens, and put into each of our statements.

Statements are written for tables without a schema. If the database resolved these names itself, then a setting of the session
would decide which table a statement reaches, and the user's block can change it: `SET search_path`, `USE`, a temporary table.
So a store has its own engine over the user's pool, with this option, and our own connections put the schema into our tables.
The user's statements are not changed, and the user's `schema_translate_map` does not apply to our tables. This is rule QN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

from sqlalchemy import Column, Connection, Dialect, Engine, MetaData, Pool, PoolProxiedConnection, Table, TextClause, text
from sqlalchemy.sql import visitors
from sqlalchemy.sql.elements import ClauseElement, quoted_name

from dualwrite.errors import ConfigurationError
from dualwrite.stores.sql.dialect import StoreDialect
from dualwrite.stores.sql.tables import MYSQL, TABLE_NAME, metadata

_OPTION: Final = "dualwrite_home"
SHARED_CONNECTIONS: Final = "dualwrite_shared_connections"
"""The option of an engine whose new connections may have been used before, since they come from another pool."""
_found_before: Final[WeakKeyDictionary[Pool, Mapping[str, str]]] = WeakKeyDictionary()
"""What the stores on each engine of this process have found; those made from one engine share its pool."""
_KEPT: Final = 128
"""How many statements are kept with their copies: more than our constant ones.

A copy refers to its original, so weak references would keep all those that are built for one call.
"""


class Home:
    """The schemas of one store's tables (MariaDB, MySQL: the database; SQLite: `main`).

    Args:
        engine: The store's engine.
        dialect: The database's; looks the schemas up.
        given: The schema that the user has chosen, or None.
        is_ours: Whether nobody else uses the engine. Otherwise a connection in its pool may have settings of a user's block,
            and a new one is opened to look at the tables.
    """

    def __init__(self, engine: Engine, dialect: StoreDialect, given: str | None, *, is_ours: bool) -> None:
        self._engine = engine
        self.dialect = dialect
        self.given = given
        self._is_ours = is_ours
        self._found: Mapping[str, str] = {}
        self._names: dict[str, str] = {}  # of those tables whose schema is known
        self.statement: Callable[[ClauseElement], ClauseElement] = lru_cache(_KEPT)(self._statement)

    def look_up(self) -> None:
        """Look up where the tables are, if that is not known yet.

        Raises:
            ConfigurationError: The connection's settings don't say which of several tables is meant.
            Exception: The driver's and SQLAlchemy's errors.
        """
        if self._found or self.given is not None:
            return
        self._found = _found_before.get(self._engine.pool, {})
        if self._found:
            return
        pool = self._engine.pool if self._is_ours else self._engine.pool.recreate()
        try:
            is_new = not self._engine.get_execution_options().get(SHARED_CONNECTIONS)
            with Connection(self._engine, pool.connect()) as connection:
                found = self.dialect.schemas_of_tables(connection, is_new=is_new)
        finally:
            if pool is not self._engine.pool:
                pool.dispose()
        if TABLE_NAME in found:
            self._found = _found_before[self._engine.pool] = found

    def schema(self, table: str = TABLE_NAME) -> str | None:
        """The schema of a table; None if it is not known, since the tables are missing."""
        if self.given is not None:
            return self.given
        return self._found.get(table) or self._found.get(TABLE_NAME)

    def name(self, table: str = TABLE_NAME) -> str:
        """The name of a table in SQL text, without placeholders."""
        name = self._names.get(table)
        if name is None:
            schema = self.schema(table)
            if schema is None:
                return table
            name = self._names[table] = f"{quoted(self._engine.dialect.name, schema)}.{table}"
        return name

    def _statement(self, statement: ClauseElement) -> ClauseElement:
        tables = {
            found if isinstance(found, Table) else found.table
            for found in visitors.iterate(statement)
            if isinstance(found, Table) or (isinstance(found, Column) and found.table is not None)
        }
        ours = {table: self._table(table) for table in tables if isinstance(table, Table) and table.metadata is metadata}

        def replacement(element: Any, **_: Any) -> Any:
            if isinstance(element, Table):
                return ours.get(element)
            if isinstance(element, Column) and element.table in ours:
                return ours[element.table].c[element.name]
            return None

        moved: Any = visitors.replacement_traverse(statement, {}, replacement) if ours else statement
        return cast("ClauseElement", moved)

    def _table(self, table: Table) -> Table:
        return _in_schema(table, self.schema(table.name), self._engine.dialect.name)

    def placed(self, statement: Any) -> Any:
        """A statement of ours, with the schemas in it."""
        if isinstance(statement, TextClause) or not isinstance(statement, ClauseElement):
            return statement
        return self.statement(statement) if self.schema() is not None else statement


def engine_at_home(engine: Engine, dialect: StoreDialect, schema: str | None, *, is_ours: bool) -> Engine:
    """An engine over the pool of the user's engine, or of one of ours, that knows where our tables are.

    `schema` is what the user has given; by default what the engine's `schema_translate_map` has for tables without one.
    `is_ours`: nobody else uses the engine.
    """
    translated = (engine.get_execution_options().get("schema_translate_map") or {}).get(None)
    own = engine.execution_options()
    home = Home(own, dialect, schema or translated, is_ours=is_ours)
    own.update_execution_options(**{_OPTION: home})
    return own


def with_home(engine: Engine, home: Home) -> Engine:
    """An engine like this one, for statements about the same tables."""
    return engine.execution_options(**{_OPTION: home})


def found_schema(engine: Engine, dialect: StoreDialect, table: str, *, is_ours: bool) -> str | None:
    """The schema of a table of ours, or None if the tables are missing; for an engine that no store has made."""
    home = Home(engine, dialect, None, is_ours=is_ours)
    home.look_up()
    return home.schema(table)


def home_of(engine: Engine) -> Home:
    """Where the tables of a store's engine are."""
    home: Home = engine.get_execution_options()[_OPTION]
    return home


def given_schema(engine: Engine) -> str | None:
    """The schema that the user has given, or None; of an engine that no store has made, too."""
    home: Home | None = engine.get_execution_options().get(_OPTION)
    return None if home is None else home.given


class OwnConnection(Connection):
    """A connection for our statements, which reach our tables whatever the session's settings are.

    Where the tables are is looked up before a connection is taken from the pool: it may be the only one. `pooled` is a
    connection from another pool, to be used instead of one from the engine's.
    """

    def __init__(self, engine: Engine, pooled: PoolProxiedConnection | None = None) -> None:
        self.home = home_of(engine)
        self.home.look_up()
        super().__init__(engine, pooled)

    def execute(self, statement: Any, *args: Any, **kwargs: Any) -> Any:
        """As Connection.execute."""
        return super().execute(self.home.placed(statement), *args, **kwargs)

    def scalar(self, statement: Any, *args: Any, **kwargs: Any) -> Any:
        """As Connection.scalar."""
        return super().scalar(self.home.placed(statement), *args, **kwargs)


@cache
def _in_schema(table: Table, schema: str, dialect: str) -> Table:
    """A copy of the table, whose schema no `schema_translate_map` replaces."""
    # quoted here for MySQL: SQLAlchemy would quote as the sql_mode of its first connection says
    name = quoted_name(quoted(dialect, schema).replace("%", "%%"), quote=False) if dialect in MYSQL else schema
    copy = table.to_metadata(MetaData(), schema=name)
    copy._use_schema_map = False  # noqa: SLF001  (SQLAlchemy has no public way; test_settings_of_the_session notices)
    return copy


def quoted(dialect: str, name: str) -> str:
    """A name in SQL that goes to the driver as it is: SQLAlchemy's own quoting doubles each percent sign."""
    quote = "`" if dialect in MYSQL else '"'
    return f"{quote}{name.replace(quote, 2 * quote)}{quote}"


def refuse_without_schemas(name: str, schema: str | None) -> None:
    """Refuse a schema for SQLite.

    Raises:
        ConfigurationError: A schema is given, and the database has no schemas.
    """
    if schema is not None and name == "sqlite":
        raise ConfigurationError(
            f"schema is {schema!r}, but SQLite has no schemas.",
            cause="an attached database can't be used: with WAL a transaction over two files commits in each file separately",
            next_step="leave schema out; the tables are in the database's own file",
        )


def schema_script(dialect_name: str, quoted_schema: str) -> str:
    """The statement after which a script creates its tables in the schema."""
    return f"USE {quoted_schema};" if dialect_name in MYSQL else f"SET search_path TO {quoted_schema};"


@contextmanager
def made_in_schema(connection: Connection, schema: str | None) -> Iterator[None]:
    """Create unqualified names of the block in this schema (PostgreSQL), in the current transaction.

    Raises:
        ConfigurationError: There is no such schema, or the database does not support this.
    """
    if schema is None:
        yield
        return
    refuse_without_schemas(connection.dialect.name, schema)
    _refuse_another_database(connection.dialect.name, schema)
    if connection.scalar(text("SELECT 1 FROM pg_namespace WHERE nspname = :name"), {"name": schema}) is None:
        raise ConfigurationError(
            f"There is no schema {schema!r} in the database, or we may not see it.", next_step=f"CREATE SCHEMA {schema}"
        )
    before = connection.scalar(text("SELECT current_setting('search_path')"))
    setting = text("SELECT set_config('search_path', :path, true)")
    connection.execute(setting, {"path": quoted(connection.dialect.name, schema)})
    yield
    connection.execute(setting, {"path": before})


@contextmanager
def script_in_schema(dialect: Dialect, schema: str | None, write: Callable[[str], None]) -> Iterator[None]:
    """As `made_in_schema`, for a part of a script; what follows it is created in the default schema again.

    Raises: as `made_in_schema`.
    """
    if schema is None:
        yield
        return
    refuse_without_schemas(dialect.name, schema)
    _refuse_another_database(dialect.name, schema)
    write(f"SET LOCAL search_path TO {quoted(dialect.name, schema)};\n")
    yield
    write("SET LOCAL search_path TO DEFAULT;\n")


def _refuse_another_database(dialect_name: str, schema: str) -> None:
    if dialect_name in MYSQL:
        raise ConfigurationError(
            "On MariaDB and MySQL our tables can't be created in another database than the connection's.",
            next_step=f"run `dualwrite db upgrade --schema {schema}`, or pass the URL of that database",
        )
