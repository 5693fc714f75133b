"""Which privileges a role needs on which of our tables, by what it does: for the checks when something opens, and for GRANT."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from dualwrite.stores.sql.tables import (
    DEAD_LETTER_TABLE_NAME,
    GATE_TABLE_NAME,
    JOURNAL_TABLE_NAME,
    LATER_TABLE_NAME,
    LEASE_TABLE_NAME,
    POSITION_TABLE_NAME,
    STORE_TABLE_NAME,
    TABLE_NAME,
    VERSION_TABLE_NAME,
)

_KINDS: Final = ("SELECT", "INSERT", "UPDATE", "DELETE", "USAGE")
_READ: Final = _KINDS[:1]
_WRITE: Final = _KINDS[:3]
_ALL: Final = _KINDS[:4]
_JOBS: Final = ("kafka_job", "kafka_job_attempt", "kafka_job_batch", "kafka_job_chunk")

OUTBOX: Final = "outbox"
"""In RIGHTS, in place of the user's own table."""

RIGHTS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "writer": {TABLE_NAME: _WRITE, STORE_TABLE_NAME: _WRITE},
    "pool": {LEASE_TABLE_NAME: _WRITE},
    "journal": {LEASE_TABLE_NAME: _WRITE, GATE_TABLE_NAME: _WRITE, JOURNAL_TABLE_NAME: ("SELECT", "INSERT", "DELETE")}
    | {LATER_TABLE_NAME: _ALL, DEAD_LETTER_TABLE_NAME: ("SELECT", "INSERT")},
    "processor": {POSITION_TABLE_NAME: _WRITE},
    "relay": {LEASE_TABLE_NAME: _WRITE, DEAD_LETTER_TABLE_NAME: _ALL},
    "deletes": {OUTBOX: ("SELECT", "UPDATE", "DELETE")},
    "marks": {OUTBOX: ("SELECT", "UPDATE")},
    "jobs": dict.fromkeys(_JOBS[:2], _WRITE) | dict.fromkeys(_JOBS[2:], _ALL),
    "recover": dict.fromkeys(_JOBS[:2], _READ),
    "forget": {POSITION_TABLE_NAME: ("SELECT", "DELETE"), _JOBS[3]: ("SELECT", "DELETE")},
    "operator": dict.fromkeys(
        (TABLE_NAME, STORE_TABLE_NAME, LEASE_TABLE_NAME, POSITION_TABLE_NAME, DEAD_LETTER_TABLE_NAME, JOURNAL_TABLE_NAME), _READ
    )
    | dict.fromkeys((LATER_TABLE_NAME, GATE_TABLE_NAME, *_JOBS, VERSION_TABLE_NAME), _READ),
}
"""By use, the privileges on each table. SELECT … FOR UPDATE and FOR SHARE need UPDATE; not on MySQL, if DELETE is there.

`deletes` and `marks` are what a relay does with rows that are published, by its layout.
`operator` is what only reads: `status`, `stuck`, `doctor`, lists; `recover` is what `dualwrite.recover` reads of jobs.
"""

BASIC: Final = ("writer", "pool")
"""The uses that every service has."""

IMPLIED: Final = (*BASIC, "deletes", "marks")
"""The uses for which the command that prints GRANT has no option."""

_LOCKED: Final = (OUTBOX, DEAD_LETTER_TABLE_NAME, LATER_TABLE_NAME)
"""UPDATE on them is only for FOR UPDATE, where rows are deleted."""

_SEQUENCES: Final = {name: f"{name}_id_seq" for name in (JOURNAL_TABLE_NAME, LATER_TABLE_NAME, DEAD_LETTER_TABLE_NAME)}
"""PostgreSQL's sequences, for those who insert."""


class Right(NamedTuple):
    """A privilege on a table or, if it is USAGE, on a sequence; on the schema if there is no name. Without a schema: any."""

    schema: str | None
    name: str
    privilege: str


def rights_for(
    uses: Iterable[str], schema_of: Callable[[str], str | None], dialect: str, outbox: str | None = None
) -> list[Right]:
    """All that some uses need; `schema_of` says where a table is, `outbox` is the user's table, `schema.name` or `name`."""
    found: dict[Right, None] = {}
    for table, privileges in (each for use in uses for each in RIGHTS[use].items()):
        schema, name = schema_of(table), table
        if table == OUTBOX:
            before, _, name = (outbox or OUTBOX).rpartition(".")
            schema = before or None
        is_postgresql = dialect == "postgresql"
        if not is_postgresql and table in _LOCKED and "DELETE" in privileges:
            privileges = tuple(each for each in privileges if each != "UPDATE")  # noqa: PLW2901  (the same, for this database)
        if is_postgresql and schema is not None:
            found[Right(schema, "", "USAGE")] = None
        found |= dict.fromkeys(Right(schema, name, privilege) for privilege in privileges)
        if is_postgresql and "INSERT" in privileges and table in _SEQUENCES:
            found[Right(schema, _SEQUENCES[table], "USAGE")] = None
    return sorted(found, key=lambda each: (each.name, _KINDS.index(each.privilege)))


def rights_words(rights: Iterable[Right]) -> str:
    """`SELECT, INSERT on dualwrite_journal; USAGE on SEQUENCE dualwrite_journal_id_seq`."""
    return "; ".join(f"{', '.join(privileges)} on {place}" for place, privileges in _by_place(rights, str).items())


def rights_on(table: str, schema: str | None, error: str, *, reads: bool) -> str:
    """What to grant after a driver's error about a table, which may name its sequence or its schema."""
    if "for schema" in error:
        return "USAGE on the schema"
    if f"{table}_id_seq" in error:
        return rights_words([Right(schema, f"{table}_id_seq", "USAGE")])
    needed = {privilege for use in RIGHTS.values() for privilege in use.get(table, ())}
    return rights_words(Right(schema, table, each) for each in _KINDS if (each == "SELECT" if reads else each in needed))


def grants(rights: Iterable[Right], quote: Callable[[str], str], role: str) -> list[str]:
    """The GRANT statements; `quote` quotes a name for the database, `role` is quoted already."""
    return [f"GRANT {', '.join(some)} ON {place} TO {role}" for place, some in _by_place(rights, quote).items()]


def _by_place(rights: Iterable[Right], quote: Callable[[str], str]) -> dict[str, list[str]]:
    """The privileges on each table, sequence and schema."""
    found: dict[str, list[str]] = defaultdict(list)
    for right in rights:
        kind = "SCHEMA " if not right.name else "SEQUENCE " if right.privilege == "USAGE" else ""
        found[kind + ".".join(quote(each) for each in (right.schema, right.name) if each)].append(right.privilege)
    return found
