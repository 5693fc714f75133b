"""Deletes staged rows by their keys; parses and quotes names of tables. Recovery by hand needs it, without Spark and Arrow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice
from typing import Final

from sqlalchemy import Connection, TableClause, and_, column, delete, inspect, or_, select, table

from dualwrite.errors import ConfigurationError

ID_COLUMN: Final = "dualwrite_id"
FENCE_COLUMN: Final = "dualwrite_fence"
_KEYS_PER_STATEMENT: Final = 100
_PART: Final = re.compile(r'\s*(?:"((?:[^"]|"")+)"|`((?:[^`]|``)+)`|([^\s."`()]+))\s*(\.|$)')


class StagedRows:
    """A staging table of which only the name is known.

    Args:
        name: The name from the job's row, as written by `quoted_name`.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def delete(self, connection: Connection, up_to: Mapping[str, int]) -> int:
        """Delete the rows staged under each id with fencing tokens up to the given one; return how many there were.

        If the table no longer exists, there are none.
        """
        staged = self._table(connection)
        if staged is None:
            return 0
        keys, deleted = iter(up_to.items()), 0
        while chosen := list(islice(keys, _KEYS_PER_STATEMENT)):
            ours = or_(*(and_(staged.c[ID_COLUMN] == key, staged.c[FENCE_COLUMN] <= fence) for key, fence in chosen))
            deleted += connection.execute(delete(staged).where(ours)).rowcount
        return deleted

    def committed_keys(self, connection: Connection, up_to: Mapping[str, int]) -> list[tuple[str, int]]:
        """The ids and fencing tokens, up to the given ones, that have visible staged rows; does not wait for locks."""
        staged = self._table(connection)
        if staged is None:
            return []
        key, fence = staged.c[ID_COLUMN], staged.c[FENCE_COLUMN]
        found: list[tuple[str, int]] = []
        for one, last in up_to.items():
            fences = connection.scalars(select(fence).where(key == one, fence <= last).distinct())
            found += [(one, each) for each in fences]
        return found

    def delete_exactly(self, connection: Connection, transactional_id: str, fence: int) -> int:
        """Delete the rows staged under this id and exactly this fencing token; return how many there were."""
        staged = self._table(connection)
        if staged is None:
            return 0
        ours = and_(staged.c[ID_COLUMN] == transactional_id, staged.c[FENCE_COLUMN] == fence)
        return connection.execute(delete(staged).where(ours)).rowcount

    def _table(self, connection: Connection) -> TableClause | None:
        if not self._name:  # the run was never opened by a task
            return None
        schema, name = split_name(self._name, connection.dialect.name)
        if not inspect(connection).has_table(name, schema=schema):
            return None
        return table(name, column(ID_COLUMN), column(FENCE_COLUMN), schema=schema)


def split_name(dbtable: str, dialect: str) -> tuple[str | None, str]:
    """The schema, or None, and the table of a name.

    Raises:
        ConfigurationError: The text is not a table name.
    """
    parts: list[str] = []
    place = 0
    while found := _PART.match(dbtable, place):
        quoted, ticked, bare, dot = found.groups()
        if quoted is not None:
            parts.append(quoted.replace('""', '"'))
        elif ticked is not None:
            parts.append(ticked.replace("``", "`"))
        else:
            parts.append(bare.lower() if dialect == "postgresql" else bare)
        place = found.end()
        if not dot:
            break
    if place != len(dbtable) or not 1 <= len(parts) <= 2 or dbtable.rstrip().endswith("."):  # noqa: PLR2004
        raise ConfigurationError(
            f"dbtable is {dbtable!r}, which is not a table name.",
            cause="rows can be written only to a table, not to a query",
            next_step='use table, schema.table, or "Quoted schema"."Quoted table"',
        )
    return (parts[0] if parts[1:] else None), parts[-1]


def quoted_name(name: str, schema: str | None) -> str:
    """A table's name quoted for PostgreSQL, to pass to the driver directly: SQLAlchemy's own quoting doubles each %."""
    return ".".join('"' + part.replace('"', '""') + '"' for part in (schema, name) if part is not None)
