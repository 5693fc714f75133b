"""The sentence at the top of each page: all is well, or what waits and for whom, or what could not be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dualwrite.console.sections import Sections
from dualwrite.console.shared_read import SharedRead
from dualwrite.diagnosis import Severity
from dualwrite.diagnosis.needs import to_do
from dualwrite.texts import counted

Level = Literal["well", "waits", "unknown"]


@dataclass(frozen=True)
class Line:
    """One thing that waits, or is not known, with the tab, and the ids, that show more; and other tabs that it concerns."""

    text: str
    tab: str
    ids: tuple[str, ...] = ()
    is_known: bool = True
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Summary:
    """The sentence, and the lines below it."""

    level: Level
    sentence: str
    lines: tuple[Line, ...] = ()

    @property
    def marks(self) -> dict[str, str]:
        """What is to be seen on each tab, in words."""
        unread = {tab: "not read" for line in self.lines if not line.is_known for tab in (line.tab, *line.others)}
        return unread | {line.tab: "to look at" for line in self.lines if line.is_known}


def verdict(sections: Sections) -> Summary:
    """What is known now, in one sentence; does not wait for anything."""
    of_ids = [Line(f"{each.text}.", "ids", each.ids) for each in to_do(sections.needs())]
    waiting = [*of_ids, *_stuck(sections), *_left(sections), *_broken(sections)]
    missing = _missing(sections)
    silent = sorted({side for read, _, _ in _asked(sections) if (side := read.known.silent) is not None})
    lines = (*waiting, *missing)
    if waiting or silent:
        parts = [f"{' and '.join(silent)} {'does' if len(silent) == 1 else 'do'} not answer"] if silent else []
        parts += [f"{counted(len(waiting), 'thing')} to look at"] if waiting else []
        more = "" if silent or not missing else " Not everything could be read."
        return Summary("waits", f"Not all is well: {', and '.join(parts)}.{more}", lines)
    if missing:
        return Summary("unknown", "Not known whether all is well: not everything could be read.", lines)
    if any(read.known.at is None for read, _, _ in _asked(sections)):
        return Summary("unknown", "Not known yet whether all is well: the first look takes some seconds.")
    ids = sections.ids.known.value
    used = f"{counted(len(ids.used), 'id')} in use, nothing to recover" if ids is not None else "no consumer waits"
    return Summary("well", f"All is well: {used}.")


def _stuck(sections: Sections) -> list[Line]:
    stuck = sections.stuck_partitions()
    if not stuck:
        return []
    groups = {group.group_id for one in stuck for group in one.groups}
    who = f"{counted(len(groups), 'consumer group')} ({', '.join(sorted(groups))})" if groups else "read_committed consumers"
    wait = "waits" if len(groups) == 1 else "wait"
    records = sum(one.end.records_behind or 0 for one in stuck)
    return [Line(f"{who} {wait} in {counted(len(stuck), 'partition')}, behind {counted(records, 'record')}.", "stuck")]


def _left(sections: Sections) -> list[Line]:
    answers, relays = sections.kafka_answers, sections.relays.known.value or []
    journals = [state.in_words(kafka_answers=answers) for state in sections.journals.known.value or []]
    journals += [f"{relay.name}: {note}" for relay in relays for note in (relay.status.notes if relay.status else ())]
    stored, sent = sections.letters.known.value or [], sections.topics.known.value or []
    letters = [f"{counted(each.count, 'dead letter')} of {each.relay}." for each in stored]
    letters += [f"{counted(one.count, 'dead letter')} of {one.group} in {one.topic}." for one in sent if one.problem is None]
    return [*(Line(text, "journals") for text in journals if text), *(Line(text, "letters") for text in letters)]


def _broken(sections: Sections) -> list[Line]:
    diagnosis = sections.doctor.known.value
    if diagnosis is None:
        return []
    sides = {"kafka": sections.stuck.known.problem, "database": sections.ids.known.problem}
    unread = {side for side, problem in sides.items() if problem is not None}  # which is said already
    found = [each for each in diagnosis.findings if each.severity is Severity.BROKEN and each.about not in unread]
    return [Line(each.what, "doctor") for each in found]


def _asked(sections: Sections) -> list[tuple[SharedRead[Any], str, str]]:
    """What must be read to know whether all is well, each with the tab that shows it, and its name."""
    subject = sections.subject
    found: list[tuple[SharedRead[Any], str, str]] = []
    if subject.has_database:
        found.append((sections.ids, "ids", "ids"))
    if subject.sql_store is not None:
        found += [(sections.journals, "journals", "journals"), (sections.letters, "letters", "dead letters")]
        found.append((sections.jobs, "jobs", "jobs"))
    if subject.has_kafka:
        found.append((sections.stuck, "stuck", "partitions"))
    if subject.dead_letter_topics:
        found.append((sections.topics, "letters", "dead-letter topics"))
    if subject.has_database and subject.has_kafka:
        found.append((sections.seen, "ids", "coordinators"))
    return found


def _missing(sections: Sections) -> list[Line]:
    """What could not be read, each reason once."""
    lines: list[Line] = []
    failed = [(tab, name, known) for read, tab, name in _asked(sections) if (known := read.known).problem is not None]
    for reason in dict.fromkeys(known.silent or known.problem for _, _, known in failed):
        of_it = [(tab, name, known.problem) for tab, name, known in failed if reason in (known.silent, known.problem)]
        first, *others = (tab for tab, _, _ in of_it)
        text = f"Not read: {', '.join(name for _, name, _ in of_it)}. {of_it[0][2]}"
        lines.append(Line(text, first, is_known=False, others=tuple(others)))
    unread = [each for each in sections.topics.known.value or [] if each.problem is not None]
    return lines + [Line(f"Not read: {each.topic}. {each.problem}", "letters", is_known=False) for each in unread]
