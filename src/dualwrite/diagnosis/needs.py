"""What of the ids in a database needs somebody: a pure function of the rows, the leases and what the coordinators report."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from dualwrite.recovery.decision import Decision, decide
from dualwrite.state import TransactionDescription, TransactionStatus
from dualwrite.stores.base import LostKind, LostTransaction, StateRow
from dualwrite.stores.leases import Lease
from dualwrite.texts import counted
from dualwrite.transactional_id import TransactionalId

Seen = Mapping[str, Mapping[int, TransactionDescription | None]]
"""What the coordinators report, by the row's id and generation; None for an id that they do not know."""

LONGER_SECONDS: Final = 10.0
"""For how long a transaction is open at least that may need somebody: younger ones are probably somebody's work."""

_EXPIRED_SECONDS: Final = 60.0
"""Seconds after which the other pools of a prefix should have recovered the ids of a lease that has ended."""


class Need(Enum):
    """What somebody must do."""

    RECOVER = "recover"
    """A transaction waits for recovery, or the pool of an id is gone and no other recovers it."""

    PUBLISH = "publish"
    """A transaction is lost: its messages can be published again from the log, or must be dealt with otherwise."""

    GONE = "gone"
    """A transaction is lost, and Kafka's log does not have all of its messages: they must be dealt with otherwise."""

    ACKNOWLEDGE = "acknowledge"
    """A transaction is unverified, and its messages must be dealt with."""

    FORGOTTEN = "forgotten"
    """The database has forgotten transactions whose messages are visible, and their missing rows must be dealt with."""

    MARKERS = "markers"
    """A decided transaction is not being ended: probably a partition has no leader."""


@dataclass(frozen=True)
class Attention:
    """One transaction that needs somebody, by its logical id and the id as Kafka sees it."""

    need: Need
    transactional_id: str
    kafka_id: str


def needed(
    rows: Iterable[StateRow],
    leases: Mapping[str, Lease],
    seen: Seen,
    now_ms: int,
    *,
    longer_than: float,
    gone: Collection[tuple[str, LostTransaction]] = (),
) -> list[Attention]:
    """What needs somebody. A transaction that has been open for less than some seconds is probably somebody's work.

    Args:
        rows: The rows of the ids.
        leases: The leases of pools, by logical id.
        seen: What the coordinators report; without ids that were not asked about.
        now_ms: Milliseconds since 1970.
        longer_than: Those seconds.
        gone: The lost transactions, with the ids of their rows, that can't be published again.
    """
    found: list[Attention] = []
    for row in rows:
        name = TransactionalId.of_row(row.transactional_id).logical
        lease = leases.get(name)
        is_leased = lease is not None and not lease.has_ended
        for entry in row.lost:
            listed = Need.GONE if (row.transactional_id, entry) in gone else _LISTED[entry.kind]
            found.append(Attention(listed, name, row.kafka_id(entry.generation)))
        open_ones = [
            Attention(need, name, row.kafka_id(generation))
            for generation, description in seen.get(row.transactional_id, {}).items()
            if (need := _need(row, generation, description, now_ms - longer_than * 1000, is_leased=is_leased)) is not None
        ]
        if not open_ones and row.unresolved_generations and lease is not None and lease.has_ended_for(_EXPIRED_SECONDS):
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


_LISTED: Final = {
    LostKind.LOST: Need.PUBLISH,
    LostKind.UNVERIFIED: Need.ACKNOWLEDGE,
    LostKind.FORGOTTEN: Need.FORGOTTEN,
}

NEEDS: Final[Mapping[Need, Callable[[int], str]]] = {
    Need.RECOVER: lambda count: f"{counted(count, 'transaction')} wait{'s' if count == 1 else ''}",
    Need.MARKERS: lambda count: f"{counted(count, 'transaction')} {'is' if count == 1 else 'are'} not being ended",
    Need.PUBLISH: lambda count: f"{counted(count, 'transaction')} lost, to publish again",
    Need.GONE: lambda count: f"{counted(count, 'transaction')} lost for good, to acknowledge when its messages are dealt with",
    Need.ACKNOWLEDGE: lambda count: (
        f"{counted(count, 'transaction')} unverified, to acknowledge when the messages are dealt with"
    ),
    Need.FORGOTTEN: lambda count: (
        f"{counted(count, 'id')} {'has' if count == 1 else 'have'} committed transactions that the database has forgotten, to "
        "acknowledge when their missing rows are dealt with"
    ),
}
"""What is needed, in words, for a number of transactions."""


_OPTIONS: Final[Mapping[Need, tuple[str, ...]]] = {
    Need.PUBLISH: ("--republish",),
    Need.GONE: ("--acknowledge",),
    Need.ACKNOWLEDGE: ("--acknowledge",),
    Need.FORGOTTEN: ("--acknowledge",),
}


def next_words(need: Need, ones: Iterable[Attention]) -> tuple[str, ...]:
    """The words after `dualwrite` of the command that does what is needed."""
    if need is Need.MARKERS:
        return ("transactions", "describe", *dict.fromkeys(each.kafka_id for each in ones))
    ids = (word for name in dict.fromkeys(each.transactional_id for each in ones) for word in ("--id", name))
    return ("recover", *ids, *_OPTIONS.get(need, ()))


@dataclass(frozen=True)
class ToDo:
    """What is to be done about several transactions: a sentence without the final period, the command, and the logical ids."""

    text: str
    next_words: tuple[str, ...]
    ids: tuple[str, ...]


def to_do(found: Iterable[Attention]) -> list[ToDo]:
    """What is to be done, most urgent first; empty if nothing is."""
    ones = list(found)
    groups = [(need, [each for each in ones if each.need is need]) for need in NEEDS]
    return [
        ToDo(NEEDS[need](len(each)), next_words(need, each), tuple(dict.fromkeys(one.transactional_id for one in each)))
        for need, each in groups
        if each
    ]
