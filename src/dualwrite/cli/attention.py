"""What in `dualwrite status` needs somebody: transactions that wait for recovery, lost ones, markers that are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from dualwrite.cli.next_command import GivenOptions
from dualwrite.cli.options import counted
from dualwrite.recovery.decision import Decision, decide
from dualwrite.state import TransactionDescription, TransactionStatus
from dualwrite.stores.base import StateRow
from dualwrite.stores.leases import Lease
from dualwrite.transactional_id import TransactionalId

_EXPIRED: Final = 60.0
"""Seconds after which the other pools of a prefix should have recovered the ids of a lease that has ended."""


class Need(Enum):
    """What somebody must do."""

    RECOVER = "recover"
    """A transaction waits for recovery, or the pool of an id is gone and no other recovers it."""

    ACKNOWLEDGE = "acknowledge"
    """A transaction is lost or unverified, and its messages must be dealt with."""

    MARKERS = "markers"
    """A decided transaction is not being ended: probably a partition has no leader."""


@dataclass(frozen=True)
class Attention:
    """One transaction that needs somebody.

    Args:
        need: What must be done.
        transactional_id: The logical id.
        kafka_id: The id as Kafka sees it.
    """

    need: Need
    transactional_id: str
    kafka_id: str

    def to_json(self, given: GivenOptions) -> dict[str, Any]:
        """As JSON values."""
        names = {"need": self.need.value, "transactional_id": self.transactional_id, "kafka_transactional_id": self.kafka_id}
        return {**names, "next_command": command_for(self.need, [self], given)}


def needed(
    rows: Iterable[StateRow],
    leases: Mapping[str, Lease],
    seen: Mapping[str, Mapping[int, TransactionDescription | None]],
    now_ms: int,
    *,
    longer_than: float,
) -> list[Attention]:
    """What needs somebody.

    Args:
        rows: The rows of the ids.
        leases: The leases of pools, by logical id.
        seen: What the coordinators report, by the row's id and generation; without ids that were not asked about.
        now_ms: Milliseconds since 1970.
        longer_than: Seconds for which a transaction must be open; younger ones are probably somebody's work.
    """
    found: list[Attention] = []
    for row in rows:
        name = TransactionalId.of_row(row.transactional_id).logical
        lease = leases.get(name)
        is_leased = lease is not None and not lease.has_ended
        found += [Attention(Need.ACKNOWLEDGE, name, row.kafka_id(entry.generation)) for entry in row.lost]
        described = seen.get(row.transactional_id, {})
        open_ones = [
            Attention(need, name, row.kafka_id(generation))
            for generation, description in described.items()
            if (need := _need(row, generation, description, now_ms - longer_than * 1000, is_leased=is_leased)) is not None
        ]
        if not open_ones and row.unresolved_generations and _is_abandoned(lease):
            open_ones.append(Attention(Need.RECOVER, name, row.kafka_id(row.generation)))
        found += open_ones
    return found


def _need(
    row: StateRow, generation: int, found: TransactionDescription | None, begun_before: float, *, is_leased: bool
) -> Need | None:
    if generation not in row.unresolved_generations:
        return None
    decision = decide(row.prepared_state if row.prepared_generation == generation else None, found)
    if decision is Decision.LOST or (decision is Decision.UNVERIFIED and not is_leased):
        return Need.RECOVER
    if found is None or not 0 <= found.start_time_ms < begun_before:
        return None
    if found.status.is_ending:
        return Need.MARKERS
    return Need.RECOVER if found.status is TransactionStatus.ONGOING and not is_leased else None


def _is_abandoned(lease: Lease | None) -> bool:
    return lease is not None and lease.seconds_left is not None and lease.seconds_left < -_EXPIRED


def verdict_lines(found: Iterable[Attention], given: GivenOptions) -> list[str]:
    """One line for each kind of need, with the command to run next; empty if there is none."""
    entries = list(found)
    lines = []
    for need, text in _TEXTS.items():
        ones = [each for each in entries if each.need is need]
        if ones:
            lines.append(f"{text(len(ones))}: {command_for(need, ones, given)}")
    return lines


def command_for(need: Need, entries: Iterable[Attention], given: GivenOptions) -> str:
    """The command that does what is needed."""
    ones = list(entries)
    if need is Need.MARKERS:
        return given.command("transactions", "describe", *dict.fromkeys(each.kafka_id for each in ones))
    ids = [word for name in dict.fromkeys(each.transactional_id for each in ones) for word in ("--id", name)]
    return given.command("recover", *ids, *(["--acknowledge"] if need is Need.ACKNOWLEDGE else []))


_TEXTS: Final[Mapping[Need, Callable[[int], str]]] = {
    Need.RECOVER: lambda count: f"{counted(count, 'transaction')} wait{'s' if count == 1 else ''}",
    Need.MARKERS: lambda count: f"{counted(count, 'transaction')} {'is' if count == 1 else 'are'} not being ended",
    Need.ACKNOWLEDGE: lambda count: (
        f"{counted(count, 'transaction')} lost or unverified, to acknowledge when the messages are dealt with"
    ),
}
