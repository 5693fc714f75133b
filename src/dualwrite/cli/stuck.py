"""`dualwrite stuck`: which open transactions hold `read_committed` consumers back, where, and what the database decided.

Exit codes: 0 nothing is stuck, 1 something is, or the answer is not complete, 2 usage error or Kafka can't be reached.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated, Final

import typer

from dualwrite.admin import StuckSearch
from dualwrite.cli.decided import Decided, Decisions
from dualwrite.cli.options import AsJson, KafkaSettings, Schema, Url, counted, settings_for, show, terminal_width
from dualwrite.cli.stuck_view import stuck_table
from dualwrite.cli.transactions_common import TIMEOUT, Kafka, Timeout, admin_tools, end, now_ms, print_json
from dualwrite.cli.transactions_json import document, stuck_json
from dualwrite.cli.transactions_view import show_problems, show_unreadable
from dualwrite.settings import Settings

LONGER: Final = 10.0

Topic = Annotated[str | None, typer.Option("--topic", help="Only this topic.", show_default="all")]
Group = Annotated[str | None, typer.Option("--group", help="Only where this consumer group reads.", show_default="all")]
Longer = Annotated[
    float, typer.Option("--longer-than", metavar="SECONDS", min=0, help="Only transactions that are open for longer.")
]

app = typer.Typer()


@app.callback(invoke_without_command=True)
def stuck(
    *,
    topic: Topic = None,
    group: Group = None,
    longer: Longer = LONGER,
    url: Url = None,
    schema: Schema = None,
    kafka: Kafka = None,
    kafka_config: KafkaSettings = None,
    timeout: Timeout = TIMEOUT,
    as_json: AsJson = False,
) -> None:
    """Show where `read_committed` consumers wait for an open transaction: since when, whose it is, and which groups wait.

    With a database, also what that decided about the transaction: `dualwrite transactions complete ID` then ends it so. One
    that hangs is ended by `dualwrite transactions abort`. Short transactions are left out: see `--longer-than`.
    """
    settings = settings_for(url, kafka, kafka_config, schema)
    with admin_tools(kafka, kafka_config, timeout) as admin:
        found = admin.stuck(topic=topic, group=group, longer_than=longer)
        decided = _decided(settings, found)
    now = now_ms()
    if as_json:
        print_json(document("stuck", stuck_json(found, decided, now), complete=found.complete, problems=found.problems))
    else:
        if found.partitions:
            show(stuck_table(found, decided, now, width=terminal_width()))
        else:
            typer.echo(
                f"No consumer waits in {counted(found.searched, 'partition')} for a transaction older than {longer:g} s."
            )
        show_unreadable(found.unreadable)
        show_problems(found.problems)
    end(found=bool(found.partitions or found.problems) or not found.complete)


def holders_decided(decisions: Decisions, found: StuckSearch) -> dict[str, Decided]:
    """What the database decided about each id that holds consumers back."""
    names = dict.fromkeys(name for one in found.partitions if (name := one.holder.transactional_id) is not None)
    return {name: decisions.of(name) for name in names}


def _decided(settings: Settings, found: StuckSearch) -> dict[str, Decided]:
    if settings.database_url is None or not found.partitions:
        return {}
    with ExitStack() as opened:
        return holders_decided(opened.enter_context(Decisions(settings)), found)
