"""What commands show of journals: their state as a record, what an open one waits for, and the command to run next. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC
from typing import Any, Final

from dualwrite.cli.options import Given
from dualwrite.cli.output import Columns
from dualwrite.outbox.journal_drain import drainer_id
from dualwrite.outbox.journal_state import SOON, JournalState, Waits
from dualwrite.stores.journal import JournalLimits


def journal_record(state: JournalState) -> dict[str, Any]:
    """A journal as JSON values."""
    gate, limits = state.gate, state.gate.limits
    return {
        "prefix": state.prefix,
        "gate": "open" if gate.is_open else "closed",
        "since": gate.changed_at.astimezone(UTC).isoformat(timespec="seconds"),
        "by": gate.changed_by,
        "messages": gate.entries,
        "bytes": gate.size,
        "age_ms": round(state.age * 1000),
        "limits": None if limits is None else _limits_record(limits),
        "published_by": state.published_by,
        "pools": list(state.pools),
        "batch": state.batch,
        "dead_letters": state.dead_letters,
    }


def _limits_record(limits: JournalLimits) -> dict[str, int]:
    return {"messages": limits.entries, "bytes": limits.size, "age_ms": round(limits.age * 1000)}


JOURNALS: Final[Columns] = {
    "prefix": "prefix",
    "gate": "gate",
    "since": "since",
    "opened or closed by": "by",
    "messages": "messages",
    "bytes": "bytes",
    "published by": "published_by",
    "batch": "batch",
    "dead letters": "dead_letters",
}
"""The columns of `dualwrite journal list`."""


def waiting_record(state: JournalState, given: Given, *, kafka_answers: bool | None) -> dict[str, Any]:
    """The same with what it waits for, and the command to run next; each is None if there is nothing."""
    waits = state.waits_for(kafka_answers=kafka_answers)
    command = next_command(state, given, kafka_answers=kafka_answers)
    return {**journal_record(state), "waits_for": None if waits is None else waits.name.lower(), "next_command": command}


def next_command(state: JournalState, given: Given, *, kafka_answers: bool | None) -> str | None:
    """The command that helps the journal on; None if nothing is to be done."""
    waits = state.waits_for(kafka_answers=kafka_answers)
    if waits is Waits.PUBLISHER or state.is_left_over or (waits is Waits.POOL and state.age > SOON):
        return given.command("journal", "drain", "--prefix", state.prefix)
    if option := _RECOVERS.get(waits):
        return given.command("recover", "--id", drainer_id(state.prefix), option)
    return None


_RECOVERS: Final[Mapping[Waits | None, str]] = {Waits.LOST_BATCH: "--republish", Waits.UNVERIFIED_BATCH: "--acknowledge"}


def waiting_lines(state: JournalState, given: Given, *, kafka_answers: bool | None) -> list[str]:
    """What an open journal waits for, and for whom, in words; and about a closed one, that entries are left in it."""
    text = state.in_words(kafka_answers=kafka_answers)
    command = next_command(state, given, kafka_answers=kafka_answers)
    return [each for each in (text, None if command is None else f"Next: {command}") if each is not None]
