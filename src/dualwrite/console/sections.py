"""What the sections of the page show: each reads its own part, has a limit, and fails by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from dualwrite.console.recent import DatabaseRates, Recent
from dualwrite.console.shared_read import SharedRead, Side
from dualwrite.console.subject import LIMIT_SECONDS, Subject
from dualwrite.diagnosis import Diagnosis, examine
from dualwrite.diagnosis.ids import FoundIds, read_ids
from dualwrite.diagnosis.jobs import JobWatch, WatchedJob
from dualwrite.diagnosis.needs import LONGER_SECONDS, Attention, Need
from dualwrite.diagnosis.positions import ShownPosition, groups_of, shown_of, with_kafka
from dualwrite.diagnosis.stuck import DecidedSearch, Stuck, decided_search
from dualwrite.errors import (
    BrokerUnavailableError,
    ConfigurationError,
    DualWriteError,
    StateTableMissingError,
)
from dualwrite.processor.dead_letter_topic import DeadLetterTopic
from dualwrite.processor.dead_letters import DeadLetter as ProcessorLetter
from dualwrite.relay import Relay
from dualwrite.relay.dead_letters import DeadLetter, DeadLetters, letters_by_relay
from dualwrite.relay.journal_state import JournalState, read_journals
from dualwrite.relay.shards import RelayStatus
from dualwrite.state import TransactionDescription, TransactionStatus
from dualwrite.stores.base import LostTransaction, StateRow
from dualwrite.stores.leases import Lease
from dualwrite.texts import now_ms
from dualwrite.transactional_id import TransactionalId, drained_prefix

T = TypeVar("T")

EVERY_SECONDS: Final = 4.0
_DOCTOR_EVERY_SECONDS: Final = 60.0
_DOCTOR_LIMIT_SECONDS: Final = 25.0
_TOPICS_EVERY_SECONDS: Final = 30.0
_MAX_SHOWN_LETTERS: Final = 20


_TO_DO: Final = {
    Need.RECOVER: "waits for recovery",
    Need.PUBLISH: "lost, to publish again",
    Need.GONE: "lost for good",
    Need.ACKNOWLEDGE: "unverified",
    Need.FORGOTTEN: "forgotten by the database",
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
class ProcessorLetters:
    """What a group's processors have put into a dead-letter topic and was not replayed: how many letters, and the oldest.

    If the topic could not be read, there is only the problem.
    """

    topic: str
    group: str = ""
    count: int = 0
    oldest: tuple[ProcessorLetter, ...] = ()
    problem: str | None = None


@dataclass(frozen=True)
class ShownRelay:
    """A relay with the state of its outbox, or why that could not be read."""

    name: str
    status: RelayStatus | None = None
    problem: str | None = None


@dataclass(frozen=True)
class IdLine:
    """One id as the page shows it: its lanes, its lease, what is open on it, and whether that is of interest to nobody."""

    name: str
    rows: list[StateRow]
    lease: Lease | None
    open: list[str]
    lost: int
    needs: list[Attention]
    is_idle: bool

    @property
    def need_words(self) -> str:
        """What is to be done on it."""
        return ", ".join(dict.fromkeys(_TO_DO[each.need] for each in self.needs))


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
        self._job_watch = JobWatch(subject.store) if subject.has_database else None
        self.ids = _shared("the ids", self._read_ids, "the database")
        self.seen = _shared("the coordinators", self._read_seen, "Kafka")
        self.stuck = _shared("the stuck partitions", self._read_stuck, "Kafka")
        self.journals = _shared("the journals", self._read_journals, "the database")
        self.relays = _shared("the relays", self._read_relays, "the database")
        self.letters = _shared("the dead letters", self._read_letters, "the database")
        self.topics = _shared("the dead-letter topics", self._read_topics, "Kafka", _TOPICS_EVERY_SECONDS)
        self.positions = _shared("the positions", self._read_positions, "the database")
        self.lags = _shared("the ends of partitions", self._read_lags, "Kafka")
        self.jobs = _shared("the jobs", self._read_jobs, "the database")
        self.doctor = SharedRead(
            "the doctor's findings", self._read_doctor, limit=_DOCTOR_LIMIT_SECONDS, every=_DOCTOR_EVERY_SECONDS
        )

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

    def _read_stuck(self) -> DecidedSearch:
        self._check_kafka()
        decisions = self.subject.decisions if self.subject.has_database else None
        with self.subject.admin() as admin:
            return decided_search(admin, decisions, longer_than=LONGER_SECONDS)

    def _check_kafka(self) -> None:
        if not self.subject.has_kafka:
            raise ConfigurationError("Kafka's address is not given.")

    def _read_journals(self) -> list[JournalState]:
        return _if_there(lambda: read_journals(self.subject.store))

    def _read_letters(self) -> list[Letters]:
        store = self.subject.sql_store
        if store is None:
            return []
        return _if_there(lambda: [self._letters(name, count) for name, count in letters_by_relay(store).items()])

    def _read_relays(self) -> list[ShownRelay]:
        return [_shown_relay(each) for each in self.subject.relays.values()]

    def _read_positions(self) -> list[ShownPosition]:
        return _if_there(lambda: shown_of(self.subject.store))

    def _read_lags(self) -> list[ShownPosition]:
        """The positions with the ends of their partitions; nobody asks Kafka if there are none."""
        self._check_kafka()
        known = self.positions.known
        found = self._read_positions() if known.value is None and known.problem is None else known.value
        return with_kafka(found, self.subject.settings, LIMIT_SECONDS) if found else []

    def _read_jobs(self) -> list[WatchedJob]:
        watch = self._job_watch
        return [] if watch is None else _if_there(watch.read)

    def _letters(self, relay: str, count: int) -> Letters:
        assert self.subject.sql_store is not None
        oldest = DeadLetters(self.subject.sql_store, relay).oldest(_MAX_SHOWN_LETTERS, with_rows=False)
        return Letters(relay, count, oldest, drained_prefix(relay) is not None or relay in self.subject.relays)

    def _read_topics(self) -> list[ProcessorLetters]:
        return [each for name, topic in sorted(self.subject.dead_letter_topics.items()) for each in _in_topic(name, topic)]

    def _read_doctor(self) -> Diagnosis:
        store = self.subject.store if self.subject.has_database else None
        return examine(self.subject.settings, store=store, topics=self._topics, timeout=LIMIT_SECONDS)

    # --- what is made of it -----------------------------------------------------------------------------------------------

    @property
    def kafka_answers(self) -> bool | None:
        """Whether Kafka answers; None if that is not known yet."""
        known = self.seen.known
        return known.problem is None if known.at is not None or known.problem is not None else None

    def needs(self) -> list[Attention]:
        """What of the ids needs somebody, as far as it is known; not what is open on the ids of a job's run that is alive."""
        ids = self.ids.known.value
        if ids is None:
            return []
        seen = self.seen.known.value
        known = replace(ids, seen=self._seen(), gone=[] if seen is None else seen.gone)
        working = self._working()
        needs = known.needs(longer_than=LONGER_SECONDS)
        return [each for each in needs if each.need is not Need.RECOVER or each.transactional_id not in working]

    def stuck_partitions(self) -> list[Stuck]:
        """The partitions in which consumers wait, but not those where they wait for a job's run that is alive."""
        found, working = self.stuck.known.value, self._working()
        return [] if found is None else [one for one in found.stuck if _logical(one.holder.transactional_id) not in working]

    def _working(self) -> set[str]:
        """The ids of jobs whose runs are alive: their tasks may take longer than other transactions."""
        return {name for job in self.jobs.known.value or [] if job.is_alive for name in job.ids}

    def beginnings(self) -> dict[str, float]:
        """Since when what is open or lost has been so, in seconds since 1970, by its id at Kafka."""
        ids = self.ids.known.value
        if ids is None:
            return {}
        seen = self._seen()
        found: dict[str, float] = {}
        for row in ids.rows:
            found |= {row.kafka_id(entry.generation): entry.recorded_at.timestamp() for entry in row.lost}
            opened = seen.get(row.transactional_id, {}).items()
            found |= {row.kafka_id(at): one.start_time_ms / 1000 for at, one in opened if one and one.start_time_ms >= 0}
        return found

    def groups(self) -> list[tuple[str, list[ShownPosition]]]:
        """The positions by consumer group, with the ends of their partitions as far as these are known."""
        ends = {(one.group, one.position.key): one for one in self.lags.known.value or []}
        found = []
        for one in self.positions.known.value or []:
            known = ends.get((one.group, one.position.key))
            found.append(one if known is None else replace(one, end=known.end, replaced=known.replaced))
        return groups_of(found)

    def lost(self) -> list[tuple[str, LostTransaction]]:
        """The lost and unverified transactions, each with the id of its row."""
        ids = self.ids.known.value
        return [] if ids is None else [(row.transactional_id, entry) for row in ids.rows for entry in row.lost]

    def id_lines(self) -> list[IdLine]:
        """The ids with what is known of them, and the ids that are leased but have no row yet."""
        ids = self.ids.known.value
        if ids is None:
            return []
        seen, needs, idle, asked = self._seen(), self.needs(), ids.idle, self.seen.known.value
        lines = []
        for name, rows in (ids.by_id | {name: [] for name in ids.leases if name not in ids.by_id}).items():
            found = [_open_words(one) for row in rows for one in seen.get(row.transactional_id, {}).values()]
            found += [f"on Kafka cluster {row.cluster_id}" for row in rows if asked is not None and asked.is_elsewhere(row)]
            of_id = [each for each in needs if each.transactional_id == name]
            lost = sum(len(row.lost) for row in rows)
            texts = [text for text in found if text]
            lines.append(IdLine(name, rows, ids.leases.get(name), texts, lost, of_id, name in idle))
        return lines

    def _seen(self) -> dict[str, dict[int, TransactionDescription | None]]:
        """What the coordinators report, of the rows that have not been claimed again since."""
        ids, seen = self.ids.known.value, self.seen.known.value
        if ids is None or seen is None:
            return {}
        then = {row.transactional_id: row.generation for row in seen.rows}
        now = {row.transactional_id: row.generation for row in ids.rows}
        return {name: found for name, found in seen.seen.items() if then.get(name) == now.get(name)}

    def series(self) -> dict[str, list[Any]]:
        """The points of the charts."""
        return self.rates.series() if self.recent is None else self.recent.series()


