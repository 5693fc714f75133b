"""The staging table of a target table: tasks load rows into it, and the job's decision moves them all in one transaction.

Each row has the id and fencing token of the task attempt that loaded it, so that rows of a zombie or a crashed run are never
mistaken for a winner's. On PostgreSQL the table is UNLOGGED: loading writes no write-ahead log, and a crash of the server
empties the table. The decision counts the rows that it moves, so it then finds rows missing and does not commit: the batch is
run again, and nothing is lost.

Maintaining the index on id and fencing token takes about a quarter of the loading time; without it each delete by id would read
the whole table with the dead rows of earlier batches, and InnoDB would lock every row that it reads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Dialect,
    Engine,
    Index,
    Insert,
    MetaData,
    String,
    Table,
    and_,
    bindparam,
    column,
    func,
    insert,
    inspect,
    select,
    table,
    tuple_,
)
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.exc import DBAPIError, NoSuchTableError
from sqlalchemy.schema import CreateIndex, CreateTable
from sqlalchemy.types import ARRAY, TypeEngine, UserDefinedType

from dualwrite.errors import BatchRefusedError, ConfigurationError, StoreError
from dualwrite.jobs.job_tables import FENCE_COLUMN, ID_COLUMN
from dualwrite.spark.columns import MYSQL, TargetColumn, TargetTable
from dualwrite.spark.loading import STRICT, ZEROS_KEPT, CopyWriter, StagingWriter, StatementWriter, sql_mode
from dualwrite.stores.sql.dialect import ErrorClass
from dualwrite.stores.sql.engines import dialect_of
from dualwrite.stores.sql.sql_errors import ErrorMap

_PREFIX: Final = "dualwrite_staging_"
_MAX_NAME_BYTES: Final = 63  # PostgreSQL's limit; MariaDB's and MySQL's is 64 characters
_HASH_DIGITS: Final = 8
_NAMED_ROWS: Final = 5


class _LiteralType(UserDefinedType[Any]):
    """A type given by its text in CREATE TABLE."""

    cache_ok = True

    def __init__(self, ddl: str) -> None:
        self.ddl = ddl

    def get_col_spec(self, **_: Any) -> str:
        """The type's text."""
        return self.ddl


