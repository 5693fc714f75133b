"""Creates and migrates the tables of dualwrite, using alembic with a separate version table.

Either independently of the application's migrations (`upgrade`, or `dualwrite db upgrade`), or inside the application's own
chain of alembic migrations, with one call in a revision::

    from alembic import op
    from dualwrite.migration import downgrade_state_table, upgrade_state_table

    def upgrade() -> None:
        upgrade_state_table(op, "0001")

    def downgrade() -> None:
        downgrade_state_table(op, "base", from_revision="0001")

Either way the table's revision is stored in `kafka_transaction_state_version`, so the two may be mixed: steps that have already
run are skipped. The scripts are in the repository's folder `migrations`, and in a wheel in `dualwrite/_migrations`.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext, RevisionStep
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import URL, Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from dualwrite.errors import ConfigurationError
from dualwrite.stores.sql.engines import dialect_of, make_engine, parse_url
from dualwrite.stores.sql.home import (
    found_schema,
    made_in_schema,
    quoted,
    refuse_without_schemas,
    schema_script,
    script_in_schema,
)
from dualwrite.stores.sql.rights import grants as granted
from dualwrite.stores.sql.rights import rights_for
from dualwrite.stores.sql.sql_errors import ErrorMap, quietly
from dualwrite.stores.sql.tables import MYSQL, VERSION_TABLE_NAME

_RELATIVE: Final = ("head", "heads", "+", "-")
_CONNECT_TIMEOUT: Final = 10.0
_LOCK_TIMEOUT: Final = 30.0
_WORK_TIME: Final = 600.0
"""The maximum for one statement besides its wait for a lock, in seconds."""

_one_at_a_time: Final = threading.Lock()
"""Needed because `alembic.context`, which every environment uses, is a single object for the whole process."""


def scripts_folder() -> Path:
    """The folder of alembic's environment and versions: inside the package, or in the root of a checkout.

    Raises:
        ConfigurationError: There is no such folder.
    """
    package = Path(__file__).parent
    for folder in (package / "_migrations", package.parents[1] / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise ConfigurationError(
        "The folder of migrations is missing from this installation of dualwrite.", next_step="reinstall it"
    )


def upgrade(database: str | URL | Engine, revision: str = "head", *, schema: str | None = None) -> None:
    """Upgrade the table to a revision; does nothing if it is already there. Concurrent calls run one after another.

    Args:
        database: A URL as for the store, or an engine.
        revision: The name of a revision, or `head` for the newest.
        schema: The schema that contains the tables; see SqlStateStore.

    Raises:
        ConfigurationError: There is no such revision or schema, or no store for the URL.
        StoreError: The database returned an error or can't be reached.
    """
    with _configured(database, "upgrading the table", revision, schema) as config:
        command.upgrade(config, revision)


def downgrade(database: str | URL | Engine, revision: str, *, schema: str | None = None) -> None:
    """Downgrade the table to a revision; `base` drops it, with every fencing token and every unresolved state.

    Args:
        database: A URL as for the store, or an engine.
        revision: The name of a revision, or `base`.
        schema: As for `upgrade`.

    Raises:
        ConfigurationError: There is no such revision, or no store for the URL.
        StoreError: The database returned an error or can't be reached.
    """
    with _configured(database, "downgrading the table", revision, schema) as config:
        command.downgrade(config, revision)


def undone_by(database: str | URL | Engine, revision: str, *, schema: str | None = None) -> dict[str, str]:
    """What `downgrade` to a revision would drop: the revisions that it would undo, newest first, each with what that drops.

    Args: as `downgrade`.

    Raises: as `downgrade`.
    """
    before = current(database, schema=schema)
    with _revision_checked(revision):
        script = ScriptDirectory(str(scripts_folder()))
        undone = script._downgrade_revs(revision, before)  # noqa: SLF001  (see upgrade_state_table)
    return {step.revision.revision: (step.migration_fn.__doc__ or "").strip() for step in undone}


def current(database: str | URL | Engine, *, schema: str | None = None) -> str | None:
    """The table's revision, or None if dualwrite's migrations have not run.

    Raises:
        ConfigurationError: There is no store for the URL.
        StoreError: The database returned an error or can't be reached.
    """
    with _connected(database, "reading the table's revision", schema) as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE_NAME})
        return context.get_current_revision()


def newest() -> str:
    """The newest revision of this release."""
    revision = ScriptDirectory(str(scripts_folder())).get_current_head()
    assert revision is not None
    return revision


def sql(database: str | URL, revision: str = "head", *, schema: str | None = None, downgrades: bool = False) -> str:
    """The SQL that `upgrade` would run on an empty database, to be run by other means. Does not connect to the database.

    Args:
        database: A URL as for the store.
        revision: As for `upgrade`; or a range, `0001:0002`.
        schema: As for `upgrade`.
        downgrades: What `downgrade` would run, for a range such as `0001:base`.

    Raises:
        ConfigurationError: There is no such revision, or no store for the URL.
    """
    url, dialect = parse_url(database)
    refuse_without_schemas(dialect.name, schema)
    text = io.StringIO()
    if schema is not None:
        text.write(f"{schema_script(dialect.name, quoted(dialect.name, schema))}\n\n")
    config = _config()
    config.output_buffer = text
    config.set_main_option("sqlalchemy.url", url.set(password=None).render_as_string().replace("%", "%%"))
    with _one_at_a_time, _revision_checked(revision):
        (command.downgrade if downgrades else command.upgrade)(config, revision, sql=True)
    return text.getvalue()


def grants(
    database: str | URL, role: str, uses: Iterable[str], *, schema: str | None = None, outbox: str | None = None
) -> list[str]:
    """The GRANT statements for what a role does, to be run by the tables' owner; none on SQLite. Does not connect.

    Args:
        database: A URL as for the store.
        role: The role; on MariaDB and MySQL `user@host`, or a name.
        uses: What it does: the keys of `dualwrite.stores.sql.rights.RIGHTS`.
        schema: The schema that contains the tables.
        outbox: A relay's table, `schema.name` or `name`.

    Raises:
        ConfigurationError: There is no store for the URL.
    """
    url, dialect = parse_url(database)
    refuse_without_schemas(dialect.name, schema)
    quote = url.get_dialect()().identifier_preparer.quote
    is_mysql = dialect.name in MYSQL
    place = schema or (url.database if is_mysql else None)
    named = "@".join(f"'{each}'" for each in role.replace("'", "").split("@")) if is_mysql else quote(role)
    return [] if dialect.family == "sqlite" else granted(rights_for(uses, lambda _: place, dialect.name, outbox), quote, named)


# --- inside a migration of the user -------------------------------------------------------------------------------------------


class UsersOperations(Protocol):
    """The part of `alembic.op` that is used here, in a revision that alembic runs."""

    def get_context(self) -> MigrationContext:
        """The context of the running migration."""

    def get_bind(self) -> Connection:
        """The connection of the running migration."""


def upgrade_state_table(op: UsersOperations, revision: str, *, from_revision: str = "base", schema: str | None = None) -> None:
    """Upgrade the table to a revision inside a migration of your own, in its transaction; does nothing if it is already there.

    With `alembic upgrade --sql` the statements are written as SQL.

    Args:
        op: `alembic.op`.
        revision: The name of one of dualwrite's revisions. `head` is rejected, because a migration must always create the same
            table. `dualwrite db current` shows the newest.
        from_revision: The table's revision before the call, according to your own chain: `base` for the first call, the
            previous call's `revision` for a later one. Used only with `--sql`, where there is no database to query.
        schema: The schema that contains the tables (PostgreSQL).

    Raises:
        ConfigurationError: There is no such revision.
    """
    script = ScriptDirectory(str(scripts_folder()))

    def steps(heads: tuple[str, ...]) -> Iterable[RevisionStep]:
        return script._upgrade_revs(revision, _as_given(heads))  # noqa: SLF001  (alembic's documentation tells users to call it)

    _run_in_chain(op, revision, from_revision, steps, schema)


def downgrade_state_table(op: UsersOperations, revision: str, *, from_revision: str, schema: str | None = None) -> None:
    """Downgrade the table to a revision inside a migration of your own: the reverse of `upgrade_state_table`.

    Args:
        op: `alembic.op`.
        revision: One of dualwrite's revisions, or `base`, which drops the table with every fencing token and every unresolved
            state.
        from_revision: The `revision` of the call that this one reverts. Used only with `--sql`.
        schema: As for `upgrade_state_table`.

    Raises:
        ConfigurationError: There is no such revision.
    """
    script = ScriptDirectory(str(scripts_folder()))

    def steps(heads: tuple[str, ...]) -> Iterable[RevisionStep]:
        return script._downgrade_revs(revision, _as_given(heads)) if heads else ()  # noqa: SLF001  (as above)

    _run_in_chain(op, revision, from_revision, steps, schema)


def _as_given(heads: tuple[str, ...]) -> Any:
    return heads  # alembic annotates it as str, but its own callers pass a tuple as well


def _run_in_chain(
    op: UsersOperations,
    revision: str,
    from_revision: str,
    steps: Callable[[tuple[str, ...]], Iterable[RevisionStep]],
    schema: str | None,
) -> None:
    """Run dualwrite's migration steps through the `alembic.op` of the user's migration, with dualwrite's version table."""
    if revision.startswith(_RELATIVE):
        raise ConfigurationError(
            f"Revision {revision!r} can't be used in your own migration: its result would change with each release.",
            next_step=f"give a fixed revision; the newest of this release is {newest()!r}",
        )
    theirs = op.get_context()
    options: dict[str, Any] = {"version_table": VERSION_TABLE_NAME, "fn": lambda heads, _context: steps(heads)}
    with _revision_checked(revision):
        if theirs.as_sql:
            offline = {"as_sql": True, "starting_rev": from_revision, "output_buffer": theirs.output_buffer}
            ours = MigrationContext.configure(dialect=theirs.dialect, opts={**options, **offline})
            with script_in_schema(theirs.dialect, schema, ours.impl.static_output):
                ours.run_migrations()
        else:
            with made_in_schema(op.get_bind(), schema):
                MigrationContext.configure(op.get_bind(), opts=options).run_migrations()


