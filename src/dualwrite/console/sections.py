"""What the sections of the page show: each reads its own part, has a limit, and fails by itself."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from dualwrite.admin.decisions import Decisions
from dualwrite.console.recent import DatabaseRates, Recent
from dualwrite.console.subject import LIMIT, Subject
from dualwrite.console.watched import Watched
from dualwrite.diagnosis import Diagnosis, examine
from dualwrite.diagnosis.ids import FoundIds, read_ids
from dualwrite.diagnosis.needs import Attention, Need, needed
from dualwrite.diagnosis.stuck import Look, look
from dualwrite.errors import ConfigurationError, StateTableMissingError
from dualwrite.outbox.dead_letters import DeadLetter, DeadLetters, letters_by_relay
from dualwrite.outbox.journal_drain import drained_prefix
from dualwrite.outbox.journal_state import JournalState, read_journals
from dualwrite.processor.dead_letters import DeadLetter as ProcessorLetter
from dualwrite.state import TransactionDescription, TransactionStatus
from dualwrite.stores.base import LostTransaction, StateRow
from dualwrite.stores.leases import Lease
from dualwrite.texts import now_ms

LONGER: Final = 10.0
"""Seconds from which on an open transaction is shown; younger ones are probably somebody's work."""

EVERY: Final = 4.0
_DOCTOR_EVERY: Final = 60.0
_DOCTOR_LIMIT: Final = 25.0
_TOPICS_EVERY: Final = 30.0
_MOST_LETTERS: Final = 20
_TO_DO: Final = {
    Need.RECOVER: "waits for recovery",
    Need.PUBLISH: "lost, to publish again",
    Need.GONE: "lost for good",
    Need.ACKNOWLEDGE: "unverified",
    Need.MARKERS: "not being ended",
}


@dataclass(frozen=True)
class Letters:
    """The dead letters of one relay: how many, the oldest of them, and whether they can be replayed here."""

    relay: str
    count: int
    oldest: list[DeadLetter]
    can_replay: bool


@dataclass(frozen=True)
class Left:
    """What waits in the database beside the rows of the ids."""

    journals: list[JournalState]
    letters: list[Letters]


@dataclass(frozen=True)
class ProcessorLetters:
    """What a group's processors have put into a dead-letter topic and was not replayed: how many letters, and the oldest."""

    topic: str
    group: str
    count: int
    oldest: list[ProcessorLetter]


@dataclass(frozen=True)
class IdLine:
    """One id as the page shows it: its lanes, its lease, and what is open on it."""

    name: str
    rows: list[StateRow]
    lease: Lease | None
    open: list[str]
    lost: int
    needs: list[Attention]

    @property
    def need_words(self) -> str:
        """What is to be done on it."""
        return ", ".join(dict.fromkeys(_TO_DO[each.need] for each in self.needs))

    @property
    def is_idle(self) -> bool:
        """Whether nobody uses it and nothing is to be done."""
        unresolved = any(row.unresolved_generations for row in self.rows)
        return not (unresolved or self.lost or self.needs or (self.lease is not None and not self.lease.has_ended))


