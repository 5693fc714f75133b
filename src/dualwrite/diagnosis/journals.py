"""What a journal waits for, how bad that is, and the command that helps it on; and the facts about it. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC
from typing import Final, NamedTuple

from dualwrite.diagnosis.facts import Fact, Facts
from dualwrite.diagnosis.findings import Finding, Severity, duration
from dualwrite.relay.journal_state import SOON, JournalState, Waits
from dualwrite.texts import counted
from dualwrite.transactional_id import drainer_id

_NEAR_FRACTION: Final = 0.8
"""The fraction of a limit from which on it is reported."""

_LIMITS: Final = Facts(
    Fact("messages", value="entries"),
    Fact("bytes", value="size"),
    Fact("age_ms", value=lambda limits: round(limits.age * 1000)),
)
JOURNAL: Final = Facts(
    Fact("prefix", "prefix"),
    Fact("gate", "gate", lambda state: "open" if state.gate.is_open else "closed"),
    Fact("since", "since", lambda state: state.gate.changed_at.astimezone(UTC).isoformat(timespec="seconds")),
    Fact("by", "opened or closed by", "gate.changed_by"),
    Fact("messages", "messages", "gate.entries"),
    Fact("bytes", "bytes", "gate.size"),
    Fact("age_ms", "oldest", lambda state: round(state.age * 1000), lambda age: f"{age / 1000:.0f} s" if age else ""),
    Fact("later", "for later", "gate.later"),
    Fact("limits", value=_LIMITS.nested("gate.limits")),
    Fact("published_by", "published by"),
    Fact("pools", value=lambda state: list(state.pools)),
    Fact("kept_by", "kept open by", lambda state: list(state.kept_by), ", ".join),
    Fact("batch", "batch"),
    Fact("dead_letters", "dead letters"),
    Fact("failure", value="gate.failure"),
)
"""The facts about a JournalState."""


class Waiting(NamedTuple):
    """What an open journal waits for: how bad that is, in words, and the command that helps it on, if there is one.

    `advice` says what to do, with the command in place of `{}`.
    """

    severity: Severity
    text: str
    command: tuple[str, ...] = ()
    advice: str = "{}"


def waiting(state: JournalState, waits: Waits) -> Waiting:
    """What it means that an open journal waits for this."""
    drain, recover = ("journal", "drain", "--prefix", state.prefix), ("recover", "--id", drainer_id(state.prefix))
    pools = ", ".join(state.pools)
    late = f"Kafka answers, and nobody publishes them, though pools with the prefix are running ({pools}). Kafka may have come "
    soon = f"Kafka answers, and one of the prefix's pools should publish them at once ({pools})."
    lost = "A batch of them is lost: Kafka has aborted it. Nothing else is published before it."
    unverified = "Whether a batch of them was published is not known. Nothing else is published until somebody has looked."
    return {
        Waits.KAFKA: Waiting(Severity.NOTE, "They are published when Kafka answers."),
        Waits.PUBLISHER: Waiting(
            Severity.WEAK, "Kafka answers, but nobody publishes them: no pool with the prefix is running.", drain
        ),
        Waits.POOL: Waiting(Severity.WEAK, f"{late}back right now; if this stays so, see their logs.", drain)
        if state.age > SOON
        else Waiting(Severity.NOTE, soon),
        Waits.PUBLISHING: Waiting(Severity.NOTE, f"They are being published by {state.published_by}."),
        Waits.FAILURE: Waiting(
            Severity.WEAK, f"They can't be published: {state.gate.failure}", drain, "{}, which says whether they can now"
        ),
        Waits.LOST_BATCH: Waiting(Severity.WEAK, lost, (*recover, "--republish")),
        Waits.UNVERIFIED_BATCH: Waiting(
            Severity.WEAK, unverified, (*recover, "--acknowledge"), "look for its messages, then: {}"
        ),
        Waits.UNKNOWN: Waiting(Severity.NOTE, "Kafka was not asked whether it answers."),
    }[waits]


def next_words(state: JournalState, *, kafka_answers: bool | None) -> tuple[str, ...]:
    """The words after `dualwrite` of the command that helps a journal on; none if nothing is to be done."""
    waits = state.waits_for(kafka_answers=kafka_answers)
    if waits is not None:
        return waiting(state, waits).command
    return waiting(state, Waits.PUBLISHER).command if state.is_left_over else ()


# --- findings -------------------------------------------------------------------------------------------------------------


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
    messages = counted(state.gate.entries or 0, "message")
    words = next_words(state, kafka_answers=kafka_answers)
    command = " ".join(("dualwrite", *words)) if words else None
    if state.is_left_over:
        what = f"{messages} are left in it although its gate is closed: nobody publishes them, and later ones are "
        what += "published before them. Somebody has changed the table, it comes from a backup, or their time had not come "
        what += 'when the last pool with acknowledge="journaled" ended.'
        found.append(_finding(state, Severity.BROKEN, what, command))
    waits = state.waits_for(kafka_answers=kafka_answers)
    if waits is not None:
        severity, text, _, advice = waiting(state, waits)
        since = f"It has been open for {duration(round(state.since_change) * 1000)}, with {messages}."
        if state.kept_by:
            since = f"Its pools write into it always, and it has {messages}; the oldest has waited for "
            since += f"{duration(round(state.age) * 1000)}."
        what = f"{since} {text}"
        found += [_finding(state, severity, what, command and advice.format(command)), *_limits(state)]
    if state.dead_letters:
        name = drainer_id(state.prefix)
        number = f"{state.dead_letters} of its messages were" if state.dead_letters > 1 else "One of its messages was"
        what = f"{number} refused by Kafka, and moved to the dead letters of the relay {name}."
        step = f"see dualwrite relay dead list --name {name}; then dualwrite journal replay --prefix {state.prefix}"
        found.append(_finding(state, Severity.WEAK, what, step))
    return found


def _limits(state: JournalState) -> list[Finding]:
    if state.used is None or state.used[1] < _NEAR_FRACTION:
        return []
    name, fraction = state.used
    limit = getattr(state.gate.limits, name)
    text = {"entries": f"{limit} messages", "size": f"{limit} bytes", "age": f"{limit:g} s"}[name]
    change = "see what it waits for, or raise the limits in PoolOptions(journal=…)"
    if fraction >= 1:
        what = f"It is full (its limit is {text}): units fail until there is less in it."
        return [_finding(state, Severity.BROKEN, what, change)]
    what = f"It has reached {fraction:.0%} of a limit ({text}), from which on units fail."
    return [_finding(state, Severity.WEAK, what, change)]


def _finding(state: JournalState, severity: Severity, what: str, change: str | None) -> Finding:
    return Finding(severity, f"journal {state.prefix}", what, change)