# --- connections and alembic's configuration ----------------------------------------------------------------------------------


def _config() -> Config:
    config = Config(stdout=io.StringIO())  # discards what alembic prints; the callers report what matters
    config.set_main_option("script_location", str(scripts_folder()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


@contextmanager
def _configured(database: str | URL | Engine, doing: str, revision: str, schema: str | None) -> Iterator[Config]:
    with _one_at_a_time, _connected(database, doing, schema) as connection, _revision_checked(revision):
        config = _config()
        config.attributes["connection"] = connection
        yield config


@contextmanager
def _connected(database: str | URL | Engine, doing: str, schema: str | None) -> Iterator[Connection]:
    """A connection in a transaction that commits at the end of the block."""
    if isinstance(database, Engine):
        engine, dialect = database, dialect_of(database)
        dialect.watch_engine(engine)
    else:
        url, dialect = parse_url(database)
        if schema is not None and dialect.name in MYSQL:
            url, schema = url.set(database=schema), None
        options = dialect.engine_options(url, connect_timeout=_CONNECT_TIMEOUT, lock_timeout=_LOCK_TIMEOUT)
        engine = make_engine(url, dialect, **options)
    try:
        if (
            schema is None and dialect.name == "postgresql"
        ):  # where they are, even if a schema now comes before it in search_path
            schema = found_schema(engine, dialect, VERSION_TABLE_NAME, is_ours=engine is not database)
        with engine.connect() as connection:
            # The dialect's BEGIN: sqlite3 would begin only at the first INSERT, so a failed migration would be half applied.
            # Its limits: as long as ALTER TABLE waits for a lock, all writers wait behind it.
            dialect.begin_short(connection, _LOCK_TIMEOUT, work_time=_WORK_TIME)
            try:
                with made_in_schema(connection, schema):
                    yield connection
                connection.commit()
            except BaseException:
                quietly(lambda: dialect.finish(connection, "ROLLBACK"))
                raise
            dialect.finish(connection, "COMMIT")
    except (SQLAlchemyError, engine.dialect.loaded_dbapi.Error) as error:
        raise ErrorMap(engine, dialect).translated(error, doing) from error
    finally:
        if engine is not database:
            engine.dispose()


@contextmanager
def _revision_checked(revision: str) -> Iterator[None]:
    next_step = f"use an existing revision; the newest of this release is {newest()!r} (`head`)"
    if not revision:
        raise ConfigurationError("The revision is empty.", next_step=next_step)
    try:
        yield
    except CommandError as error:
        raise ConfigurationError(f"Alembic reported an error: {error}", next_step=next_step) from error
