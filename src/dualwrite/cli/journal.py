"""`dualwrite journal`: what was written while Kafka was down: list it, publish it now, export it.

Exit codes: 0 done, 1 an error, 2 usage error.
"""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer

from dualwrite.cli.journal_output import JOURNALS, journal_record
from dualwrite.cli.options import AsJson, Database, JsonGroup, Target, grouped, refuse, say, store_for
from dualwrite.cli.output import print_json, show_records, versioned
from dualwrite.cli.relay_dead import All, Numbers, chosen_letters
from dualwrite.outbox.dead_letters import DeadLetters
from dualwrite.outbox.drain import sql_store
from dualwrite.outbox.journal_drain import drainer_id
from dualwrite.outbox.journal_state import read_journals
from dualwrite.relay.journal_by_hand import drain_journal, replay_letters
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.journal import JournalStore, NumberedEntry
from dualwrite.texts import counted

_PAGE: Final = 1000

OfPrefix = Annotated[str, typer.Option("--prefix", help="The prefix of the pools.")]
Only = Annotated[str | None, typer.Option("--prefix", help="Only this prefix.", show_default="all")]

app = typer.Typer(no_args_is_help=True, cls=JsonGroup)


@app.command("list")
@grouped
def list_(*, database: Database, prefix: Only = None, as_json: AsJson = False) -> None:
    """Show the journals: whether the gate is open, since when, who has opened it, and how much is still to be published."""
    with store_for(database.settings()) as store:
        _journal_of(store)
        found = [journal_record(each) for each in read_journals(store, prefix)]
    if as_json:
        print_json(versioned("journal list", {"journals": found}))
    elif found:
        show_records(JOURNALS, found)
    else:
        say("No pool has a journal in this database.")


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
        while page := journal.entries(prefix, after=after, most=_PAGE):
            for entry in page:
                typer.echo(json.dumps(entry_record(entry)))
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


def entry_record(entry: NumberedEntry) -> dict[str, Any]:
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
