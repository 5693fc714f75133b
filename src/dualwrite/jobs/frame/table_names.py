"""Names of tables as users write them, and as they are written back. Needs no Arrow: recovery by hand reads them, too."""

from __future__ import annotations

import re
from typing import Final

from dualwrite.errors import ConfigurationError

_PART: Final = re.compile(r'\s*(?:"((?:[^"]|"")+)"|`((?:[^`]|``)+)`|([^\s."`()]+))\s*(\.|$)')


def split_name(dbtable: str, dialect: str) -> tuple[str | None, str]:
    """Schema, if there is one, and table.

    Raises:
        ConfigurationError: It is no name.
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
            f"dbtable is {dbtable!r}, which is no name of a table.",
            cause="rows can be written to a table only, not to a query",
            next_step='table, schema.table, or "Quoted name"."Of a table"',
        )
    return (parts[0] if parts[1:] else None), parts[-1]


def quoted_name(name: str, schema: str | None) -> str:
    """A table's name in PostgreSQL's SQL, for the driver itself: SQLAlchemy doubles each %."""
    return ".".join('"' + part.replace('"', '""') + '"' for part in (schema, name) if part is not None)
