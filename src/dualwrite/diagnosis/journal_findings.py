"""The findings about journals: whether their messages are on the way, and how much they still take. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from dualwrite.diagnosis.findings import Finding, Severity, duration
from dualwrite.outbox.journal_drain import drainer_id
from dualwrite.outbox.journal_state import SOON, JournalState, Waits

_NEAR: Final = 0.8
"""The fraction of a limit from which on it is reported."""


def judge_missing(what: str, prefixes: Sequence[str]) -> Finding:
    """The finding about tables of journals that are missing, or too old.

    Args:
        what: Which, as the error says.
        prefixes: The prefixes of pools that have a gate, as far as they are known.
    """
    if prefixes:
        text = f"{what} Pools with a journal use it: {', '.join(prefixes)}."
        return Finding(Severity.BROKEN, "journal", text, "dualwrite db upgrade")
    text = 'The tables of journals are missing, or too old: a pool with when_kafka_is_down="journal" can\'t be opened.'
    return Finding(Severity.NOTE, "journal", text, "dualwrite db upgrade, if you want one")


def judge_journal(state: JournalState, *, kafka_answers: bool | None) -> list[Finding]:
    """The findings about a journal.

    Args:
        state: Its state.
        kafka_answers: Whether Kafka answers; None if it was not asked.
    """
    found = []
    if state.is_left_over:
        what = f"{_messages(state)} are left in it although its gate is closed: nobody publishes them, and later ones are "
        what += "published before them. Somebody has changed the table, or it comes from a backup."
        found.append(_finding(state, Severity.BROKEN, what, _drain(state)))
    waits = state.waits_for(kafka_answers=kafka_answers)
    if waits is not None:
        found += [_open(state, waits), *_limits(state)]
    if state.dead_letters:
        name = drainer_id(state.prefix)
        number = f"{state.dead_letters} of its messages were" if state.dead_letters > 1 else "One of its messages was"
        what = f"{number} refused by Kafka, and moved to the dead letters of the relay {name}."
        step = f"see dualwrite relay dead list --name {name}; then dualwrite journal replay --prefix {state.prefix}"
        found.append(_finding(state, Severity.WEAK, what, step))
    return found


def _open(state: JournalState, waits: Waits) -> Finding:
    what = f"It has been open for {duration(round(state.age) * 1000)}, with {_messages(state)}. "
    severity, text, change = _WAITING[waits](state)
    return _finding(state, severity, what + text, change)


def _for_kafka(state: JournalState) -> tuple[Severity, str, str | None]:
    del state
    return Severity.NOTE, "They are published when Kafka answers.", None


def _for_nobody(state: JournalState) -> tuple[Severity, str, str | None]:
    return Severity.WEAK, "Kafka answers, but nobody publishes them: no pool with the prefix is running.", _drain(state)


def _for_a_pool(state: JournalState) -> tuple[Severity, str, str | None]:
    pools = ", ".join(state.pools)
    if state.age <= SOON:
        return Severity.NOTE, f"Kafka answers, and one of the prefix's pools should publish them at once ({pools}).", None
    text = f"Kafka answers, and nobody publishes them, though pools with the prefix are running ({pools}). Kafka may have "
    return Severity.WEAK, f"{text}come back right now; if this stays so, see their logs.", _drain(state)


def _for_the_rest(state: JournalState) -> tuple[Severity, str, str | None]:
    return Severity.NOTE, f"They are being published by {state.published_by}.", None


def _for_a_lost_batch(state: JournalState) -> tuple[Severity, str, str | None]:
    text = "A batch of them is lost: Kafka has aborted it. Nothing else is published before it."
    return Severity.WEAK, text, f"dualwrite recover --id {drainer_id(state.prefix)} --republish"


def _for_an_unverified_batch(state: JournalState) -> tuple[Severity, str, str | None]:
    text = "Whether a batch of them was published is not known. Nothing else is published until somebody has looked."
    name = drainer_id(state.prefix)
    return Severity.WEAK, text, f"look for its messages, then: dualwrite recover --id {name} --acknowledge"


def _for_something(state: JournalState) -> tuple[Severity, str, str | None]:
    del state
    return Severity.NOTE, "Kafka was not asked whether it answers.", None


_WAITING: Final[Mapping[Waits, Callable[[JournalState], tuple[Severity, str, str | None]]]] = {
    Waits.KAFKA: _for_kafka,
    Waits.PUBLISHER: _for_nobody,
    Waits.POOL: _for_a_pool,
    Waits.PUBLISHING: _for_the_rest,
    Waits.LOST_BATCH: _for_a_lost_batch,
    Waits.UNVERIFIED_BATCH: _for_an_unverified_batch,
    Waits.UNKNOWN: _for_something,
}


def _limits(state: JournalState) -> list[Finding]:
    if state.used is None or state.used[1] < _NEAR:
        return []
    name, fraction = state.used
    limit = getattr(state.gate.limits, name)
    text = {"entries": f"{limit} messages", "size": f"{limit} bytes", "age": f"{limit:g} s"}[name]
    change = "bring Kafka back, or raise the limits in PoolOptions(journal=…)"
    if fraction >= 1:
        what = f"It is full (its limit is {text}): units fail until there is less in it."
        return [_finding(state, Severity.BROKEN, what, change)]
    what = f"It has reached {fraction:.0%} of a limit ({text}), from which on units fail."
    return [_finding(state, Severity.WEAK, what, change)]


def _messages(state: JournalState) -> str:
    count = state.gate.entries or 0
    return "1 message" if count == 1 else f"{count} messages"


def _drain(state: JournalState) -> str:
    return f"dualwrite journal drain --prefix {state.prefix}"


def _finding(state: JournalState, severity: Severity, what: str, change: str | None) -> Finding:
    return Finding(severity, f"journal {state.prefix}", what, change)
