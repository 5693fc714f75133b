"""`dualwrite relay`: publish an outbox's rows, each once; show its state; create its table; and its dead letters."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final

import typer

from dualwrite.cli.options import (
    AsJson,
    Database,
    JsonGroup,
    Target,
    Yes,
    confirm,
    database_url,
    grouped,
    pairs,
    refuse,
    store_for,
)
from dualwrite.cli.output import print_json, print_records, say, show_facts
from dualwrite.diagnosis.facts import Fact, Facts
from dualwrite.relay import Relay, RelayOptions, create_table, table_sql
from dualwrite.relay.dead_letters import DeadLetters, row_text
from dualwrite.relay.drain import BatchOptions, sql_store
from dualwrite.relay.layout import GENERIC, LAYOUTS, OutboxLayout
from dualwrite.texts import counted

_COLUMNS: Final = ("key", "headers", "partition", "timestamp", "not_before", "created", "published", "order_by", "where")
"""Parts of a layout that an empty text removes."""

Name = Annotated[
    str | None, typer.Option("--name", help="The name of the relays that share the outbox.", show_default="relay.TABLE")
]
Table = Annotated[str | None, typer.Option("--table", help="The outbox table; SCHEMA.NAME if needed.", show_default="outbox")]


def _column(option: str, text: str) -> Any:
    return typer.Option(option, metavar="COLUMN", help=text, show_default="as in the layout")


@dataclass(frozen=True, kw_only=True)
class Outbox(Target):
    """The options that say which outbox is meant, and what its columns are in a message."""

    name: Name = None
    layout: Annotated[
        str,
        typer.Option(
            "--layout", help=f"The layout to begin with: {', '.join(LAYOUTS)}; or MODULE:NAME, an OutboxLayout of yours."
        ),
    ] = "generic"
    table: Table = None
    id: Annotated[str | None, _column("--id-column", "Identifies a row.")] = None
    order_by: Annotated[str | None, _column("--order-by", "Rows are published in its order; by default the id's.")] = None
    topic: Annotated[
        str | None,
        typer.Option("--topic", help="The topic; {column} in it is a column's value.", show_default="as in the layout"),
    ] = None
    key: Annotated[str | None, _column("--key", "The message's key.")] = None
    value: Annotated[str | None, _column("--value", "The message's value.")] = None
    empty_is_tombstone: Annotated[
        bool, typer.Option("--empty-is-tombstone", help="An empty value is a tombstone, as NULL is.")
    ] = False
    headers: Annotated[str | None, _column("--headers", "Headers as a JSON object.")] = None
    header: Annotated[
        list[str] | None,
        typer.Option(
            "--header",
            metavar="NAME=COLUMN",
            help="A header with a column's value, beside those of the layout; repeatable. Without a column: no such header.",
        ),
    ] = None
    partition: Annotated[str | None, _column("--partition", "The partition.")] = None
    timestamp: Annotated[str | None, _column("--timestamp", "The message's timestamp.")] = None
    not_before: Annotated[str | None, _column("--not-before", "The time before which a row is not published.")] = None
    created: Annotated[str | None, _column("--created", "When the row was inserted, for the age of the oldest.")] = None
    published: Annotated[
        str | None, _column("--published", "Set this column to the current time, instead of deleting the row.")
    ] = None
    where: Annotated[str | None, typer.Option("--where", metavar="SQL", help="Only rows that fulfil this condition.")] = None

    def chosen(self) -> OutboxLayout:
        """The layout, changed by the options. An empty column means that there is none."""
        base = LAYOUTS[self.layout] if self.layout in LAYOUTS else _imported(self.layout)
        changes: dict[str, Any] = {}
        for name in ("table", "id", "topic", "value", *_COLUMNS):
            given = getattr(self, name)
            if given is not None:
                changes[name] = None if not given and name in _COLUMNS else given
        if self.header is not None:
            headers = {**base.header_columns, **pairs(self.header, "--header")}
            changes["header_columns"] = MappingProxyType({name: column for name, column in headers.items() if column})
        return replace(base, empty_is_tombstone=base.empty_is_tombstone or self.empty_is_tombstone, **changes)

    @contextmanager
    def dead_letters(self) -> Iterator[DeadLetters]:
        """The dead letters, without a look at the outbox: a journal has none."""
        with store_for(self.settings()) as store:
            letters = DeadLetters(sql_store(store), self.name or f"relay.{self.chosen().table}")
            letters.check()
            yield letters

    def relay(self, **options: Any) -> Relay:
        """The relay, with further options of `RelayOptions`; the caller closes it."""
        settings = self.settings()
        chosen = RelayOptions(layout=self.chosen(), **options)
        return Relay(settings=settings, name=self.name, options=chosen)


def _imported(place: str) -> OutboxLayout:
    """The layout that a module has, which may be in the current folder, as for `python -m`."""
    module, _, name = place.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(import_module(module), name, None) if name else None
    except ImportError as error:
        raise typer.BadParameter(f"{place!r} can't be imported: {error}.", param_hint="--layout") from error
    finally:
        del sys.path[0]
    if not isinstance(found, OutboxLayout):
        raise typer.BadParameter(
            f"{place!r} is not one of {', '.join(LAYOUTS)}, and no OutboxLayout as MODULE:NAME.", param_hint="--layout"
        )
    return found


_DEFAULTS: Final = RelayOptions()
_REPORT_SECONDS: Final = 10.0
"""Seconds between two lines of progress."""

app = typer.Typer(no_args_is_help=True, cls=JsonGroup)
dead = typer.Typer(no_args_is_help=True, cls=JsonGroup)
app.add_typer(dead, name="dead", help="List, show, replay and drop rows that could not be sent.")


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How a relay works; as in RelayOptions."""

    batch: Annotated[int, typer.Option("--batch", min=1, help="The maximum number of rows of a transaction.")] = (
        _DEFAULTS.batch.rows
    )
    on_poison: Annotated[
        str, typer.Option("--on-poison", help="What to do with a row that can't be sent: dead_letter or stop.")
    ] = _DEFAULTS.on_poison
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="CHANNEL", help="A channel on which PostgreSQL notifies of new rows.")
    ] = None
    longest_poll: Annotated[
        float, typer.Option("--longest-poll", metavar="SECONDS", help="The maximum time between two looks at the outbox.")
    ] = _DEFAULTS.longest_poll
    lease: Annotated[
        float, typer.Option("--lease", metavar="SECONDS", help="After which another relay takes over from a dead one.")
    ] = _DEFAULTS.lease
    shards: Annotated[int, typer.Option("--shards", min=1, help="The number of parts that relays share.")] = _DEFAULTS.shards
    shard_by: Annotated[
        str | None, typer.Option("--shard-by", metavar="SQL", help="An integer that says to which shard a row belongs.")
    ] = None