class StagingTable:
    """The staging table for frames with certain columns. It is stateless: several threads and processes may use it.

    Args:
        target: The table that rows are moved to.
        columns: Names of the frame's columns for the table; each must be a column of the table.
        staging_schema: The schema of the staging table; None for the target's schema.

    Raises:
        ConfigurationError: A column is not in the table, or its name is reserved for staging.
    """

    def __init__(self, target: TargetTable, columns: Sequence[str], *, staging_schema: str | None = None) -> None:
        found = {name: target.column(name) for name in columns}
        wrong = [name for name, known in found.items() if known is None or name in (ID_COLUMN, FENCE_COLUMN)]
        if wrong:
            raise ConfigurationError(
                f"Rows for {target.full_name} can't be staged: its column {wrong[0]!r} is missing, or its name is reserved.",
                next_step="rename the column, or leave it out of the frame",
            )
        self.target = target
        self.columns: tuple[TargetColumn, ...] = tuple(known for known in found.values() if known is not None)
        self.schema = target.schema if staging_schema is None else staging_schema
        self.name = _staging_name(target, self.columns)
        self._index = f"{_PREFIX}{self.name[-_HASH_DIGITS:]}_by_attempt"
        self._names = [known.name for known in self.columns]
        self._staged = _table(self.name, self.schema, self.columns, String(255))
        self._id, self._fence = self._staged.c[ID_COLUMN], self._staged.c[FENCE_COLUMN]
        self._target = table(target.name, *(column(name) for name in self._names), schema=target.schema)

    # --- the table --------------------------------------------------------------------------------------------------------

    def ddl(self, dialect: Dialect) -> str:
        """The SQL that creates the table, for someone with the privilege."""
        written = ";\n".join(str(statement.compile(dialect=dialect)).strip() for statement in self._creation(dialect))
        return written.replace("%%", "%") if "format" in dialect.paramstyle else written

    def ensure(self, engine: Engine) -> None:
        """Create the table if it is missing. Several processes may do this at once.

        Raises:
            ConfigurationError: The user has no privilege to create it (the text includes the DDL for someone with the
                privilege), the schema does not exist, or the table was altered.
            StoreError: Any other error of the database.
        """
        errors = ErrorMap(engine, dialect_of(engine))
        try:
            if self._exists(engine):
                return
            self._create(engine)
        except DBAPIError as error:
            raise self._creation_error(engine, errors, error) from error

    def _exists(self, engine: Engine) -> bool:
        with engine.connect() as connection:
            try:  # twice: SQLite reports no columns for a table that is created between its two queries
                found = (inspect(connection).get_columns(self.name, schema=self.schema) for _ in range(2))
                names = {each["name"] for columns in found for each in columns}
                indexes = inspect(connection).get_indexes(self.name, schema=self.schema)
            except NoSuchTableError:
                return False
        if names != {each.name for each in self._staged.columns}:
            raise ConfigurationError(
                f"The staging table {self._full_name} has unexpected columns.",
                cause="it was altered, or created manually with other columns",
                next_step="drop it while no job is running; it will be created again",
            )
        return self._index in {each["name"] for each in indexes}

    def _create(self, engine: Engine) -> None:
        try:
            with engine.begin() as connection:
                for statement in self._creation(engine.dialect):
                    connection.execute(statement)
        except DBAPIError:
            if not self._exists(engine):  # else another process created it: IF NOT EXISTS checks before it locks
                raise

    def _creation_error(self, engine: Engine, errors: ErrorMap, error: DBAPIError) -> Exception:
        if errors.dialect.classify(error) is ErrorClass.DENIED:
            user = engine.url.username or "the job's user"
            return ConfigurationError(
                f"The staging table {self._full_name} is missing, and {user} has no privilege to create it.",
                cause=" ".join(str(error.orig).split()),
                next_step=f"grant CREATE on its schema to {user}, set stagingSchema to a schema in which {user} can create "
                "tables, or let an administrator create it and grant SELECT, INSERT and DELETE on it to "
                f"{user}: {self.ddl(engine.dialect)}",
            )
        if self.schema is not None and errors.dialect.classify(error) is not ErrorClass.CONNECTION:
            with engine.connect() as connection:
                schemas = inspect(connection).get_schema_names()
            if self.schema not in schemas:
                return ConfigurationError(
                    f"The schema {self.schema!r} for the staging table does not exist.",
                    next_step="create it, or set stagingSchema to an existing schema",
                )
        return errors.translated(error, f"creating the staging table {self._full_name}")

    def _creation(self, dialect: Dialect) -> tuple[CreateTable, CreateIndex]:
        id_type: TypeEngine[str] = String(255)
        if dialect.name in MYSQL:  # so that ids are compared byte by byte, including case, accents and trailing spaces
            collation = "utf8mb4_nopad_bin" if getattr(dialect, "is_mariadb", False) else "utf8mb4_0900_bin"
            id_type = mysql.VARCHAR(255, charset="utf8mb4", collation=collation)
        prefixes = ["UNLOGGED"] if dialect.name == "postgresql" else []
        engine = {f"{name}_engine": "InnoDB" for name in MYSQL}
        made = _table(self.name, self.schema, self.columns, id_type, prefixes=prefixes, **engine)
        if dialect.name in MYSQL:  # depending on a server setting, a TIMESTAMP is NOT NULL unless it is declared as NULL
            for each in self.columns:
                made.c[each.name].type = _LiteralType(f"{each.ddl} NULL")
        index = Index(self._index, made.c[ID_COLUMN], made.c[FENCE_COLUMN])
        has_if_not_exists = dialect.name not in MYSQL or bool(getattr(dialect, "is_mariadb", False))
        return CreateTable(made, if_not_exists=True), CreateIndex(index, if_not_exists=has_if_not_exists)

    @property
    def _full_name(self) -> str:
        return self.name if self.schema is None else f"{self.schema}.{self.name}"

    # --- rows -------------------------------------------------------------------------------------------------------------

    def writer(self, connection: Connection, transactional_id: str, fence: int) -> StagingWriter:
        """A writer that loads record batches one by one; see StagingWriter. Use it in a `with` statement."""
        kind = CopyWriter if connection.dialect.name == "postgresql" else StatementWriter
        return kind(connection, self._staged, self.columns, transactional_id, fence)

    def move(self, connection: Connection, keys: Sequence[tuple[str, int]], *, upsert_keys: Sequence[str] = ()) -> int:
        """Insert into the target exactly the rows staged under these keys, in the connection's transaction.

        They stay in staging until they are deleted (see StagedRows). Returns how many staged rows the keys have. All of them
        are now in the target, except rows that a trigger or rule of the target suppressed; those are not counted.

        Raises:
            BatchRefusedError: Two staged rows have the same upsert keys, so it is undefined which one should be kept.
            StoreError: Rows were staged under these keys while rows were being moved.
        """
        if not keys:
            return 0
        ours = self._is_one_of(connection, sorted(set(keys)))
        rows = select(*(self._staged.c[name] for name in self._names)).where(ours)
        with sql_mode(connection, STRICT, ZEROS_KEPT) if connection.dialect.name in MYSQL else nullcontext():
            return self._moved(connection, ours, rows, upsert_keys)

    # --- parts --------------------------------------------------------------------------------------------------------

    def _moved(self, connection: Connection, ours: ColumnElement[bool], rows: Any, upsert_keys: Sequence[str]) -> int:
        if not upsert_keys:
            return _row_count(connection, insert(self._target).from_select(self._names, rows))
        self._check_unambiguous(connection, ours, upsert_keys)
        statement = self._upsert(connection, rows, upsert_keys)
        if connection.dialect.name not in MYSQL:
            return _row_count(connection, statement)
        # MySQL and MariaDB count a replaced row twice, so we count the staged rows. While they are locked, rows can only be
        # added, and the second count finds that.
        count = select(func.count()).select_from(self._staged).where(ours).with_for_update(read=True)
        before: int = connection.execute(count).scalar_one()
        connection.execute(statement)
        after: int = connection.execute(count).scalar_one()
        if before != after:
            raise StoreError(
                f"{after - before} rows were staged for {self.target.full_name} while rows were being moved.",
                next_step="roll back and try again; a task attempt must not load rows after its outcome is known",
            )
        return after

    def _is_one_of(self, connection: Connection, keys: Sequence[tuple[str, int]]) -> ColumnElement[bool]:
        """The condition for rows with these keys; PostgreSQL compares a row with each item of a list, but hashes a subquery."""
        ours = tuple_(self._id, self._fence)
        if connection.dialect.name != "postgresql":
            return ours.in_(keys)
        wanted = (
            func.unnest(
                bindparam("ids", [key for key, _ in keys], ARRAY(String)),
                bindparam("fences", [fence for _, fence in keys], ARRAY(BigInteger)),
            )
            .table_valued("id", "fence", name="wanted")
            .render_derived()
        )
        return ours.in_(select(wanted.c.id, wanted.c.fence))

    def _check_unambiguous(self, connection: Connection, ours: ColumnElement[bool], upsert_keys: Sequence[str]) -> None:
        by = [self._staged.c[name] for name in upsert_keys]
        present = and_(*(each.is_not(None) for each in by))  # NULLs are distinct, for the unique key as well
        twice = select(*by, func.count()).where(ours, present).group_by(*by).having(func.count() > 1).limit(_NAMED_ROWS)
        found = connection.execute(twice).all()
        if found:
            rows = "; ".join(
                ", ".join(f"{name}={value!r}" for name, value in zip(upsert_keys, row, strict=False)) + f" ({row[-1]} rows)"
                for row in found
            )
            raise BatchRefusedError(
                f"The batch is ambiguous: several of its rows for {self.target.full_name} have the same upsertKeys: {rows}"
                f"{'; …' if len(found) == _NAMED_ROWS else ''}.",
                next_step="keep one row per key before writing (dropDuplicates, or the latest row with a window function)",
            )

    def _upsert(self, connection: Connection, rows: Any, upsert_keys: Sequence[str]) -> Insert:
        """An upsert of each row; a row that has only key columns also updates, so that the database counts it."""
        changed = [name for name in self._names if name not in upsert_keys] or list(upsert_keys[:1])
        if connection.dialect.name in MYSQL:
            made = mysql.insert(self._target).from_select(self._names, rows)
            return made.on_duplicate_key_update({name: self._staged.c[name] for name in changed})
        dialect: Any = postgresql if connection.dialect.name == "postgresql" else sqlite
        made = dialect.insert(self._target).from_select(self._names, rows)
        statement: Insert = made.on_conflict_do_update(
            index_elements=list(upsert_keys), set_={name: made.excluded[name] for name in changed}
        )
        return statement


def _row_count(connection: Connection, statement: Any) -> int:
    return connection.execution_options(preserve_rowcount=True).execute(statement).rowcount


def _table(name: str, schema: str | None, columns: Sequence[TargetColumn], id_type: TypeEngine[str], **options: Any) -> Table:
    return Table(
        name,
        MetaData(),
        *(Column(each.name, _LiteralType(each.ddl), quote=True) for each in columns),
        Column(ID_COLUMN, id_type),
        Column(FENCE_COLUMN, BigInteger),
        schema=schema,
        **options,
    )


def _staging_name(target: TargetTable, columns: Sequence[TargetColumn]) -> str:
    """A name made from the target's name and a hash of everything that determines the staging table's definition."""
    facts = [target.schema, target.name, [(each.name, each.ddl) for each in columns]]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:_HASH_DIGITS]
    room = _MAX_NAME_BYTES - len(_PREFIX) - 1 - _HASH_DIGITS
    return f"{_PREFIX}{target.name.encode()[:room].decode(errors='ignore')}_{digest}"