class Sections:
    """All that the page shows.

    Args:
        subject: The database and the cluster.
        recent: What the process does; None for a console without a process to observe.
        topics: The topics that the doctor checks.
    """

    def __init__(self, subject: Subject, recent: Recent | None, topics: Iterable[str] = ()) -> None:
        self.subject = subject
        self.recent = recent
        self.rates = DatabaseRates()
        self._topics = tuple(topics)
        self.ids = Watched("the ids", self._read_ids, limit=LIMIT, every=EVERY)
        self.seen = Watched("the coordinators", self._read_seen, limit=LIMIT + 2, every=EVERY)
        self.stuck = Watched("the stuck partitions", self._read_stuck, limit=LIMIT + 2, every=EVERY)
        self.left = Watched("journals and dead letters", self._read_left, limit=LIMIT, every=EVERY)
        self.topics = Watched("the dead-letter topics", self._read_topics, limit=LIMIT + 2, every=_TOPICS_EVERY)
        self.doctor = Watched("the doctor's findings", self._read_doctor, limit=_DOCTOR_LIMIT, every=_DOCTOR_EVERY)

    # --- reading, in threads ----------------------------------------------------------------------------------------------

    def _read_ids(self) -> FoundIds:
        found = read_ids(self.subject.store)
        numbers = {row.transactional_id: (row.fence, row.transaction_number) for row in found.rows}
        self.rates.observe(numbers, time.time())
        return found

    def _read_seen(self) -> FoundIds:
        self._check_kafka()
        known = self.ids.known
        ids = known.value
        if ids is None:  # if the database does not answer, ask at least whether Kafka does
            ids = FoundIds("", [], {}) if known.problem is not None else read_ids(self.subject.store)
        found = replace(ids, seen={}, gone=[])
        with self.subject.coordinator() as coordinator:
            if not found.rows:
                coordinator.cluster_id()
            found.ask(coordinator, resolved=False)
        return found

    def _read_stuck(self) -> Look:
        self._check_kafka()
        with self.subject.admin() as admin, ExitStack() as opened:

            @cache
            def decisions() -> Decisions:
                return opened.enter_context(self.subject.decisions())

            return look(admin, decisions if self.subject.has_database else None, longer_than=LONGER)

    def _check_kafka(self) -> None:
        if not self.subject.has_kafka:
            raise ConfigurationError("Kafka's address is not given.")

    def _read_left(self) -> Left:
        store = self.subject.sql_store
        if store is None:
            return Left([], [])
        try:
            counts = letters_by_relay(store)
            return Left(read_journals(store), [self._letters(name, count) for name, count in counts.items()])
        except StateTableMissingError:  # the user's own migrations, for writers without journals and relays
            return Left([], [])

    def _letters(self, relay: str, count: int) -> Letters:
        assert self.subject.sql_store is not None
        oldest = DeadLetters(self.subject.sql_store, relay).oldest(_MOST_LETTERS)
        return Letters(relay, count, oldest, drained_prefix(relay) is not None or relay in self.subject.relays)

    def _read_topics(self) -> list[ProcessorLetters]:
        found: dict[tuple[str, str], list[ProcessorLetter]] = {}
        for name, topic in self.subject.dead_letter_topics.items():
            for letter in topic.letters():
                if not letter.is_replayed:
                    found.setdefault((name, letter.group), []).append(letter)
        return [ProcessorLetters(*place, len(letters), letters[:_MOST_LETTERS]) for place, letters in sorted(found.items())]

    def _read_doctor(self) -> Diagnosis:
        store = self.subject.store if self.subject.has_database else None
        return examine(self.subject.settings, store=store, topics=self._topics, timeout=LIMIT)

    # --- what is made of it -----------------------------------------------------------------------------------------------

    @property
    def kafka_answers(self) -> bool | None:
        """Whether Kafka answers; None if that is not known yet."""
        known = self.seen.known
        return known.problem is None if known.at is not None or known.problem is not None else None

    def needs(self) -> list[Attention]:
        """What of the ids needs somebody, as far as it is known."""
        ids = self.ids.known.value
        if ids is None:
            return []
        seen = self.seen.known.value
        gone = () if seen is None else seen.gone
        return needed(ids.rows, ids.leases, self._seen(), now_ms(), longer_than=LONGER, gone=gone)

    def lost(self) -> list[tuple[str, LostTransaction]]:
        """The lost and unverified transactions, each with the id of its row."""
        ids = self.ids.known.value
        return [] if ids is None else [(row.transactional_id, entry) for row in ids.rows for entry in row.lost]

    def id_lines(self) -> list[IdLine]:
        """The ids with what is known of them, and the ids that are leased but have no row yet."""
        ids = self.ids.known.value
        if ids is None:
            return []
        seen, needs = self._seen(), self.needs()
        lines = []
        by_id: Mapping[str, list[StateRow]] = {**{name: [] for name in ids.leases}, **ids.by_id}
        for name in [*ids.by_id, *(name for name in ids.leases if name not in ids.by_id)]:
            rows = by_id[name]
            found = [_open_words(one) for row in rows for one in seen.get(row.transactional_id, {}).values()]
            found += [f"on Kafka cluster {row.cluster_id}" for row in rows if self._is_elsewhere(row)]
            of_id = [each for each in needs if each.transactional_id == name]
            lost = sum(len(row.lost) for row in rows)
            lines.append(IdLine(name, rows, ids.leases.get(name), [text for text in found if text], lost, of_id))
        return lines

    def _seen(self) -> dict[str, dict[int, TransactionDescription | None]]:
        """What the coordinators report, of the rows that have not been claimed again since."""
        ids, seen = self.ids.known.value, self.seen.known.value
        if ids is None or seen is None:
            return {}
        then = {row.transactional_id: row.generation for row in seen.rows}
        now = {row.transactional_id: row.generation for row in ids.rows}
        return {name: found for name, found in seen.seen.items() if then.get(name) == now.get(name)}

    def _is_elsewhere(self, row: StateRow) -> bool:
        seen = self.seen.known.value
        return seen is not None and seen.cluster_id is not None and row.cluster_id not in ("", seen.cluster_id)

    def series(self) -> dict[str, list[Any]]:
        """The points of the charts."""
        return self.rates.series() if self.recent is None else self.recent.series()


def _open_words(found: TransactionDescription | None) -> str:
    if found is None:
        return ""
    if found.status is TransactionStatus.ONGOING:
        return f"open for {max(0, now_ms() - found.start_time_ms) // 1000} s"
    return "being ended" if found.status.is_ending else ""
