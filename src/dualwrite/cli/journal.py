"""`dualwrite journal`: what was written while Kafka was down: list it, publish it now, export it.

Exit codes: 0 done, 1 an error, 2 usage error.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer

from dualwrite.cli.options import AsJson, Database, Given, JsonGroup, Target, grouped, refuse, store_for
from dualwrite.cli.output import print_json, say, show_facts
from dualwrite.cli.relay import All, Numbers, chosen_letters
from dualwrite.diagnosis.facts import Record
from dualwrite.diagnosis.journals import JOURNAL, next_words
from dualwrite.relay.dead_letters import DeadLetters
from dualwrite.relay.drain import sql_store
from dualwrite.relay.journal_keeper import drain_journal, replay_letters
from dualwrite.relay.journal_state import JournalState, read_journals
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.journal import JournalStore, NumberedEntry
from dualwrite.texts import counted
from dualwrite.transactional_id import drainer_id

_PAGE_ENTRIES: Final = 1000

OfPrefix = Annotated[str, typer.Option("--prefix", help="The prefix of the pools.")]
Only = Annotated[str | None, typer.Option("--prefix", help="Only this prefix.", show_default="all")]

app = typer.Typer(no_args_is_help=True, cls=JsonGroup)


@app.command("list")
@grouped
def list_(*, database: Database, prefix: Only = None, as_json: AsJson = False) -> None:
    """Show the journals: whether the gate is open, since when, who has opened it, and how much is still to be published."""
    with store_for(database.settings()) as store:
        _journal_of(store)
        states = read_journals(store, prefix)
    if as_json:
        print_json("journal list", {"journals": JOURNAL.records(states)})
        return
    show_facts(JOURNAL, states, empty="No pool has a journal in this database.")
    for each in states:
        if each.gate.failure is not None:
            say(f"{each.prefix} can't be published: {each.gate.failure}")


@app.command()
@grouped
def drain(*, target: Target, prefix: OfPrefix) -> None:
    """Publish a journal now, and close its gate. Needed only if no process of the prefix is running; they do it themselves."""
    with store_for(target.settings()) as store:
        if not _journal_of(store).gates(prefix, counts=False):
            refuse(f"There is no journal of the prefix {prefix!r}.")
        before = drain_journal(store, target.settings(), prefix)
    say(f"The journal of {prefix} is empty, and its gate is closed: it had {counted(before, 'message')}.")


@app.command()
@grouped
def export(*, database: Database, prefix: OfPrefix) -> None:
    """Print the messages of a journal as lines of JSON, in the order in which they will be published. Changes nothing."""
    with store_for(database.settings()) as store:
        journal = _journal_of(store)
        after = 0
        while page := journal.entries(prefix, after=after, most=_PAGE_ENTRIES):
            for entry in page:
                typer.echo(json.dumps(_entry_record(entry)))
            after = page[-1].number


@app.command()
@grouped
def replay(*, target: Target, prefix: OfPrefix, letters: Numbers = None, every: All = False) -> None:
    """Publish messages that Kafka has refused before, each once, and remove them from the dead letters in the same dual write.

    `dualwrite relay dead list --name PREFIX.journal` lists them, `drop` deletes them.
    """
    with store_for(target.settings()) as store:
        _journal_of(store)
        chosen = chosen_letters(DeadLetters(sql_store(store), drainer_id(prefix)), letters, every=every)
        count = replay_letters(store, target.settings(), prefix, chosen)
    say(f"Published {counted(count, 'dead letter')}.")


def _journal_of(store: TxnStateStore) -> JournalStore:
    if store.journal is None:
        refuse(f"{store.description} keeps no journals: only SQL databases do.")
    return store.journal


def _entry_record(entry: NumberedEntry) -> dict[str, Any]:
    """A message as JSON values; bytes that are not UTF-8 are in base64."""
    message = entry.entry
    return {
        "id": entry.number,
        "topic": message.topic,
        "partition": message.partition,
        "sent_at": datetime.fromtimestamp(message.sent_at_ms / 1000, UTC).isoformat(timespec="milliseconds"),
        **_content("key", message.key),
        **_content("value", message.value),
        "headers": message.headers,
    }


def _content(name: str, content: bytes | None) -> dict[str, str | None]:
    if content is None:
        return {name: None}
    try:
        return {name: content.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(content).decode()}


# --- journals in `dualwrite status` and `stuck` ----------------------------------------------------------------------------


def next_command(state: JournalState, given: Given, *, kafka_answers: bool | None) -> str | None:
    """The command that helps the journal on; None if nothing is to be done."""
    words = next_words(state, kafka_answers=kafka_answers)
    return given.command(*words) if words else None


def waiting_record(state: JournalState, given: Given, *, kafka_answers: bool | None) -> Record:
    """The journal with what it waits for, and the command to run next; each is None if there is nothing."""
    waits = state.waits_for(kafka_answers=kafka_answers)
    command = next_command(state, given, kafka_answers=kafka_answers)
    return {**JOURNAL.record(state), "waits_for": None if waits is None else waits.name.lower(), "next_command": command}


def say_what_waits(journals: Iterable[JournalState], given: Given, *, kafka_answers: bool | None) -> None:
    """Print what each open journal waits for, and for whom, or what is in it; of a closed one, that entries are left in it."""
    for state in journals:
        say(state.in_words(kafka_answers=kafka_answers) or f"The journal of {state.prefix}: {state.backlog}")
        if (command := next_command(state, given, kafka_answers=kafka_answers)) is not None:
            say(f"Next: {command}")
