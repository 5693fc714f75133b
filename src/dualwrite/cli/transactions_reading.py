"""The commands of `dualwrite transactions` that only read: what transactions there are, and whether they end (KIP-664)."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Annotated

import typer

from dualwrite.admin import DescribedTransaction, RecordTransaction, TransactionAdmin
from dualwrite.cli.options import AsJson, Decided, Decisions, KafkaSettings, Schema, Url, settings_for
from dualwrite.cli.output import print_json
from dualwrite.cli.texts import now_ms
from dualwrite.cli.tool_options import TIMEOUT, Broker, Kafka, Partition, Partitions, Timeout, Topic, admin_tools, end
from dualwrite.cli.transactions_output import (
    described_json,
    document,
    hidden_topics,
    listing_json,
    producers_json,
    record_json,
    search_json,
    show_described,
    show_listings,
    show_problems,
    show_producers,
    show_record,
    show_search,
)
from dualwrite.settings import Settings

app = typer.Typer()


@app.command("list")
def list_command(
    *,
    states: Annotated[
        list[str] | None, typer.Option("--state", help="Only ids in this state, such as Ongoing; repeatable.")
    ] = None,
    producer_ids: Annotated[
        list[int] | None, typer.Option("--producer-id", help="Only the id with this producer id; repeatable.")
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option("--pattern", "--transactional-id-pattern", help="Only ids that match this regular expression completely."),
    ] = None,
    longer: Annotated[
        float | None,
        typer.Option(
            "--running-longer-than", metavar="SECONDS", min=0, help="Only ids with a transaction that has been open for longer."
        ),
    ] = None,
    milliseconds: Annotated[
        int | None,
        typer.Option(
            "--duration-filter", metavar="MS", help="The same in milliseconds, as in Apache's tool; a negative value means all."
        ),
    ] = None,
    kafka: Kafka = None,
    kafka_config: KafkaSettings = None,
    timeout: Timeout = TIMEOUT,
    as_json: AsJson = False,
) -> None:
    """List the transactional ids that the coordinators know. Kafka leaves out those that you may not describe."""
    if milliseconds is not None:
        if longer is not None:
            raise typer.BadParameter("can't be combined with --running-longer-than.", param_hint="--duration-filter")
        longer = None if milliseconds < 0 else milliseconds / 1000
    with admin_tools(kafka, kafka_config, timeout) as admin:
        result = admin.list(states=states or (), producer_ids=producer_ids or (), pattern=pattern, running_longer_than=longer)
    if as_json:
        found = {"transactions": [listing_json(one) for one in result]}
        print_json(
            document("transactions list", found, complete=result.complete, problems=result.problems, hidden=result.hidden)
        )
    else:
        show_listings(result)
        show_problems(result.problems, result.hidden)
    end(found=bool(result.problems))


@app.command("describe")
def describe_command(
    *,
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID...", help="Transactional ids, as Kafka sees them.")] = None,
    more: Annotated[
        list[str] | None,
        typer.Option("--transactional-id", help="Another id, with the option name of Apache's tool; repeatable."),
    ] = None,
    url: Url = None,
    schema: Schema = None,
    kafka: Kafka = None,
    kafka_config: KafkaSettings = None,
    timeout: Timeout = TIMEOUT,
    as_json: AsJson = False,
) -> None:
    """Describe transactional ids: coordinator, state, producer, timeout, start, partitions.

    With a database it also shows the id's row, its owner, and what recovery would do and why. Then you may also give an id as
    it is in the database, which stands for all ids under which Kafka knows it.
    """
    named = [*(ids or ()), *(more or ())]
    if not named:
        raise typer.BadParameter("give at least one transactional id.", param_hint="ID")
    settings = settings_for(url, kafka, kafka_config, schema)
    with admin_tools(kafka, kafka_config, timeout) as admin:
        described, decided = _described(admin, settings, named)
    now = now_ms()
    hidden = hidden_topics(described)
    complete = (
        not hidden and all(one.problem is None for one in described) and all(one.error is None for one in decided.values())
    )
    if as_json:
        found = {"transactions": [described_json(one, decided.get(one.transactional_id), now) for one in described]}
        print_json(document("transactions describe", found, complete=complete, hidden=hidden))
    else:
        show_described(described, decided, now)
    end(found=not complete or any(one.is_unknown for one in described))


@app.command("describe-producers")
def describe_producers_command(
    *,
    topic: Topic,
    partitions: Partitions = None,
    broker: Broker = None,
    kafka: Kafka = None,
    kafka_config: KafkaSettings = None,
    timeout: Timeout = TIMEOUT,
    as_json: AsJson = False,
) -> None:
    """Show the producers that a topic's partitions remember, and where their open transactions begin."""
    with admin_tools(kafka, kafka_config, timeout) as admin:
        result = admin.describe_producers(topic, partitions or (), broker=broker)
    now = now_ms()
    ok = all(one.problem is None for one in result)
    if as_json:
        found = {"partitions": [producers_json(one, now) for one in result]}
        print_json(
            document("transactions describe-producers", found, complete=result.complete and ok, problems=result.problems)
        )
    else:
        show_producers(result, now)
        show_problems(result.problems)
    end(found=bool(result.problems) or not ok)


