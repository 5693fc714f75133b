"""`dualwrite relay`: publish an outbox's rows, each once; show its state; create its table; and its dead letters."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final

import typer

from dualwrite.cli.options import AsJson, Database, JsonGroup, grouped, refuse, say
from dualwrite.cli.output import print_json, show_records, versioned
from dualwrite.cli.relay_dead import dead
from dualwrite.cli.relay_options import Outbox, Table
from dualwrite.outbox.drain import BatchOptions
from dualwrite.outbox.layout import GENERIC
from dualwrite.relay import Relay, RelayOptions, create_table, table_sql
from dualwrite.texts import counted

_DEFAULTS: Final = RelayOptions()
_REPORT: Final = 10.0
"""Seconds between two lines of progress."""

app = typer.Typer(no_args_is_help=True, cls=JsonGroup)
app.add_typer(dead, name="dead", help="List, show, replay and drop rows that could not be sent.")


@app.command()
@grouped
def run(
    *,
    outbox: Outbox,
    once: Annotated[bool, typer.Option("--once", help="Publish one batch, and end.")] = False,
    until_empty: Annotated[bool, typer.Option("--until-empty", help="End when there is no row to publish.")] = False,
    batch: Annotated[int, typer.Option("--batch", min=1, help="The maximum number of rows of a transaction.")] = (
        _DEFAULTS.batch.rows
    ),
    on_poison: Annotated[
        str, typer.Option("--on-poison", help="What to do with a row that can't be sent: dead_letter or stop.")
    ] = _DEFAULTS.on_poison,
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="CHANNEL", help="A channel on which PostgreSQL notifies of new rows.")
    ] = None,
    longest_poll: Annotated[
        float, typer.Option("--longest-poll", metavar="SECONDS", help="The maximum time between two looks at the outbox.")
    ] = _DEFAULTS.longest_poll,
    lease: Annotated[
        float, typer.Option("--lease", metavar="SECONDS", help="After which another relay takes over from a dead one.")
    ] = _DEFAULTS.lease,
    shards: Annotated[int, typer.Option("--shards", min=1, help="The number of parts that relays share.")] = _DEFAULTS.shards,
    shard_by: Annotated[
        str | None, typer.Option("--shard-by", metavar="SQL", help="An integer that says to which shard a row belongs.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Publish the rows of an outbox, each once, and delete them in the same dual write, until SIGTERM or Ctrl-C."""
    if once and until_empty:
        refuse("Use either --once or --until-empty.")
    options: dict[str, Any] = {
        "batch": BatchOptions(rows=batch),
        "on_poison": on_poison,
        "listen": listen,
        "longest_poll": longest_poll,
        "lease": lease,
        "shards": shards,
        "shard_by": shard_by,
    }
    began = time.monotonic()
    with outbox.relay(**options) as relay:
        if once:
            relay.run_once()
        else:
            with _progress(relay, quiet=as_json):
                try:
                    relay.run(until_empty=until_empty)
                except KeyboardInterrupt:
                    say("interrupted", err=True)
        seconds = time.monotonic() - began
    if as_json:
        print_json(versioned("relay run", {"published": relay.published, "dead": relay.dead, "seconds": round(seconds, 3)}))
    else:
        say(f"Published {counted(relay.published, 'row')}{_dead_text(relay.dead)}.")


def _dead_text(dead_rows: int) -> str:
    return f", moved {counted(dead_rows, 'row')} to the dead letters" if dead_rows else ""


@contextmanager
def _progress(relay: Relay, *, quiet: bool) -> Iterator[None]:
    """Print a line every few seconds in which something was published, from a thread."""
    over = threading.Event()

    def report() -> None:
        before, at = 0, time.monotonic()
        while not over.wait(_REPORT):
            now, published = time.monotonic(), relay.published
            if published != before:
                say(f"{relay.name}: {published} published, {(published - before) / (now - at):.0f}/s{_dead_text(relay.dead)}")
            before, at = published, now

    thread = threading.Thread(target=report, daemon=True)
    if not quiet:
        thread.start()
    try:
        yield
    finally:
        over.set()


@app.command()
@grouped
def status(*, outbox: Outbox, as_json: AsJson = False) -> None:
    """Show how many rows are waiting, how old the oldest is, the dead letters, and which relays work on the outbox."""
    with outbox.relay() as relay:
        found = relay.status()
    workers = [
        {"transactional_id": each.transactional_id, "owner": each.owner, "ends_in": round(each.ends_in, 1)}
        for each in found.workers
    ]
    record = {
        "name": found.name,
        "table": found.table,
        "waiting": found.waiting,
        "oldest_seconds": None if found.oldest is None else round(found.oldest, 3),
        "later": found.later,
        "dead": found.dead,
    }
    if as_json:
        print_json(versioned("relay status", {**record, "workers": workers}))
        return
    headings = {"relay": "name", "table": "table", "waiting": "waiting", "oldest (s)": "oldest_seconds"}
    show_records({**headings, "later": "later", "dead letters": "dead"}, [record])
    if workers:
        show_records({"transactional id": "transactional_id", "owner": "owner", "lease ends in (s)": "ends_in"}, workers)
    else:
        say("No relay works on it.")


@app.command("create-table")
@grouped
def create(
    *,
    database: Database,
    table: Table = None,
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="CHANNEL", help="Add a trigger that notifies a relay (PostgreSQL).")
    ] = None,
    sql: Annotated[bool, typer.Option("--sql", help="Print the SQL, and change nothing.")] = False,
) -> None:
    """Create an outbox table in the generic layout."""
    settings = database.settings()
    if settings.database_url is None:
        refuse("No database is given: use --url, or the environment variable DUALWRITE_DATABASE_URL.")
    name = table or GENERIC.table
    if sql:
        for statement in table_sql(settings.database_url, name, channel=listen):
            typer.echo(f"{statement};")
        return
    create_table(settings.database_url, name, channel=listen)
    say(f"Created the table {name}.")
