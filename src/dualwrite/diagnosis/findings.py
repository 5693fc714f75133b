"""What a diagnosis reports: findings, and the facts about a database that they come from. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from dualwrite.kafka.inspect import BrokerCapabilities

CRASH: Final = "a crash of the server or its machine"
LOST_COMMIT: Final = "may lose acknowledged commits: their messages are then visible without their rows"
NATIVE: Final = "native"
LIBRDKAFKA: Final = "librdkafka"


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
        about: What it concerns: `kafka`, `topic <name>`, `database`, `journal` or `journal <prefix>`.
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
        forgotten: Ids with committed transactions that the database has forgotten.
    """

    address: str
    revision: str | None
    newest_revision: str | None
    table_error: tuple[str, str | None] | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    copied: tuple[str, bool] | None = None
    why_no_marks: str | None = None
    elsewhere: tuple[str, ...] = ()
    forgotten: tuple[str, ...] = ()


class Guarantee(Enum):
    """Both are atomic; they differ in what happens to a crashed transaction that is not recovered for a long time."""

    TWO_PHASE = "two-phase commit"
    """The broker keeps a prepared transaction until it is committed or aborted."""

    BOUNDED = "bounded"
    """The broker aborts a transaction after `transaction.timeout.ms`."""


@dataclass(frozen=True, slots=True)
class Promise:
    """The guarantee that a writer gets.

    Args:
        guarantee: Which guarantee.
        producer: "native" or "librdkafka".
        budget_ms: The most milliseconds from the first message of a transaction to its recovery; None if there is no limit,
            or the limit is not visible.
    """

    guarantee: Guarantee
    producer: str
    budget_ms: int | None

    def __str__(self) -> str:
        if self.guarantee is Guarantee.TWO_PHASE:
            return (
                f"Atomic, without a time limit (producer {self.producer!r} with two-phase commit): after a crash, a prepared "
                "transaction waits at the broker until recovery resolves it, and so do read_committed consumers of its "
                "partitions. Nothing is lost."
            )
        budget = "" if self.budget_ms is None else f", here {duration(self.budget_ms)}"
        return (
            f"Atomic, bounded by transaction.timeout.ms{budget} (producer {self.producer!r}): a crashed transaction that "
            "is not recovered within that time is proven LOST and reported, never silent."
        )


def promise(
    capabilities: BrokerCapabilities, *, producer: str, transaction_timeout_ms: int | None, two_phase: bool | None = None
) -> Promise:
    """The guarantee that a writer with these settings gets from a cluster.

    Args:
        capabilities: The cluster's capabilities.
        producer: The setting `producer`; "auto" chooses the best one for the cluster.
        transaction_timeout_ms: The setting `transaction.timeout.ms`; None means the broker's maximum.
        two_phase: The setting `two_phase`; False does not use two-phase commit even if the cluster supports it.
    """
    with_two_phase = capabilities.two_phase and two_phase is not False
    native = capabilities.native_with(two_phase=with_two_phase) and producer != LIBRDKAFKA
    if native and with_two_phase:
        return Promise(Guarantee.TWO_PHASE, NATIVE, None)
    budget = transaction_timeout_ms or capabilities.transaction_max_timeout_ms
    return Promise(Guarantee.BOUNDED, NATIVE if native else LIBRDKAFKA, budget)


def duration(milliseconds: int) -> str:
    """A duration as text: whole days, hours or minutes from two of them on, anything else in seconds."""
    for unit, name in ((86_400_000, "days"), (3_600_000, "h")):
        if milliseconds >= 2 * unit and milliseconds % unit == 0:
            return f"{milliseconds // unit} {name}"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{milliseconds / 1000:g} s" if rest or minutes < 2 else f"{minutes} min"  # noqa: PLR2004  (60 s is clearer)
