"""`dualwrite relay dead`: the rows of an outbox that could not be sent: list, show, replay, drop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import typer

from dualwrite.cli.options import AsJson, JsonGroup, Yes, confirm, grouped, refuse, say
from dualwrite.cli.output import Record, print_json, show_records, versioned
from dualwrite.cli.relay_options import Outbox
from dualwrite.outbox.dead_letters import DeadLetters
from dualwrite.outbox.row_text import row_text
from dualwrite.relay import DeadLetter
from dualwrite.texts import counted

dead = typer.Typer(no_args_is_help=True, cls=JsonGroup)

Numbers = Annotated[list[int] | None, typer.Option("--letter", metavar="N", help="A dead letter's number; repeatable.")]
All = Annotated[bool, typer.Option("--all", help="All dead letters of the relay.")]
Most = Annotated[int, typer.Option("--most", min=1, help="How many to show, the oldest first.")]

_EVERY = 1_000_000


def _record(letter: DeadLetter) -> Record:
    return {
        "id": letter.id,
        "table": letter.source,
        "row": letter.source_id,
        "topic": letter.topic,
        "error": letter.error_kind,
        "message": letter.error,
        "attempts": letter.attempts,
        "failed_at": letter.failed_at,
    }


@dead.command("list")
@grouped
def list_(*, outbox: Outbox, most: Most = 100, as_json: AsJson = False) -> None:
    """List the rows that could not be sent."""
    with outbox.dead_letters() as letters:
        count, records = letters.count(), [_record(each) for each in letters.oldest(most)]
    if as_json:
        print_json(versioned("relay dead list", {"count": count, "letters": records}))
        return
    show_records(
        {"letter": "id", "row": "row", "topic": "topic", "error": "error", "attempts": "attempts", "failed": "failed_at"},
        records,
    )
    if count > len(records):
        say(f"{counted(count - len(records), 'more dead letter')}; see --most.")


@dead.command()
@grouped
def show(*, outbox: Outbox, letters: Numbers = None, as_json: AsJson = False) -> None:
    """Show rows that could not be sent, with their errors and all their columns."""
    with outbox.dead_letters() as of_relay:
        found = of_relay.get(letters or refuse("Which? Use --letter."))
    records = [{**_record(each), "columns": json.loads(row_text(each.row))} for each in found]
    if as_json:
        print_json(versioned("relay dead show", {"letters": records}))
        return
    for each in records:
        for name, value in each.items():
            say(f"{name}: {json.dumps(value, ensure_ascii=False) if name == 'columns' else value}")


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
    return letters or [each.id for each in of_relay.oldest(_EVERY)]