@app.command()
@grouped
def run(
    *,
    outbox: Outbox,
    once: Annotated[bool, typer.Option("--once", help="Publish one batch, and end.")] = False,
    until_empty: Annotated[bool, typer.Option("--until-empty", help="End when there is no row to publish.")] = False,
    tuning: Tuning,
    as_json: AsJson = False,
) -> None:
    """Publish the rows of an outbox, each once, and delete them in the same dual write, until SIGTERM or Ctrl-C."""
    if once and until_empty:
        refuse("Use either --once or --until-empty.")
    began = time.monotonic()
    with outbox.relay(**(vars(tuning) | {"batch": BatchOptions(rows=tuning.batch)})) as relay:
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
        print_json("relay run", {"published": relay.published, "dead": relay.dead, "seconds": round(seconds, 3)})
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
        while not over.wait(_REPORT_SECONDS):
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


_WORKER: Final = Facts(
    Fact("transactional_id", "transactional id"),
    Fact("owner", "owner"),
    Fact("ends_in", "lease ends in (s)", lambda worker: round(worker.ends_in, 1)),
)
_STATUS: Final = Facts(
    Fact("name", "relay"),
    Fact("table", "table"),
    Fact("waiting", "waiting"),
    Fact("oldest_seconds", "oldest (s)", lambda found: None if found.oldest is None else round(found.oldest, 3)),
    Fact("later", "later"),
    Fact("dead", "dead letters"),
    Fact("workers", value=lambda found: _WORKER.records(found.workers)),
    Fact("notes", value=lambda found: list(found.notes)),
)


