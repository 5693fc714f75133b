"""`dualwrite status`: whether all is well or what to run next, the transactional ids, and their state at Kafka. Read-only.

Exit codes: 0 nothing is to be done, 1 a `DualWriteError`, or ids on another Kafka cluster, 2 usage error, 3 something is to be
done: a transaction waits for recovery, or a lost one for acknowledgement.
"""

from __future__ import annotations

from typing import Annotated, Final

import typer

from dualwrite.cli.attention import needed, verdict_lines
from dualwrite.cli.json_documents import error_json, print_json, versioned
from dualwrite.cli.json_group import JsonGroup
from dualwrite.cli.next_command import GivenOptions
from dualwrite.cli.options import (
    LONGER,
    AsJson,
    Kafka,
    KafkaSettings,
    Longer,
    Prefix,
    Schema,
    Url,
    Wide,
    counted,
    say,
    settings_for,
)
from dualwrite.cli.status_data import StatusData, in_database, read_from_kafka
from dualwrite.cli.status_view import show_status
from dualwrite.cli.times import now_ms

TO_DO: Final = 3

app = typer.Typer(cls=JsonGroup)


@app.callback(invoke_without_command=True)
def status(
    *,
    url: Url = None,
    kafka: Kafka = None,
    kafka_config: KafkaSettings = None,
    schema: Schema = None,
    prefix: Prefix = "",
    problems: Annotated[bool, typer.Option("--problems", help="Show only ids for which something is to be done.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Also show resolved ids that nobody uses.")] = False,
    longer: Longer = LONGER,
    wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """Show whether all is well or what to run next, and the transactional ids with their owners. Changes nothing.

    The lanes of an id are shown below it. With Kafka's address it also shows what the coordinator reports for each generation
    that is not resolved, or else for the newest. Leases show which ids pools use now. Jobs (Spark) are listed by their prefix,
    consumer groups with positions in the database by their id; `dualwrite offsets list` shows each position.

    The exit code is 3 if something is to be done: for a transaction that has been open for longer than `--longer-than` on an id
    that no pool has leased, for an id whose pool is gone, or for a lost transaction that is not acknowledged.
    """
    settings = settings_for(url, kafka, kafka_config, schema)
    given = GivenOptions(url, schema, kafka, tuple(kafka_config or ()))
    found = in_database(settings, prefix)
    failure = read_from_kafka(found, settings) if "bootstrap.servers" in settings.kafka else None
    to_do = needed(found.rows, found.leases, found.seen, now_ms(), longer_than=longer)
    shown = found.only({each.transactional_id for each in to_do}) if problems else found
    if as_json:
        failed = None if failure is None else error_json(failure)
        print_json(versioned("status", {"to_do": [each.to_json(given) for each in to_do], **shown.to_json(), "error": failed}))
    else:
        for line in verdict_lines(to_do, given) or [_all_is_well(found, prefix)]:
            say(line)
        show_status(shown, wide=wide, everything=everything or problems)
    if failure is not None:
        typer.echo(f"Could not be read from Kafka: {', '.join(found.unread or ())}.", err=True)
        raise failure
    if found.elsewhere:
        names = ", ".join(row.transactional_id for row in found.elsewhere)
        say(f"Not on this Kafka cluster ({found.cluster_id}): {names}. Give the address of their cluster.", err=True)
        raise typer.Exit(1)
    if to_do:
        raise typer.Exit(TO_DO)


def _all_is_well(found: StatusData, prefix: str) -> str:
    """The first line if nothing is to be done, as far as that could be seen."""
    if not found.rows and not found.leases:
        begins = f" that begins with {prefix!r}" if prefix else ""
        others = f", but {counted(found.other_ids, 'other id')}" if found.other_ids else ""
        return f"There is no transactional id{begins} in {found.description}{others}."
    used = f"{counted(len(found.used), 'id')} in use"
    if found.unread is None:
        return f"{used}, nothing known to recover. Kafka was not asked for open transactions: use --kafka."
    if found.unread or found.elsewhere:
        return f"{used}. Whether there is something to recover could not be read completely."
    return f"{used}, nothing to recover."
