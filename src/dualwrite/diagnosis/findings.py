"""What a diagnosis reports: findings, and the facts about a database that they come from. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

CRASH: Final = "a crash of the server or its machine"
LOST_COMMIT: Final = "may lose acknowledged commits: their messages are then visible without their rows"


class Severity(Enum):
    """How much a finding matters, most severe first."""

    BROKEN = "broken"
    """Dual writes can't work with this setup."""

    WEAK = "weak"
    """Dual writes work, but acknowledged data may still be lost, or is lost more easily than necessary."""

    UNKNOWN = "unknown"
    """Whether acknowledged data may be lost can't be seen from here."""

    NOTE = "note"
    """Worth knowing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding.

    Args:
        severity: How much it matters.
        about: What it concerns: `kafka`, `topic <name>` or `database`.
        what: The finding, as a sentence.
        change: The setting or step that fixes it, if there is one; of an UNKNOWN, where to look.
    """

    severity: Severity
    about: str
    what: str
    change: str | None = None


@dataclass(frozen=True, slots=True)
class DatabaseFacts:
    """A database that could be reached.

    Args:
        address: Its address as shown to users, without the password.
        revision: The revision that dualwrite's migrations recorded in it, or None.
        newest_revision: The newest revision of this release; None for a database without migrations (RocksDB, ZooKeeper).
        table_error: Why the table can't be used, and the step that fixes it; None if it can be used.
        settings: The settings that decide whether an acknowledged commit is durable; see `TxnStateStore.durability`.
        copied: The finding for a database that was copied or moved, and whether that is certain; None for any other.
        why_no_marks: Why a copy of the database can't be recognised, if so; see `TxnStateStore.why_no_marks`.
        elsewhere: Ids that are on another Kafka cluster than the inspected one.
    """

    address: str
    revision: str | None
    newest_revision: str | None
    table_error: tuple[str, str | None] | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    copied: tuple[str, bool] | None = None
    why_no_marks: str | None = None
    elsewhere: tuple[str, ...] = ()


def about_database(severity: Severity, what: str, change: str | None) -> Finding:
    """A finding about the database."""
    return Finding(severity, "database", what, change)
