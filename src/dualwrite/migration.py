"""Makes and changes the table `kafka_transaction_state`, by alembic with a version table of its own.

By itself (`upgrade`, or `dualwrite db upgrade`), beside whatever migrations the application has; or inside the application's
own chain of alembic migrations, by one call in a revision::

    from alembic import op
    from dualwrite.migration import downgrade_state_table, upgrade_state_table

    def upgrade() -> None:
        upgrade_state_table(op, "0005")

    def downgrade() -> None:
        downgrade_state_table(op, "base", from_revision="0005")

Either way the table's revision stands in `kafka_transaction_state_version`, so the two may be mixed: what is done already is
not done again. The scripts are the repository's folder `migrations`, in a wheel `dualwrite/_migrations`.
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
from dualwrite.stores.sql.dialects import dialect_of
from dualwrite.stores.sql.errors import ErrorMap
from dualwrite.stores.sql.schema import (
    SCHEMAS_ARE_DATABASES,
    made_in_schema,
    refuse_without_schemas,
    schema_script,
    script_in_schema,
)
from dualwrite.stores.sql.store import make_engine, parse_url
from dualwrite.stores.sql.table import VERSION_TABLE_NAME

_MOVING: Final = ("head", "heads", "+", "-")
_CONNECT_TIMEOUT: Final = 10.0
_LOCK_TIMEOUT: Final = 30.0
_one_at_a_time: Final = threading.Lock()
"""`alembic.context`, through which an environment is run, is one object for the whole process."""


def scripts_folder() -> Path:
    """Where alembic's environment and the versions are: in the package, or beside it in a checkout.

    Raises:
        ConfigurationError: Neither is there.
    """
    package = Path(__file__).parent
    for folder in (package / "_migrations", package.parents[1] / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise ConfigurationError(
        "The folder of migrations is missing from this installation of dualwrite.", next_step="reinstall it"
    )


def upgrade(database: str | URL | Engine, revision: str = "head", *, schema: str | None = None) -> None:
    """Bring the table to a revision; does nothing where it has it already. Two at once take turns.

    Args:
        database: A URL as for the store, or an engine.
        revision: A revision's name, or `head` for the newest.
        schema: The schema in which the tables stand; see SqlStateStore.

    Raises:
        ConfigurationError: There is no such revision or schema, or no store for the URL.
        StoreError: The database refuses or can't be reached.
    """
    with _configured(database, "upgrading the table", schema) as config:
        command.upgrade(config, revision)


def downgrade(database: str | URL | Engine, revision: str, *, schema: str | None = None) -> None:
    """Bring the table back to a revision; `base` drops it, with every fence and every unsettled state.

    Args:
        database: A URL as for the store, or an engine.
        revision: A revision's name, or `base`.
        schema: As for `upgrade`.

    Raises:
        ConfigurationError: There is no such revision, or no store for the URL.
        StoreError: The database refuses or can't be reached.
    """
    with _configured(database, "downgrading the table", schema) as config:
        command.downgrade(config, revision)


def current(database: str | URL | Engine, *, schema: str | None = None) -> str | None:
    """The revision that the table has, or None where our migrations have not run.

    Raises:
        ConfigurationError: There is no store for the URL.
        StoreError: The database refuses or can't be reached.
    """
    with _connected(database, "reading the table's revision", schema) as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE_NAME})
        return context.get_current_revision()


def newest() -> str:
    """The newest revision of this release."""
    revision = ScriptDirectory(str(scripts_folder())).get_current_head()
    assert revision is not None
    return revision


def sql(database: str | URL, revision: str = "head", *, schema: str | None = None) -> str:
    """The SQL that `upgrade` would run on an empty database, for those who run it by other means. Connects to nothing.

    Raises:
        ConfigurationError: There is no such revision, or no store for the URL.
    """
    url, dialect = parse_url(database)
    refuse_without_schemas(dialect.name, schema)
    text = io.StringIO()
    if schema is not None:
        preparer = url.get_dialect()().identifier_preparer
        text.write(f"{schema_script(dialect.name, preparer.quote_identifier(schema))}\n\n")
    config = _config()
    config.output_buffer = text
    config.set_main_option("sqlalchemy.url", url.set(password=None).render_as_string().replace("%", "%%"))
    with _one_at_a_time, _revision_checked():
        command.upgrade(config, revision, sql=True)
    return text.getvalue()


# --- inside a migration of the user's -----------------------------------------------------------------------------------------


class UsersOperations(Protocol):
    """What is used of `alembic.op`, in a revision that alembic runs."""

    def get_context(self) -> MigrationContext:
        """The migration that runs."""

    def get_bind(self) -> Connection:
        """Its connection."""


def upgrade_state_table(op: UsersOperations, revision: str, *, from_revision: str = "base", schema: str | None = None) -> None:
    """Bring the table to a revision, inside a migration of your own and in its transaction, unless it is there already.

    With `alembic upgrade --sql` the same is written as SQL.

    Args:
        op: `alembic.op`.
        revision: A revision of ours by its name: a migration must go on making what it made when it was written, so `head` is
            refused. `dualwrite db current` shows the newest.
        from_revision: The revision that the table has before, by your own chain: `base` for the first call, the `revision` of
            the call before for a later one. Read by `--sql` only, where there is no database to ask.
        schema: The schema in which the tables stand (PostgreSQL).

    Raises:
        ConfigurationError: There is no such revision.
    """
    script = ScriptDirectory(str(scripts_folder()))

    def steps(heads: tuple[str, ...]) -> Iterable[RevisionStep]:
        return script._upgrade_revs(revision, _as_given(heads))  # noqa: SLF001  (alembic's documentation has its users call it)

    _run_in_chain(op, revision, from_revision, steps, schema)


def downgrade_state_table(op: UsersOperations, revision: str, *, from_revision: str, schema: str | None = None) -> None:
    """Bring the table back to a revision, inside a migration of your own: the reverse of `upgrade_state_table`.

    Args:
        op: `alembic.op`.
        revision: A revision of ours, or `base`, which drops the table, with every fence and every unsettled state.
        from_revision: The `revision` of the call that this one takes back. Read by `--sql` only.
        schema: As for `upgrade_state_table`.

    Raises:
        ConfigurationError: There is no such revision.
    """
    script = ScriptDirectory(str(scripts_folder()))

    def steps(heads: tuple[str, ...]) -> Iterable[RevisionStep]:
        return script._downgrade_revs(revision, _as_given(heads)) if heads else ()  # noqa: SLF001  (as above)

    _run_in_chain(op, revision, from_revision, steps, schema)


def _as_given(heads: tuple[str, ...]) -> Any:
    return heads  # alembic's own annotation says str, and its own callers pass what we do


def _run_in_chain(
    op: UsersOperations,
    revision: str,
    from_revision: str,
    steps: Callable[[tuple[str, ...]], Iterable[RevisionStep]],
    schema: str | None,
) -> None:
    """Run steps of ours through `alembic.op` as it is set up for the user's migration, with our own version table."""
    if revision.startswith(_MOVING):
        raise ConfigurationError(
            f"A migration of yours can't bring the table to {revision!r}: it would make another table with each release.",
            next_step=f"name the revision; the newest of this release is {newest()!r}",
        )
    theirs = op.get_context()
    options: dict[str, Any] = {"version_table": VERSION_TABLE_NAME, "fn": lambda heads, _context: steps(heads)}
    with _revision_checked():
        if theirs.as_sql:
            offline = {"as_sql": True, "starting_rev": from_revision, "output_buffer": theirs.output_buffer}
            ours = MigrationContext.configure(dialect=theirs.dialect, opts={**options, **offline})
            with script_in_schema(theirs.dialect, schema, ours.impl.static_output):
                ours.run_migrations()
        else:
            with made_in_schema(op.get_bind(), schema):
                MigrationContext.configure(op.get_bind(), opts=options).run_migrations()


