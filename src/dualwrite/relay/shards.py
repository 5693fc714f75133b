"""The shards of an outbox: which of them a relay works on, as all relays of a name have equal shares; and a shard's drainer.

Each is a leased number. A lease only says who should work on a shard. That no row is published twice, and that the rows of a
key stay in their order, does not depend on it: a batch's transaction locks its rows in their order, and commits under the claim
of its transactional id.
So the number of shards may change while relays with another number are running.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import count as numbers
from typing import Final

from dualwrite.deadline import Pauses
from dualwrite.errors import BrokerError
from dualwrite.observability.logs import SubjectLogger, if_unexpected
from dualwrite.observability.outages import ErrorMeaning, is_no_answer, level_of
from dualwrite.pool.pool_ids import LeasedIds
from dualwrite.relay.dead_letters import DeadLetters
from dualwrite.relay.drain import Drain, Turn
from dualwrite.relay.drainer import Drainer
from dualwrite.relay.options import RelayOptions
from dualwrite.relay.outbox_table import OutboxTable
from dualwrite.relay.poison import meaning_of
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.leases import Lease, LeaseStore, number_of, numbered

log = SubjectLogger(__name__)

_MEMBER: Final = "member"


def member_shards(name: str, leased: str) -> int | None:
    """The number of shards of the relay that has a lease as one of several members; None if the lease is another one."""
    found = re.fullmatch(rf"{re.escape(name)}\.{_MEMBER}(\d+)\.\d+", leased)
    return None if found is None else int(found[1])


def shard_counts(name: str, leases: Collection[Lease]) -> set[int]:
    """The numbers of shards of the relays of a name that hold `leases`; a relay with one shard is no member."""
    members = {each.owner: count for each in leases if (count := member_shards(name, each.transactional_id)) is not None}
    workers = {each.owner for each in leases if number_of(name, each.transactional_id) is not None}
    return {*members.values(), *(1 for each in workers - members.keys())}


@dataclass(frozen=True, slots=True)
class Worker:
    """Who works on a shard now: its id, the owner of the lease, and in how many seconds that ends unless it is renewed."""

    transactional_id: str
    owner: str
    ends_in: float


@dataclass(frozen=True, slots=True)
class RelayStatus:
    """The state of an outbox and of its relays.

    Args:
        name: The relays' name.
        table: The outbox.
        waiting: The rows that could be published now.
        later: The rows whose `not_before` is in the future.
        oldest: The age of the oldest row of `waiting` in seconds, if the layout has a column for it.
        dead: The number of dead letters.
        workers: Who works on the shards.
        notes: What keeps rows waiting, or out of order, a sentence each: different numbers of shards, a sequence with a cache.
    """

    name: str
    table: str
    waiting: int
    later: int
    oldest: float | None
    dead: int
    workers: tuple[Worker, ...]
    notes: tuple[str, ...] = ()


def status_of(
    name: str, table: OutboxTable, dead_letters: DeadLetters, leases: Iterable[Lease], unordered: str | None
) -> RelayStatus:
    """The state now; `leases` are those of the name, `unordered` is why rows may be out of order.

    Raises:
        StoreError: The database's own errors, translated.
    """
    waiting = table.waiting()
    held = [each for each in leases if not each.has_ended]
    workers = tuple(
        Worker(each.transactional_id, each.owner, each.seconds_left or 0.0)
        for each in held
        if number_of(name, each.transactional_id) is not None
    )
    notes = [] if unordered is None else [unordered]
    if len(counts := sorted(shard_counts(name, held))) > 1:
        of = ", ".join(map(str, counts))
        notes.append(f"Its relays have different numbers of shards ({of}): rows may wait until all have the same.")
    return RelayStatus(name, table.name, *waiting, dead_letters.count(), workers, tuple(notes))


class ShardLeases:
    """The shards of one relay, and its share of them.

    Args:
        leases: The database's leases.
        ids: This relay's leases.
        name: The relay's name: shard 0 has the id `<name>.1`, and so on.
        count: The number of shards.
    """

    def __init__(self, leases: LeaseStore, ids: LeasedIds, name: str, count: int) -> None:
        self._leases = leases
        self._ids = ids
        self._name = name
        self._shards = [numbered(name, number) for number in range(1, count + 1)]
        self._members = f"{name}.{_MEMBER}{count}"

    def balance(self) -> tuple[list[str], int]:
        """Lease free shards, up to this relay's share, and become one of the members.

        Returns:
            The shards that are leased now, and how many of them are more than its share: these it should release.

        Raises:
            StoreError: The database's own errors, translated.
        """
        entries = [each for each in self._leases.entries(f"{self._name}.") if not each.has_ended]
        share = len(self._shards) if len(self._shards) == 1 else self._share(entries)
        taken = {each.transactional_id for each in entries}
        for shard in self._shards:
            if len(self._ours()) >= share:
                break
            if shard not in taken:
                self._ids.acquire_one(shard)
        ours = self._ours()
        return ours, max(0, len(ours) - share)

    def _ours(self) -> list[str]:
        held = self._ids.held
        return [shard for shard in self._shards if shard in held]

    def _share(self, entries: list[Lease]) -> int:
        members = {each.transactional_id for each in entries if member_shards(self._name, each.transactional_id) is not None}
        if not any(number_of(self._members, held) is not None for held in self._ids.held):
            free = (name for name in (numbered(self._members, number) for number in numbers(1)) if name not in members)
            name = next(free)
            if self._ids.acquire_one(name):
                members.add(name)
        return -(-len(self._shards) // max(1, len(members)))


class ShardDrainer(Drainer):
    """Publishes the rows of one shard, until it is stopped or the shard is another relay's.

    Args:
        name: The shard's transactional id.
        store: The database.
        ids: The relay's leases.
        open_drain: Opens the shard's writer, and makes the drain on it.
        check_kafka: Raises BrokerUnavailableError if Kafka does not answer. Called before the next transaction after Kafka has
            not answered: a transaction would keep its rows locked, on SQLite the whole database, while it waits.
        options: How to wait and to retry.
        count: Called with each turn, in the thread.
    """

    def __init__(
        self,
        name: str,
        store: TxnStateStore,
        ids: LeasedIds,
        open_drain: Callable[[], Drain],
        check_kafka: Callable[[], None],
        options: RelayOptions,
        count: Callable[[Turn], None],
    ) -> None:
        super().__init__(name, ids, open_drain, Pauses(options.pause, options.longest_pause, spread=0.0))
        self._store = store
        self._check_kafka = check_kafka
        self._options = options
        self._count = count
        self._poll = options.poll
        self._is_idle = False

    def _is_due(self) -> bool:
        if isinstance(self.waits_for, BrokerError) and is_no_answer(self.waits_for):
            self._check_kafka()
        return self._drain is None or not self._is_idle or self._drain.has_rows()

    def _done(self, turn: Turn) -> None:
        self._is_idle = not turn.rows
        if turn.rows:
            self._poll = self._options.poll
            self._count(turn)

    def _idle_seconds(self) -> float:
        seconds, self._poll = self._poll, min(2 * self._poll, self._options.longest_poll)
        return seconds

    def _failed(self, error: Exception) -> None:
        meaning = meaning_of(error, self._store)
        if meaning is ErrorMeaning.IN_DOUBT:
            log.warning("%s", error, transactional_id=self.name)
        elif meaning is not ErrorMeaning.LATER:
            raise error
        else:
            level = logging.INFO if self._pauses.taken else level_of(error)
            text = "trying again in %.3g s: %s"
            log.log(level, text, self._pauses.upcoming, error, exc_info=if_unexpected(error), transactional_id=self.name)

    def _lost(self) -> None:
        self._stopping.set()
