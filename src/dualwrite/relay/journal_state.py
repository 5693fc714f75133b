"""The state of a journal, for people and for monitoring: what is in it, who publishes it, what it waits for.

`read_journals` and `open_journals` at the end read what the states are made of.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from dualwrite.errors import StateTableMissingError
from dualwrite.relay.dead_letters import DeadLetters
from dualwrite.stores.base import StateRow, TxnStateStore
from dualwrite.stores.journal import GateStatus
from dualwrite.stores.leases import Lease, number_of
from dualwrite.stores.sql import SqlStateStore
from dualwrite.texts import counted
from dualwrite.transactional_id import drainer_id, journaled_prefix, name_of

SOON: Final = 60.0
"""Seconds within which a running pool publishes a journal, or begins to, once Kafka answers; usually it is one."""


class PublishingState(Enum):
    """What is known of the transactions in which a journal is published."""

    NONE = "none"
    """Nothing is open."""

    OPEN = "open"
    """Whoever has the lease publishes with an open writer."""

    LEFT = "left"
    """A process that is gone may have left a transaction; whoever publishes next recovers it first."""

    LOST = "lost"
    """Kafka has aborted a batch that the database has committed: it must be published again before anything else."""

    UNVERIFIED = "unverified"
    """Whether Kafka has committed a batch is not known: somebody must look, and acknowledge it."""


class Waits(Enum):
    """What the messages of an open journal wait for."""

    KAFKA = "Kafka, which does not answer"
    PUBLISHER = "a process to publish it: no pool of its prefix is running"
    POOL = "a pool of its prefix"
    PUBLISHING = "its entries to be published"
    LOST_BATCH = "a batch that is lost, which comes first"
    UNVERIFIED_BATCH = "a batch that is unverified, which comes first"
    FAILURE = "can't be published"
    """The process that publishes it has failed; `GateStatus.failure` says why."""

    UNKNOWN = "Kafka, or a process to publish it"
    """Kafka was not asked."""


@dataclass(frozen=True, slots=True)
class JournalState:
    """The state of a journal.

    Args:
        gate: The gate, with what the journal contains.
        age: Seconds for which the oldest message has waited since it was written, or since its time came; 0 if there is none.
            By this machine's clock and that of the process that has written it.
        since_change: Seconds since the gate was opened or closed, by this machine's clock and that of the process that did it.
        published_by: The owner of the lease on the drainer's id; None if nobody publishes.
        pools: The owners of the live leases on ids of the prefix: the processes that may publish.
        batch: What is known of the transactions in which it is published.
        dead_letters: The entries that Kafka refused, which are among the dead letters of the relay `<prefix>.journal`.
        clusters: The Kafka clusters that rows of the prefix name; it can be published only if that is one.
        kept_by: The processes that write into it always: for them the gate is open although Kafka answers.
    """

    gate: GateStatus
    age: float
    since_change: float
    published_by: str | None
    pools: tuple[str, ...]
    batch: PublishingState
    dead_letters: int
    clusters: tuple[str, ...] = ()
    kept_by: tuple[str, ...] = ()

    @property
    def prefix(self) -> str:
        """The prefix of the pools that share the journal."""
        return self.gate.prefix

    @property
    def is_left_over(self) -> bool:
        """Whether entries are left although the gate is closed: nobody publishes them."""
        return not self.gate.is_open and bool(self.gate.entries)

    def waits_for(self, *, kafka_answers: bool | None) -> Waits | None:
        """What an open journal waits for; `kafka_answers` is None if Kafka was not asked.

        None if the gate is closed; or if all is well although it is open: it is kept open, or nothing is there to be published,
        and nobody to do it.
        """
        if self._is_quiet:
            return None
        for batch, waits in ((PublishingState.LOST, Waits.LOST_BATCH), (PublishingState.UNVERIFIED, Waits.UNVERIFIED_BATCH)):
            if self.batch is batch:
                return waits
        if kafka_answers is False:
            return Waits.KAFKA
        if self.gate.failure is not None or self.published_by is not None:
            return Waits.PUBLISHING if self.gate.failure is None else Waits.FAILURE
        if kafka_answers is None:
            return Waits.UNKNOWN
        return Waits.POOL if self.pools else Waits.PUBLISHER

    @property
    def _is_quiet(self) -> bool:
        """Whether the gate is closed, or all is well although it is open."""
        is_well = self.gate.failure is None and self.batch in (PublishingState.NONE, PublishingState.OPEN)
        is_idle = self.age < SOON if self.kept_by else not (self.gate.entries or self.pools)
        return not self.gate.is_open or (is_well and is_idle)

    def in_words(self, *, kafka_answers: bool | None) -> str | None:
        """What an open journal waits for, and for whom; of a closed one, that entries are left in it. Otherwise None."""
        messages = counted(self.gate.entries or 0, "message")
        waits = self.waits_for(kafka_answers=kafka_answers)
        if waits is None:
            left = f"The journal of {self.prefix} is closed, but {messages} are left in it, which nobody publishes."
            return left if self.is_left_over else None
        who = {Waits.PUBLISHING: self.published_by or "", Waits.POOL: ", ".join(self.pools)}.get(waits)
        by = f" ({who})" if who else ""
        if self.kept_by:
            since = f"The journal of {self.prefix}, into which its pools write always, has {messages} to be published. "
            since += f"The oldest has waited for {self.age:.0f} s."
        else:
            since = f"The journal of {self.prefix} has been open for {self.since_change:.0f} s, with {messages} "
            since += "to be published."
        if len(self.clusters) > 1:
            return f"{since} Nobody can publish it: its ids are on different Kafka clusters, {', '.join(self.clusters)}."
        if waits is Waits.FAILURE:
            return f"{since} It {waits.value}: {self.gate.failure}"
        only = f" It is published only on Kafka cluster {self.clusters[0]}." if self.clusters else ""
        return f"{since} It waits for {waits.value}{by}.{only}"

    @property
    def backlog(self) -> str:
        """What is in it, and why it is open, or closed; for journals that wait for nothing."""
        if not self.gate.is_open:
            return "It is closed and empty: messages go to Kafka."
        if not self.kept_by:
            return "It is open, with nothing to be published, and no pool of its prefix is running."
        oldest = f", of which the oldest has waited for {self.age:.0f} s" if self.gate.entries else ""
        here = f"{counted(self.gate.entries or 0, 'message')} to be published{oldest}; {self.gate.later or 0} for later"
        return f"Its pools write into it always ({', '.join(self.kept_by)}): {here}."

    @property
    def fractions(self) -> Mapping[str, float]:
        """The fraction of each limit that is used, by its name in JournalLimits; none if it is closed, or none is known."""
        limits = self.gate.limits
        if limits is None or not self.gate.is_open:
            return {}
        return {
            "entries": (self.gate.entries or 0) / limits.entries,
            "size": (self.gate.size or 0) / limits.size,
            "age": self.age / limits.age,
        }

    @property
    def used(self) -> tuple[str, float] | None:
        """The limit that is nearest, by its name in JournalLimits, and the fraction of it; None if no limits are known."""
        return max(self.fractions.items(), key=lambda each: each[1], default=None)


def state_of(gate: GateStatus, leases: Iterable[Lease], row: StateRow | None, dead_letters: int, now: float) -> JournalState:
    """The state of a journal.

    Args:
        gate: Its gate, with counts.
        leases: The leases of the ids that begin with `<prefix>.`.
        row: The row of the drainer's id.
        dead_letters: How many there are.
        now: Seconds since 1970.
    """
    live = {each.transactional_id: each.owner for each in leases if not each.has_ended}
    publisher = live.get(drainer_id(gate.prefix))
    pools, kept_by = (
        tuple(dict.fromkeys(owner for name, owner in live.items() if number_of(each, name) is not None))
        for each in (gate.prefix, journaled_prefix(gate.prefix))
    )
    batch, since_change = _batch(row, is_leased=publisher is not None), max(0.0, now - gate.changed_at.timestamp())
    return JournalState(gate, gate.age(now), since_change, publisher, (*pools, *kept_by), batch, dead_letters, kept_by=kept_by)


def _batch(row: StateRow | None, *, is_leased: bool) -> PublishingState:
    if row is None:
        return PublishingState.NONE
    if row.without_messages:
        return PublishingState.UNVERIFIED if row.unverified else PublishingState.LOST
    if not row.unresolved_generations:
        return PublishingState.NONE
    return PublishingState.OPEN if is_leased else PublishingState.LEFT


def read_journals(store: TxnStateStore, prefix: str | None = None) -> list[JournalState]:
    """The states of a database's journals, or of that of one prefix; empty if the store keeps none.

    Raises:
        StateTableMissingError: The journal's tables are missing, as may be intended in a database without pools that use one.
        StoreError: The database's own errors, translated.
    """
    if store.journal is None or not isinstance(store, SqlStateStore):
        return []
    return [_read(store, gate) for gate in store.journal.gates(prefix, counts=True)]


def open_journals(store: TxnStateStore, prefix: str = "") -> tuple[JournalState, ...]:
    """The open journals of pools whose ids begin with the prefix, and those with entries that nobody publishes.

    Those whose messages wait for nothing (`JournalState.waits_for`) are among them.

    Raises:
        StoreError: The database's own errors, translated; not for a database without the journal's tables.
    """
    try:
        found = read_journals(store)
    except StateTableMissingError:  # the user's own migrations, for writers without a journal
        return ()
    shown = (each for each in found if each.gate.is_open or each.is_left_over)
    return tuple(each for each in shown if f"{each.prefix}.".startswith(prefix))


def _read(store: SqlStateStore, gate: GateStatus) -> JournalState:
    if not gate.is_open and gate.entries:
        (again,) = store.journal.gates(gate.prefix, counts=False)
        if again.epoch != gate.epoch:  # it was opened or closed between reading it and counting its entries
            (again,) = store.journal.gates(gate.prefix, counts=True)
            return _read(store, again)
    drainer = drainer_id(gate.prefix)
    leases = store.leases.entries(f"{gate.prefix}.")
    found = state_of(gate, leases, store.read(drainer), DeadLetters(store, drainer).count(), time.time())
    clusters = store.elsewhere(name_of(gate.prefix), "") if gate.is_open else {}
    return replace(found, clusters=tuple(sorted(set(clusters.values()))))
