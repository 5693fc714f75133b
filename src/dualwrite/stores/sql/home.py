"""Where our tables are: looked up once, when the first store on an engine opens, and put into each of our statements.

Statements are written for tables without a schema. If the database resolved these names itself, then a setting of the session
would decide which table a statement reaches, and the user's block can change it: `SET search_path`, `USE`, a temporary table.
So a store has its own engine over the user's pool, with this option, and our own connections put the schema into our tables.
The user's statements are not changed, and the user's `schema_translate_map` does not apply to our tables. This is rule QN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

from sqlalchemy import Column, Connection, Engine, MetaData, Pool, PoolProxiedConnection, Table, TextClause
from sqlalchemy.sql import visitors
from sqlalchemy.sql.elements import ClauseElement, quoted_name

from dualwrite.stores.sql.dialect import StoreDialect
from dualwrite.stores.sql.table import TABLE_NAME, metadata

_OPTION: Final = "dualwrite_home"
SHARED_CONNECTIONS: Final = "dualwrite_shared_connections"
"""The option of an engine whose new connections may have been used before, since they come from another pool."""
SCHEMAS_ARE_DATABASES: Final = ("mysql", "mariadb")
"""SQLAlchemy's names."""
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
        dialect: Looks the schemas up.
        given: The schema that the user has chosen, or None.
        is_ours: Whether nobody else uses the engine. Otherwise a connection in its pool may have settings of a user's block,
            and a new one is opened to look at the tables.
    """

    def __init__(self, engine: Engine, dialect: StoreDialect, given: str | None, *, is_ours: bool) -> None:
        self._engine = engine
        self._dialect = dialect
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
                found = self._dialect.schemas_of_tables(connection, is_new=is_new)
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
            name = self._names[table] = f"{_quoted(self._engine.dialect.name, schema)}.{table}"
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
    """An engine over the same pool that knows where our tables are.

    Args:
        engine: The user's engine, or one of ours.
        dialect: Looks the schemas up.
        schema: The schema that the user has given; by default what the engine's `schema_translate_map` has for tables without
            one.
        is_ours: Whether nobody else uses the engine.
    """
    translated = (engine.get_execution_options().get("schema_translate_map") or {}).get(None)
    own = engine.execution_options()
    home = Home(own, dialect, schema or translated, is_ours=is_ours)
    own.update_execution_options(**{_OPTION: home})
    return own


def found_schema(engine: Engine, dialect: StoreDialect, table: str, *, is_ours: bool) -> str | None:
    """The schema of a table of ours, or None if the tables are missing; for an engine that no store has made."""
    home = Home(engine, dialect, None, is_ours=is_ours)
    home.look_up()
    return home.schema(table)


def home_of(engine: Engine) -> Home | None:
    """Where the tables of an engine's store are; None for an engine that no store has made."""
    home: Home | None = engine.get_execution_options().get(_OPTION)
    return home


def look_up_tables(engine: Engine) -> None:
    """Look up where our tables are, before a connection is taken from the pool: it may be the only one."""
    home = home_of(engine)
    if home is not None:
        home.look_up()


def full_name(engine: Engine, table: str = TABLE_NAME) -> str:
    """The name of one of our tables in SQL text, without placeholders."""
    home = home_of(engine)
    return table if home is None else home.name(table)


def schema_of(engine: Engine) -> str | None:
    """The schema of our tables, or None if it is not known."""
    home = home_of(engine)
    return None if home is None else home.schema()


def given_schema(engine: Engine) -> str | None:
    """The schema that the user has given, or None."""
    home = home_of(engine)
    return None if home is None else home.given


class OwnConnection(Connection):
    """A connection for our statements, which reach our tables whatever the session's settings are.

    Args:
        engine: A store's engine.
        pooled: A connection from another pool, to be used instead of one from the engine's.
    """

    def __init__(self, engine: Engine, pooled: PoolProxiedConnection | None = None) -> None:
        super().__init__(engine, pooled)
        self._home = home_of(engine)

    def execute(self, statement: Any, *args: Any, **kwargs: Any) -> Any:
        """As Connection.execute."""
        if self._home is not None:
            statement = self._home.placed(statement)
        return super().execute(statement, *args, **kwargs)

    def scalar(self, statement: Any, *args: Any, **kwargs: Any) -> Any:
        """As Connection.scalar."""
        if self._home is not None:
            statement = self._home.placed(statement)
        return super().scalar(statement, *args, **kwargs)


def own_connection(engine: Engine) -> OwnConnection:
    """A connection for our statements, once it is known where the tables are."""
    look_up_tables(engine)
    return OwnConnection(engine)


@cache
def _in_schema(table: Table, schema: str, dialect: str) -> Table:
    """A copy of the table, whose schema no `schema_translate_map` replaces."""
    # quoted here for MySQL: SQLAlchemy would quote as the sql_mode of its first connection says
    name = quoted_name(_quoted(dialect, schema).replace("%", "%%"), quote=False) if dialect in SCHEMAS_ARE_DATABASES else schema
    copy = table.to_metadata(MetaData(), schema=name)
    copy._use_schema_map = False  # noqa: SLF001  (SQLAlchemy has no public way; test_settings_of_the_session notices)
    return copy


def _quoted(dialect: str, name: str) -> str:
    quote = "`" if dialect in SCHEMAS_ARE_DATABASES else '"'
    return f"{quote}{name.replace(quote, 2 * quote)}{quote}"
