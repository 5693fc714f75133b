"""What the sections of the page show: each reads its own part, has a limit, and fails by itself."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from dualwrite.console.recent import DatabaseRates, Recent
from dualwrite.console.shared_read import SharedRead
from dualwrite.console.subject import LIMIT_SECONDS, Subject
from dualwrite.diagnosis import Diagnosis, Severity, examine
from dualwrite.diagnosis.ids import FoundIds, read_ids
from dualwrite.diagnosis.needs import LONGER_SECONDS, Attention, Need, to_do
from dualwrite.diagnosis.stuck import DecidedSearch, decided_search
from dualwrite.errors import ConfigurationError, StateTableMissingError
from dualwrite.processor.dead_letters import DeadLetter as ProcessorLetter
from dualwrite.relay.dead_letters import DeadLetter, DeadLetters, letters_by_relay
from dualwrite.relay.journal_state import JournalState, read_journals
from dualwrite.state import TransactionDescription, TransactionStatus
from dualwrite.stores.base import LostTransaction, StateRow
from dualwrite.stores.leases import Lease
from dualwrite.texts import counted, now_ms
from dualwrite.transactional_id import drained_prefix

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
        self.ids = SharedRead("the ids", self._read_ids, limit=LIMIT_SECONDS, every=EVERY_SECONDS)
        self.seen = SharedRead("the coordinators", self._read_seen, limit=LIMIT_SECONDS + 2, every=EVERY_SECONDS)
        self.stuck = SharedRead("the stuck partitions", self._read_stuck, limit=LIMIT_SECONDS + 2, every=EVERY_SECONDS)
        self.left = SharedRead("journals and dead letters", self._read_left, limit=LIMIT_SECONDS, every=EVERY_SECONDS)
        self.topics = SharedRead(
            "the dead-letter topics", self._read_topics, limit=LIMIT_SECONDS + 2, every=_TOPICS_EVERY_SECONDS
        )
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
        oldest = DeadLetters(self.subject.sql_store, relay).oldest(_MAX_SHOWN_LETTERS, with_rows=False)
        return Letters(relay, count, oldest, drained_prefix(relay) is not None or relay in self.subject.relays)

    def _read_topics(self) -> list[ProcessorLetters]:
        found: dict[tuple[str, str], list[ProcessorLetter]] = {}
        for name, topic in self.subject.dead_letter_topics.items():
            for letter in topic.letters():
                if not letter.is_replayed:
                    found.setdefault((name, letter.group), []).append(letter)
        return [
            ProcessorLetters(*place, len(letters), letters[:_MAX_SHOWN_LETTERS]) for place, letters in sorted(found.items())
        ]

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
        """What of the ids needs somebody, as far as it is known."""
        ids = self.ids.known.value
        if ids is None:
            return []
        seen = self.seen.known.value
        known = replace(ids, seen=self._seen(), gone=[] if seen is None else seen.gone)
        return known.needs(longer_than=LONGER_SECONDS)

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


def _open_words(found: TransactionDescription | None) -> str:
    if found is None:
        return ""
    if found.status is TransactionStatus.ONGOING:
        return f"open for {max(0, now_ms() - found.start_time_ms) // 1000} s"
    return "being ended" if found.status.is_ending else ""


# --- the sentence at the top of the page: all is well, or what waits and for whom ---------------------------------------------

Level = Literal["well", "waits", "unknown"]


@dataclass(frozen=True)
class Line:
    """One thing that waits, or is not known, with the part of the page, or the id, that shows more."""

    text: str
    anchor: str | None = None
    ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Summary:
    """The sentence, and the lines below it."""

    level: Level
    sentence: str
    lines: tuple[Line, ...] = ()


def verdict(sections: Sections) -> Summary:
    """What is known now, in one sentence; does not wait for anything."""
    of_ids = [Line(f"{each.text}.", ids=each.ids) for each in to_do(sections.needs())]
    waiting = [*of_ids, *_stuck(sections), *_left(sections), *_broken(sections)]
    missing = _missing(sections)
    if waiting:
        more = " Not everything could be read." if missing else ""
        return Summary("waits", f"{counted(len(waiting), 'thing')} to look at.{more}", (*waiting, *missing))
    if missing:
        return Summary("unknown", "Whether all is well could not be read completely.", tuple(missing))
    if sections.ids.known.at is None and sections.stuck.known.at is None:
        return Summary("unknown", "The database and Kafka are being read.")
    ids = sections.ids.known.value
    used = f"{counted(len(ids.used), 'id')} in use, nothing to recover" if ids is not None else "no consumer waits"
    return Summary("well", f"All is well: {used}.")


def _stuck(sections: Sections) -> list[Line]:
    seen = sections.stuck.known.value
    if seen is None or not seen.found.partitions:
        return []
    stuck = seen.found.partitions
    groups = {group.group_id for one in stuck for group in one.groups}
    who = f"{counted(len(groups), 'consumer group')} ({', '.join(sorted(groups))})" if groups else "read_committed consumers"
    wait = "waits" if len(groups) == 1 else "wait"
    records = sum(one.end.records_behind or 0 for one in stuck)
    return [Line(f"{who} {wait} in {counted(len(stuck), 'partition')}, behind {counted(records, 'record')}.", "stuck")]


def _left(sections: Sections) -> list[Line]:
    left, topics = sections.left.known.value or Left([], []), sections.topics.known.value or []
    answers = sections.kafka_answers
    texts = [text for state in left.journals if (text := state.in_words(kafka_answers=answers)) is not None]
    texts += [f"{counted(each.count, 'dead letter')} of {each.relay}." for each in left.letters]
    texts += [f"{counted(each.count, 'dead letter')} of {each.group} in {each.topic}." for each in topics]
    return [Line(text, "left") for text in texts]


def _broken(sections: Sections) -> list[Line]:
    diagnosis = sections.doctor.known.value
    if diagnosis is None:
        return []
    sides = {"kafka": sections.stuck.known.problem, "database": sections.ids.known.problem}
    unread = {side for side, problem in sides.items() if problem is not None}  # which is said already
    found = [each for each in diagnosis.findings if each.severity is Severity.BROKEN and each.about not in unread]
    return [Line(each.what, "doctor") for each in found]


def _missing(sections: Sections) -> list[Line]:
    """What could not be read, each reason once."""
    subject = sections.subject
    problems = []
    if subject.has_kafka:
        problems.append(("stuck", "partitions", sections.stuck.known.problem))
        problems.append(("left", "dead-letter topics", sections.topics.known.problem))
    if subject.has_database:
        problems += [("ids", "ids", sections.ids.known.problem), ("left", "journals", sections.left.known.problem)]
    if subject.has_database and subject.has_kafka:
        problems.append(("ids", "coordinators", sections.seen.known.problem))
    reasons = dict.fromkeys(problem for _, _, problem in problems if problem is not None)
    lines = []
    for reason in reasons:
        of_it = [(anchor, what) for anchor, what, problem in problems if problem == reason]
        lines.append(Line(f"Not read: {' and '.join(what for _, what in of_it)}. {reason}", of_it[0][0]))
    return lines
