"""Which SQL text would end or replace the transaction that the writer owns. No I/O.

It is the friendly half of the guard: it refuses before anything has happened. What gets past it (a procedure, the driver's
own connection) is found by the transaction's marker when the state is recorded.
"""

from __future__ import annotations

import re
from typing import Final

_SKIPPED: Final = r"(?:\s|--[^\n]*(?:\n|\Z)|/\*.*?\*/|;)*"
_CONTROL: Final = (
    r"(?:COMMIT|END|ABORT|BEGIN|START\s+TRANSACTION|PREPARE\s+TRANSACTION"
    r"|ROLLBACK(?!(?:\s+(?:WORK|TRANSACTION))?\s+TO\b))\b"
)
_AT_START: Final = re.compile(rf"{_SKIPPED}({_CONTROL})", re.IGNORECASE | re.DOTALL)
_DEFINITION: Final = re.compile(rf"{_SKIPPED}CREATE\b", re.IGNORECASE | re.DOTALL)
_TOKEN: Final = re.compile(
    r"'(?:[^']|'')*'"  # texts; E'…\'…' is rare enough to be left to the marker
    r'|"(?:[^"]|"")*"'
    r"|\$(?P<tag>[A-Za-z_0-9]*)\$.*?\$(?P=tag)\$"
    r"|--[^\n]*|/\*.*?\*/"
    r"|(?P<end>;)",
    re.DOTALL,
)


def control_statement(sql: str) -> str | None:
    """The transaction control statement in `sql` (`COMMIT`, `ROLLBACK`, `START TRANSACTION`, …), or None.

    Savepoints, `ROLLBACK TO` included, are no control statements. Looks at every statement of a text that holds several,
    except in `CREATE …`, whose body (functions, triggers) has semicolons and `BEGIN … END` of its own.
    """
    found = _AT_START.match(sql)
    if found is None and ";" in sql and _DEFINITION.match(sql) is None:
        for token in _TOKEN.finditer(sql):
            if token["end"] is not None:
                found = _AT_START.match(sql, token.end())
                if found is not None:
                    break
    return None if found is None else " ".join(found[1].upper().split())