@app.command()
@grouped
def status(*, outbox: Outbox, as_json: AsJson = False) -> None:
    """Show how many rows are waiting, how old the oldest is, the dead letters, and which relays work on the outbox."""
    with outbox.relay() as relay:
        found = relay.status()
    if as_json:
        print_json("relay status", _STATUS.record(found))
        return
    show_facts(_STATUS, [found])
    show_facts(_WORKER, found.workers, empty="No relay works on it.")
    for note in found.notes:
        say(note)


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
    url, name = database_url(database.settings()), table or GENERIC.table
    if sql:
        for statement in table_sql(url, name, channel=listen):
            typer.echo(f"{statement};")
        return
    create_table(url, name, channel=listen)
    say(f"Created the table {name}.")


Numbers = Annotated[list[int] | None, typer.Option("--letter", metavar="N", help="A dead letter's number; repeatable.")]
All = Annotated[bool, typer.Option("--all", help="All dead letters of the relay.")]
Most = Annotated[int, typer.Option("--most", min=1, help="How many to show, the oldest first.")]


_LETTER: Final = Facts(
    Fact("id", "letter"),
    Fact("table", value="source"),
    Fact("row", "row", "source_id"),
    Fact("topic", "topic"),
    Fact("error", "error", "error_kind"),
    Fact("message", value="error"),
    Fact("attempts", "attempts"),
    Fact("failed_at", "failed"),
)


@dead.command("list")
@grouped
def list_(*, outbox: Outbox, most: Most = 100, as_json: AsJson = False) -> None:
    """List the rows that could not be sent."""
    with outbox.dead_letters() as letters:
        count, found = letters.count(), letters.oldest(most, with_rows=False)
    if as_json:
        print_json("relay dead list", {"count": count, "letters": _LETTER.records(found)})
        return
    show_facts(_LETTER, found)
    if count > len(found):
        say(f"{counted(count - len(found), 'more dead letter')}; see --most.")


@dead.command()
@grouped
def show(*, outbox: Outbox, letters: Numbers = None, as_json: AsJson = False) -> None:
    """Show rows that could not be sent, with their errors and all their columns."""
    with outbox.dead_letters() as of_relay:
        found = of_relay.get(letters or refuse("Which? Use --letter."))
    columns = json.loads if as_json else str
    records = [{**_LETTER.record(each), "columns": columns(row_text(each.row))} for each in found]
    print_records("relay dead show", "letters", records, as_json=as_json)


@dead.command()
@grouped
def replay(*, outbox: Outbox, letters: Numbers = None, every: All = False) -> None:
    """Publish rows that could not be sent, each once, and remove them from the dead letters in the same dual write.

    Their messages are made anew with the layout that is given here, so a corrected mapping is applied.
    """
    with outbox.relay() as relay:
        say(f"Published {counted(relay.replay(chosen_letters(relay.dead_letters, letters, every=every)), 'dead letter')}.")


@dead.command()
@grouped
def drop(*, outbox: Outbox, letters: Numbers = None, every: All = False, yes: Yes = False) -> None:
    """Delete rows that could not be sent; their messages are never sent then."""
    with outbox.dead_letters() as of_relay:
        chosen = chosen_letters(of_relay, letters, every=every)
        confirm(f"Delete {counted(len(chosen), 'dead letter')}?", yes=yes)
        say(f"Deleted {counted(of_relay.drop(chosen), 'dead letter')}.")


def chosen_letters(of_relay: DeadLetters, letters: Sequence[int] | None, *, every: bool) -> Sequence[int]:
    """The numbers that are given, or those of all dead letters."""
    if bool(letters) == every:
        refuse("Use either --letter or --all.")
    return letters or of_relay.ids()
