"""Parses table names and quotes them. Does not need Arrow, because manual recovery also uses it."""

from __future__ import annotations

import re
from typing import Final

from dualwrite.errors import ConfigurationError

_PART: Final = re.compile(r'\s*(?:"((?:[^"]|"")+)"|`((?:[^`]|``)+)`|([^\s."`()]+))\s*(\.|$)')


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
