"""Which SQL text would end or replace the transaction that the writer owns. No I/O.

This half of the guard refuses a statement before anything has happened. What it misses (a procedure, the driver's own
connection) is detected by the transaction's marker when the state is recorded.
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
    r"'(?:[^']|'')*'"  # string literals; E'…\'…' is rare enough to be left to the marker
    r'|"(?:[^"]|"")*"'
    r"|\$(?P<tag>[A-Za-z_0-9]*)\$.*?\$(?P=tag)\$"
    r"|--[^\n]*|/\*.*?\*/"
    r"|(?P<end>;)",
    re.DOTALL,
)

_ADMINISTERED: Final = r"(?:NO_WRITE_TO_BINLOG\s+|LOCAL\s+)?TABLES?"
_IMPLICIT_COMMIT: Final = re.compile(
    rf"(?:\s|--[^\n]*(?:\n|\Z)|\#[^\n]*(?:\n|\Z)|/\*(?!!|M!).*?\*/|;)*"
    rf"((?:ALTER|RENAME|TRUNCATE|GRANT|REVOKE|FLUSH|RESET|INSTALL|UNINSTALL|BACKUP|LOCK\s+TABLES?|CACHE\s+INDEX|LOAD\s+INDEX"
    rf"|(?:ANALYZE|OPTIMIZE|REPAIR|CHECK)\s+{_ADMINISTERED}|CHANGE\s+(?:MASTER|REPLICATION)|(?:START|STOP)\s+(?:ALL\s+)?"
    rf"(?:SLAVES?|REPLICAS?|GROUP_REPLICATION)|IMPORT\s+TABLE|SET\s+PASSWORD"
    rf"|CREATE(?!\s+(?:OR\s+REPLACE\s+)?TEMPORARY\b)|DROP(?!\s+(?:TEMPORARY|PREPARE)\b))\b(?:\s+\w+)?"
    rf"|SET\b[^'\"`;]*?\bAUTOCOMMIT\s*:?=\s*(?!0\b|OFF\b|FALSE\b)\w+)",
    re.IGNORECASE | re.DOTALL,
)


def implicit_commit(sql: str) -> str | None:
    """The beginning of a statement that makes MariaDB and MySQL commit the transaction implicitly, or None.

    `CREATE TABLE`, `TRUNCATE`, `LOCK TABLES`, `FLUSH`, `SET autocommit = 1` and others, but not temporary tables. Checks
    the first statement of a text; executable comments are left to the transaction's marker.
    """
    found = _IMPLICIT_COMMIT.match(sql)
    return None if found is None else " ".join(found[1].split())


def control_statement(sql: str) -> str | None:
    """The transaction control statement in `sql` (`COMMIT`, `ROLLBACK`, `START TRANSACTION`, …), or None.

    Savepoint statements, including `ROLLBACK TO`, do not count. Checks every statement of a text with several, except in
    `CREATE …`, whose body (functions, triggers) may contain semicolons and `BEGIN … END`.
    """
    found = _AT_START.match(sql)
    if found is None and ";" in sql and _DEFINITION.match(sql) is None:
        for token in _TOKEN.finditer(sql):
            if token["end"] is not None:
                found = _AT_START.match(sql, token.end())
                if found is not None:
                    break
    return None if found is None else " ".join(found[1].upper().split())