# --- inside -------------------------------------------------------------------------------------------------------------------


def _config() -> Config:
    config = Config(stdout=io.StringIO())  # alembic prints; what there is to say, our callers say
    config.set_main_option("script_location", str(scripts_folder()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


@contextmanager
def _configured(database: str | URL | Engine, doing: str, schema: str | None) -> Iterator[Config]:
    with _one_at_a_time, _connected(database, doing, schema) as connection, _revision_checked():
        config = _config()
        config.attributes["connection"] = connection
        yield config


@contextmanager
def _connected(database: str | URL | Engine, doing: str, schema: str | None) -> Iterator[Connection]:
    """A connection in a transaction that commits at the end of the block."""
    if isinstance(database, Engine):
        engine, dialect = database, dialect_of(database)
    else:
        url, dialect = parse_url(database)
        if schema is not None and dialect.name in SCHEMAS_ARE_DATABASES:
            url, schema = url.set(database=schema), None
        options = dialect.engine_options(url, connect_timeout=_CONNECT_TIMEOUT, lock_timeout=_LOCK_TIMEOUT)
        engine = make_engine(url, dialect, **options)
    try:
        with engine.connect() as connection:
            # The dialect's BEGIN: sqlite3 would begin only at the first INSERT, and leave half of a failed migration.
            dialect.begin(connection)
            with made_in_schema(connection, schema):
                yield connection
            connection.commit()
            dialect.finish(connection, "COMMIT")
    except (SQLAlchemyError, engine.dialect.loaded_dbapi.Error) as error:
        raise ErrorMap(engine, dialect).translated(error, doing) from error
    finally:
        if engine is not database:
            engine.dispose()


@contextmanager
def _revision_checked() -> Iterator[None]:
    try:
        yield
    except CommandError as error:
        raise ConfigurationError(
            f"Alembic refuses: {error}", next_step=f"the newest revision of this release is {newest()!r}; `head` means it"
        ) from error
