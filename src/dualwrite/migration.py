"""Makes and changes the table `kafka_transaction_state`, by alembic with a version table of its own.

The scripts are the repository's folder `migrations`, in a wheel `dualwrite/_migrations`.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import URL, Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from dualwrite.errors import ConfigurationError
from dualwrite.stores.sql.dialects import dialect_of
from dualwrite.stores.sql.errors import ErrorMap
from dualwrite.stores.sql.store import make_engine, parse_url
from dualwrite.stores.sql.table import VERSION_TABLE_NAME

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


def upgrade(database: str | URL | Engine, revision: str = "head") -> None:
    """Bring the table to a revision; does nothing where it has it already. Two at once take turns.

    Args:
        database: A URL as for the store, or an engine.
        revision: A revision's name, or `head` for the newest.

    Raises:
        ConfigurationError: There is no such revision, or no store for the URL.
        StoreError: The database refuses or can't be reached.
    """
    with _configured(database, "upgrading the table") as config:
        command.upgrade(config, revision)


def downgrade(database: str | URL | Engine, revision: str) -> None:
    """Bring the table back to a revision; `base` drops it, with every fence and every unsettled state.

    Args:
        database: A URL as for the store, or an engine.
        revision: A revision's name, or `base`.

    Raises:
        ConfigurationError: There is no such revision, or no store for the URL.
        StoreError: The database refuses or can't be reached.
    """
    with _configured(database, "downgrading the table") as config:
        command.downgrade(config, revision)


def current(database: str | URL | Engine) -> str | None:
    """The revision that the table has, or None where our migrations have not run.

    Raises:
        ConfigurationError: There is no store for the URL.
        StoreError: The database refuses or can't be reached.
    """
    with _connected(database, "reading the table's revision") as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE_NAME})
        return context.get_current_revision()


def newest() -> str:
    """The newest revision of this release."""
    revision = ScriptDirectory(str(scripts_folder())).get_current_head()
    assert revision is not None
    return revision


def sql(database: str | URL, revision: str = "head") -> str:
    """The SQL that `upgrade` would run on an empty database, for those who run it by other means. Connects to nothing.

    Raises:
        ConfigurationError: There is no such revision, or no store for the URL.
    """
    url, _ = parse_url(database)
    text = io.StringIO()
    config = _config()
    config.output_buffer = text
    config.set_main_option("sqlalchemy.url", url.set(password=None).render_as_string().replace("%", "%%"))
    with _one_at_a_time, _revision_checked():
        command.upgrade(config, revision, sql=True)
    return text.getvalue()


def _config() -> Config:
    config = Config(stdout=io.StringIO())  # alembic prints; what there is to say, our callers say
    config.set_main_option("script_location", str(scripts_folder()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


@contextmanager
def _configured(database: str | URL | Engine, doing: str) -> Iterator[Config]:
    with _one_at_a_time, _connected(database, doing) as connection, _revision_checked():
        config = _config()
        config.attributes["connection"] = connection
        yield config


@contextmanager
def _connected(database: str | URL | Engine, doing: str) -> Iterator[Connection]:
    """A connection in a transaction that commits at the end of the block."""
    if isinstance(database, Engine):
        engine, dialect = database, dialect_of(database)
    else:
        url, dialect = parse_url(database)
        options = dialect.engine_options(url, connect_timeout=_CONNECT_TIMEOUT, lock_timeout=_LOCK_TIMEOUT)
        engine = make_engine(url, dialect, **options)
    try:
        with engine.connect() as connection:
            # The dialect's BEGIN: sqlite3 would begin only at the first INSERT, and leave half of a failed migration.
            dialect.begin(connection)
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