@app.command("find-hanging")
def find_hanging_command(
    *,
    topic: Annotated[str | None, typer.Option("--topic", help="Only this topic.", show_default="all")] = None,
    partitions: Partitions = None,
    broker: Broker = None,
    limit: Annotated[
        float | None,
        typer.Option(
            "--max-transaction-timeout",
            metavar="MINUTES",
            min=0,
            help="Examine open transactions whose last message is older.",
            show_default="the broker's transaction.max.timeout.ms and 5 minutes",
        ),
    ] = None,
    kafka: Kafka = None,
    kafka_config: KafkaSettings = None,
    timeout: Timeout = TIMEOUT,
    as_json: AsJson = False,
) -> None:
    """Find open transactions that no coordinator will end, so that read_committed consumers wait for them forever.

    Old transactions that their coordinator will end, and prepared ones, are not reported.
    """
    with admin_tools(kafka, kafka_config, timeout) as admin:
        search = admin.find_hanging(
            topic=topic,
            partitions=partitions or (),
            broker=broker,
            max_transaction_timeout=None if limit is None else limit * 60,
        )
    now = now_ms()
    if as_json:
        found = search_json(search, now)
        print_json(
            document(
                "transactions find-hanging", found, complete=search.complete, problems=search.problems, hidden=search.hidden
            )
        )
    else:
        show_search(search, now)
        show_problems(search.problems, search.hidden)
    end(found=bool(search.hanging or search.problems) or not search.complete)


@app.command("of")
def of_command(
    *,
    topic: Topic,
    partition: Partition,
    offset: Annotated[int, typer.Option("--offset", min=0, help="The record's offset.")],
    url: Url = None,
    schema: Schema = None,
    kafka: Kafka = None,
    kafka_config: KafkaSettings = None,
    timeout: Timeout = TIMEOUT,
    as_json: AsJson = False,
) -> None:
    """Show which transaction a record belongs to, who owns it, and how it ended.

    The exit code is 1 if the transaction is still open, or something about it is not known. With a database it also shows what
    the database decided about an open transaction.
    """
    settings = settings_for(url, kafka, kafka_config, schema)
    with admin_tools(kafka, kafka_config, timeout) as admin:
        found = admin.transaction_of(topic, partition, offset)
        decided = _decided(settings, found)
    complete = found.complete and (decided is None or decided.error is None)
    if as_json:
        record = record_json(found, decided, now_ms())
        print_json(
            document("transactions of", {"record": record}, complete=complete, problems=found.problems, hidden=found.hidden)
        )
    else:
        show_record(found, decided)
        show_problems(found.problems, found.hidden)
    end(found=found.opened is not None or bool(found.problems) or not complete)


def _decided(settings: Settings, found: RecordTransaction) -> Decided | None:
    if settings.database_url is None or found.opened is None or found.transactional_id is None:
        return None
    with Decisions(settings) as decisions:
        return decisions.of(found.transactional_id)


def _described(
    admin: TransactionAdmin, settings: Settings, named: Iterable[str]
) -> tuple[list[DescribedTransaction], dict[str, Decided]]:
    with ExitStack() as opened:
        decisions = None if settings.database_url is None else opened.enter_context(Decisions(settings))
        if decisions is None:
            return list(admin.describe(dict.fromkeys(named))), {}
        names = dict.fromkeys(name for given in named for name in decisions.kafka_ids(given))
        described = list(admin.describe(names))
        return described, decisions.of_each(names)
