"""`dualwrite journal`: what was written while Kafka was down: list it, publish it now, export it.

Exit codes: 0 done, 1 an error, 2 usage error.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer

from dualwrite.api import connect
from dualwrite.cli.journal_output import JOURNALS, journal_record
from dualwrite.cli.options import AsJson, Database, JsonGroup, Target, counted, grouped, refuse, say, store_for
from dualwrite.cli.output import print_json, show_records, versioned
from dualwrite.cli.relay_dead import All, Numbers, chosen_letters
from dualwrite.errors import DualWriteError
from dualwrite.outbox.dead_letters import DeadLetters
from dualwrite.outbox.drain import replay as publish_letters
from dualwrite.outbox.drain import sql_store
from dualwrite.outbox.journal_drain import DrainLease, JournalDrain, JournalSource, drainer_id
from dualwrite.outbox.journal_state import read_journals
from dualwrite.recovery.recoverer import describe_owner
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.journal import JournalStore, NumberedEntry

_PAGE: Final = 1000
_LEASE: Final = 60.0

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
    settings = target.settings().with_changes(transactional_id=drainer_id(prefix), lanes=1)
    with store_for(settings) as store:
        journal = _journal_of(store)
        if not journal.gates(prefix, counts=False):
            refuse(f"There is no journal of the prefix {prefix!r}.")
        before = journal.gates(prefix, counts=True)[0].entries
        assert store.leases is not None  # every SQL database keeps them
        owner = _owner()
        with _held(DrainLease(store.leases, prefix, owner), prefix) as lease, connect(store, settings=settings) as writer:
            work = JournalDrain(writer, prefix, owner)
            while work.step() or journal.gates(prefix, counts=True)[0].entries:  # a closed gate may have some, too
                _check_lease(lease, prefix)
    say(f"The journal of {prefix} is empty, and its gate is closed: it had {counted(before or 0, 'message')}.")


@contextmanager
def _held(lease: DrainLease, prefix: str) -> Iterator[DrainLease]:
    """Take the lease, and release it at the end of the block."""
    _check_lease(lease, prefix)
    try:
        yield lease
    finally:
        lease.release()


def _check_lease(lease: DrainLease, prefix: str) -> None:
    if lease.is_ours():
        return
    other = lease.held_by()
    who, ends = ("another process", "") if other is None else (other.owner, f", within {other.seconds_left or 0:.0f} s")
    raise DualWriteError(
        f"The journal of {prefix!r} is being published by {who}.",
        transactional_id=drainer_id(prefix),
        next_step="nothing is to be done while that process runs; if it has died, run this again when its lease has "
        f"ended{ends}",
    )


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
    settings = target.settings()
    relay, owner = drainer_id(prefix), _owner()
    with store_for(settings) as opened:
        _journal_of(opened)
        store = sql_store(opened)
        of_journal = DeadLetters(store, relay)
        chosen = chosen_letters(of_journal, letters, every=every)
        (name,) = store.leases.lease(relay, owner, 1, seconds=_LEASE)
        try:
            with connect(store, settings=settings.with_changes(transactional_id=name, lanes=1)) as writer:
                count = publish_letters(writer, of_journal, chosen, JournalSource.message)
        finally:
            store.leases.release([name], owner)
    say(f"Published {counted(count, 'dead letter')}.")


def _owner() -> str:
    return f"{describe_owner('journal')} {uuid.uuid4().hex[:8]}"


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
