"""The sentence at the top of the page: all is well, or what waits and for whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dualwrite.console.sections import Left, Sections
from dualwrite.diagnosis import Severity
from dualwrite.diagnosis.needs import NEEDS, by_need
from dualwrite.texts import counted

Level = Literal["well", "waits", "unknown"]


@dataclass(frozen=True)
class Line:
    """One thing that waits, or is not known, with the part of the page, or the id, that shows more."""

    text: str
    anchor: str | None = None
    ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The sentence, and the lines below it."""

    level: Level
    sentence: str
    lines: tuple[Line, ...] = ()


def verdict(sections: Sections) -> Verdict:
    """What is known now, in one sentence; does not wait for anything."""
    waiting = [*_of_ids(sections), *_stuck(sections), *_left(sections), *_broken(sections)]
    missing = _missing(sections)
    if waiting:
        more = " Not everything could be read." if missing else ""
        return Verdict("waits", f"{counted(len(waiting), 'thing')} to look at.{more}", (*waiting, *missing))
    if missing:
        return Verdict("unknown", "Whether all is well could not be read completely.", tuple(missing))
    if sections.ids.known.at is None and sections.stuck.known.at is None:
        return Verdict("unknown", "The database and Kafka are being read.")
    ids = sections.ids.known.value
    used = f"{counted(len(ids.used), 'id')} in use, nothing to recover" if ids is not None else "no consumer waits"
    return Verdict("well", f"All is well: {used}.")


def _of_ids(sections: Sections) -> list[Line]:
    found = by_need(sections.needs())
    return [
        Line(f"{NEEDS[need](len(ones))}.", ids=tuple(dict.fromkeys(each.transactional_id for each in ones)))
        for need, ones in found.items()
    ]


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