def _logical(kafka_id: str | None) -> str | None:
    named = None if kafka_id is None else TransactionalId.of_kafka(kafka_id)
    return None if named is None else named.logical


def _open_words(found: TransactionDescription | None) -> str:
    if found is None:
        return ""
    if found.status is TransactionStatus.ONGOING:
        return f"open for {max(0, now_ms() - found.start_time_ms) // 1000} s"
    return "being ended" if found.status.is_ending else ""


def _shared(name: str, read: Callable[[], T], side: Side, every: float = EVERY_SECONDS) -> SharedRead[T]:
    limit = LIMIT_SECONDS + (2 if side == "Kafka" else 0)  # each query of Kafka has a limit of its own, within this one
    return SharedRead(name, read, limit=limit, every=every, side=side)


def _if_there(read: Callable[[], list[T]]) -> list[T]:
    """What is read from tables that need not be there: with the user's own migrations, only those that are used."""
    try:
        return read()
    except StateTableMissingError:
        return []


def _shown_relay(relay: Relay) -> ShownRelay:
    try:
        return ShownRelay(relay.name, relay.status())
    except DualWriteError as error:
        return ShownRelay(relay.name, problem=f"{error}")


def _in_topic(name: str, topic: DeadLetterTopic) -> list[ProcessorLetters]:
    """What is in a dead-letter topic, by group."""
    found: dict[str, list[ProcessorLetter]] = {}
    try:
        for letter in topic.letters():
            if not letter.is_replayed:
                found.setdefault(letter.group, []).append(letter)
    except BrokerUnavailableError:
        raise
    except DualWriteError as error:
        return [ProcessorLetters(name, problem=f"{error}")]
    return [
        ProcessorLetters(name, group, len(letters), tuple(letters[:_MAX_SHOWN_LETTERS]))
        for group, letters in sorted(found.items())
    ]
