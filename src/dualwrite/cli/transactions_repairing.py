"""`dualwrite transactions abort` ends a hanging transaction in its partition: shows it, asks for confirmation, checks again."""

from __future__ import annotations

from typing import Annotated

import typer

from dualwrite.admin import Examined
from dualwrite.admin.guard import is_made_by_dualwrite, refusal_to_abort
from dualwrite.cli.decided import Decisions
from dualwrite.cli.json_documents import print_json
from dualwrite.cli.options import AsJson, KafkaSettings, Schema, Url, Yes, confirm, settings_for
from dualwrite.cli.times import now_ms
from dualwrite.cli.transactions_common import (
    TIMEOUT,
    Kafka,
    Partition,
    Timeout,
    Topic,
    WithoutDatabase,
    admin_tools,
)
from dualwrite.cli.transactions_json import document, examined_json
from dualwrite.cli.transactions_view import show_examined
from dualwrite.errors import DualWriteError, RepairRefusedError, StateTableMissingError, StoreUnavailableError
from dualwrite.settings import Settings
from dualwrite.shell import shell_word

app = typer.Typer()


@app.command("abort")
def abort_command(
    *,
    topic: Topic,
    partition: Partition,
    start_offset: Annotated[
        int | None, typer.Option("--start-offset", min=0, help="Where the transaction begins in the partition.")
    ] = None,
    producer_id: Annotated[int | None, typer.Option("--producer-id", help="Its producer id.")] = None,
    epoch: Annotated[int | None, typer.Option("--producer-epoch", help="Its producer's epoch.")] = None,
    coordinator_epoch: Annotated[
        int | None,
        typer.Option(
            "--coordinator-epoch",
            help="The coordinator's epoch for the marker.",
            show_default="the epoch of the producer's last marker there",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Abort it even if it may not hang, or if its coordinator may have committed it.")
    ] = False,
    url: Url = None,
    schema: Schema = None,
    without_database: WithoutDatabase = False,
    kafka: Kafka = None,
    kafka_config: KafkaSettings = None,
    timeout: Timeout = TIMEOUT,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Abort a hanging transaction in its partition, so that `read_committed` consumers continue (KIP-664).

    Identify it by its start offset, or by producer id and epoch, as `find-hanging` shows them. A transaction that does not
    hang, or that the database has committed, is not aborted. Give the database with `--url`: without it, a transaction of a
    dualwrite writer is refused. See `force-terminate` and `complete` for transactions that do not hang.
    """
    if start_offset is None and (producer_id is None or epoch is None):
        raise typer.BadParameter("give --start-offset, or --producer-id and --producer-epoch.", param_hint="--start-offset")
    settings = settings_for(url, kafka, kafka_config, schema)
    with admin_tools(kafka, kafka_config, timeout) as admin:
        found = admin.examine(topic, partition, start_offset=start_offset, producer_id=producer_id, epoch=epoch)
        if found is None:
            raise RepairRefusedError(
                f"{topic}-{partition} has no such open transaction.",
                next_step=f"list them with `dualwrite transactions describe-producers --topic {shell_word(topic)}`",
            )
        if not as_json:
            show_examined(found, now_ms())
        _confirm(settings, found, without_database=without_database, force=force, yes=yes)
        admin.abort(found, coordinator_epoch=coordinator_epoch, force=force)
    if as_json:
        print_json(document("transactions abort", {"aborted": examined_json(found, now_ms())}, complete=True))
    else:
        typer.echo("Aborted.")


def _confirm(settings: Settings, found: Examined, *, without_database: bool, force: bool, yes: bool) -> None:
    """Ask for confirmation.

    Raises:
        DualWriteError: The transaction must not be aborted, or it was committed while the user was answering.
    """
    refusal = (
        found.refusal(force=True)
        or _refusal_of_database(settings, found, without_database=without_database)
        or found.refusal(force=force)  # last: what the database knows is certain
    )
    if refusal is not None:
        raise refusal
    confirm(_question(found, has_database=settings.database_url is not None), yes=yes)
    refusal = None if yes else _refusal_of_database(settings, found, without_database=without_database)
    if refusal is not None:  # the database may have committed it in the meantime
        raise refusal


def _question(found: Examined, *, has_database: bool) -> str:
    doubts = []
    if found.may_have_been_committed:
        doubts.append("Kafka no longer knows how it ended: it may have been committed.")
    if not has_database and not is_made_by_dualwrite(found.name_at_kafka or ""):
        doubts.append("No dualwrite database was checked (--url): if one has committed it, these messages are lost.")
    question = f"Abort the transaction at {found.opened.topic}-{found.opened.partition}?"
    return " ".join((*doubts, question, "No read_committed consumer will ever see its records there."))


def _refusal_of_database(settings: Settings, found: Examined, *, without_database: bool) -> DualWriteError | None:
    if settings.database_url is None:
        return refusal_to_abort(found, None, None, without_database=without_database)
    producer, name = found.opened.producer, found.name_at_kafka
    with Decisions(settings) as decisions:
        try:
            committed = decisions.committed(producer.producer_id, producer.epoch)
        except (StoreUnavailableError, StateTableMissingError):
            if not without_database:
                raise
            return None
        decided = None if name is None else decisions.of(name)
    return refusal_to_abort(found, decided, committed, without_database=without_database)
