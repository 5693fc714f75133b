"""dualwrite's tables in Django's migrations: each of alembic's revisions is one migration, with the same SQL.

The revision is noted in the same table as by `dualwrite db upgrade`, so both may be used: what has run is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, ClassVar, Final

from django.db import connections, router
from django.db.migrations.operations.base import Operation

from dualwrite import migration
from dualwrite.django.configuration import aliases
from dualwrite.django.savepoints import Connection

APP: Final = "dualwrite"
VERSION_TABLE: Final = "kafka_transaction_state_version"

_URLS: Final = {"postgresql": "postgresql+psycopg://", "sqlite": "sqlite://", "mysql": "mysql+pymysql://"}
_MARIADB: Final = "mariadb+pymysql://"
_END: Final = re.compile(r";\s*$", re.MULTILINE)
_COMMENT: Final = re.compile(r"^--.*$", re.MULTILINE)
_CREATE_INDEX: Final = re.compile(r"CREATE INDEX (\w+) ON (\w+)")
_TRANSACTION: Final = ("BEGIN", "COMMIT")
"""What alembic's scripts begin and end with: the transaction is that of Django's migration."""


class Upgrade(Operation):
    """Upgrade dualwrite's tables by one of alembic's revisions.

    Only in databases that the setting DUALWRITE has, and where the routers allow it.

    Args:
        revision: The revision.
        before: The one before it.
    """

    reversible: ClassVar[bool] = True
    reduces_to_sql: ClassVar[bool] = True

    def __init__(self, revision: str, before: str = "base") -> None:
        self.revision = revision
        self.before = before

    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        """How the migration's file has it."""
        return type(self).__name__, [self.revision, self.before], {}

    def state_forwards(self, app_label: str, state: Any) -> None:
        """The models have operations of their own."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Upgrade the tables, unless `dualwrite db upgrade` has done it."""
        del from_state, to_state
        connection = schema_editor.connection
        if not _is_wanted(connection.alias, app_label):
            return
        found = self.before if schema_editor.collect_sql else current_revision(connection)
        if found in (None, self.before):
            _execute(schema_editor, statements(connection, f"{found or 'base'}:{self.revision}"))

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Downgrade them; from the first revision, that drops every fencing token and every unresolved state."""
        del from_state, to_state
        connection = schema_editor.connection
        if not _is_wanted(connection.alias, app_label):
            return
        if schema_editor.collect_sql or current_revision(connection) == self.revision:
            down = statements(connection, f"{self.revision}:{self.before}", downgrades=True)
            last = [f"DROP TABLE {VERSION_TABLE}"] if self.before == "base" else []
            _execute(schema_editor, [*down, *last])


def make_missing_tables(using: str) -> None:
    """Make the tables of a database that has none, where it runs no migrations or the setting has got a new alias."""
    connection = connections[using]
    if _is_wanted(using, APP) and current_revision(connection) is None:
        with connection.schema_editor() as schema_editor:
            _execute(schema_editor, statements(connection, migration.newest()))


def current_revision(connection: Connection) -> str | None:
    """The revision of the tables in a database; None if there are none."""
    with connection.cursor() as cursor:
        if VERSION_TABLE not in connection.introspection.table_names(cursor):
            return None
        cursor.execute(f"SELECT version_num FROM {VERSION_TABLE}")  # noqa: S608  (a constant)
        found = cursor.fetchone()
    return None if found is None else str(found[0])


def statements(connection: Connection, revisions: str, *, downgrades: bool = False) -> list[str]:
    """The statements of alembic for a database of Django's.

    Args:
        connection: Django's.
        revisions: As for `dualwrite.migration.sql`.
        downgrades: Whether they go back.
    """
    vendor = connection.vendor
    url = _MARIADB if vendor == "mysql" and connection.mysql_is_mariadb else _URLS[vendor]
    script = _COMMENT.sub("", migration.sql(f"{url}localhost/database", revisions, downgrades=downgrades))
    if vendor == "mysql":  # as the tables: a killed migration may have left it
        script = script.replace(f"CREATE TABLE {VERSION_TABLE}", f"CREATE TABLE IF NOT EXISTS {VERSION_TABLE}")
    return [each for text in _END.split(script) if (each := text.strip()) and each not in _TRANSACTION]


def _is_wanted(using: str, app_label: str) -> bool:
    return bool(using in aliases() and connections[using].vendor in _URLS and router.allow_migrate(using, app_label))


def _execute(schema_editor: Any, given: Iterable[str]) -> None:
    connection = schema_editor.connection
    for statement in given:
        index = _CREATE_INDEX.match(statement) if connection.vendor == "mysql" and not schema_editor.collect_sql else None
        if index is None or not _exists(connection, *index.groups()):
            schema_editor.execute(statement, None)


def _exists(connection: Connection, index: str, table: str) -> bool:
    """MariaDB and MySQL commit at each statement, so a killed migration may have left an index."""
    with connection.cursor() as cursor:
        return index in connection.introspection.get_constraints(cursor, table)
