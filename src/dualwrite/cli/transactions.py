"""`dualwrite transactions`: list, describe and examine the transactions of a Kafka cluster (KIP-664). Read-only.

Exit codes: 0 fine, 1 found something, or the answer is not complete, 2 usage error or Kafka can't be reached.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any, Final

import typer

from dualwrite.admin import DescribedTransaction, TransactionAdmin
from dualwrite.cli.decided import Decided, Decisions
from dualwrite.cli.errors import error_text
from dualwrite.cli.options import USAGE_ERROR, AsJson, KafkaSettings, Schema, Url, settings_for
from dualwrite.cli.transactions_json import described_json, document, listing_json, producers_json, search_json
from dualwrite.cli.transactions_view import show_described, show_listings, show_problems, show_producers, show_search
from dualwrite.errors import DualWriteError
from dualwrite.settings import Settings

FOUND: Final = 1
_TIMEOUT: Final = 30.0

app = typer.Typer(no_args_is_help=True)

Kafka = Annotated[
    str | None,
    typer.Option(
        "--kafka",
        "--bootstrap-server",
        metavar="HOST:PORT",
        help="Bootstrap servers.",
        show_default="DUALWRITE_KAFKA_BOOTSTRAP_SERVERS",
    ),
]
Topic = Annotated[str, typer.Option("--topic", help="The topic.")]
Partitions = Annotated[list[int] | None, typer.Option("--partition", min=0, help="A partition of the topic; repeatable.")]
Broker = Annotated[
    int | None, typer.Option("--broker", "--broker-id", help="Ask this broker about its replicas, instead of the leaders.")
]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait for Kafka.")]


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
        typer.Option(
            "--pattern", "--transactional-id-pattern", help="Only ids that this regular expression matches as a whole."
        ),
    ] = None,
    longer: Annotated[
        float | None,
        typer.Option(
            "--running-longer-than", metavar="SECONDS", min=0, help="Only ids with a transaction that is open for longer."
        ),
    ] = None,
    kafka: Kafka = None,
    kafka_config: KafkaSettings = None,
    timeout: Timeout = _TIMEOUT,
    as_json: AsJson = False,
) -> None:
    """List the transactional ids that the coordinators know. Kafka leaves out those that you may not describe."""
    with _admin(kafka, kafka_config, timeout) as admin:
        answer = admin.list(states=states or (), producer_ids=producer_ids or (), pattern=pattern, running_longer_than=longer)
    if as_json:
        found = {"transactions": [listing_json(one) for one in answer]}
        _print(document("list", found, complete=answer.complete, problems=answer.problems))
    else:
        show_listings(answer)
        show_problems(answer.problems)
    _exit(found=bool(answer.problems))


@app.command("describe")
def describe_command(
    *,
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID...", help="Transactional ids, as Kafka sees them.")] = None,
    more: Annotated[
        list[str] | None, typer.Option("--transactional-id", help="Another id, as Apache's tool takes it; repeatable.")
    ] = None,
    url: Url = None,
    schema: Schema = None,
    kafka: Kafka = None,
    kafka_config: KafkaSettings = None,
    timeout: Timeout = _TIMEOUT,
    as_json: AsJson = False,
) -> None:
    """Describe transactional ids: coordinator, state, producer, timeout, start, partitions.

    With a database it also shows the id's row, its owner, and what recovery would do, and why. An id may then be one of the
    database's, which stands for what Kafka knows it by.
    """
    named = [*(ids or ()), *(more or ())]
    if not named:
        raise typer.BadParameter("name at least one transactional id.", param_hint="ID")
    settings = settings_for(url, kafka, kafka_config, schema)
    with _admin(kafka, kafka_config, timeout) as admin:
        described, decided = _described(admin, settings, named)
    now = _now_ms()
    ok = all(one.description is not None for one in described) and not any(one.error for one in decided.values())
    if as_json:
        found = {"transactions": [described_json(one, decided.get(one.transactional_id), now) for one in described]}
        _print(document("describe", found, complete=all(one.problem is None for one in described)))
    else:
        show_described(described, decided, now)
    _exit(found=not ok)


@app.command("describe-producers")
def describe_producers_command(
    *,
    topic: Topic,
    partitions: Partitions = None,
    broker: Broker = None,
    kafka: Kafka = None,
    kafka_config: KafkaSettings = None,
    timeout: Timeout = _TIMEOUT,
    as_json: AsJson = False,
) -> None:
    """Show the producers that a topic's partitions remember, and where their open transactions begin."""
    with _admin(kafka, kafka_config, timeout) as admin:
        answer = admin.describe_producers(topic, partitions or (), broker=broker)
    now = _now_ms()
    ok = all(one.problem is None for one in answer)
    if as_json:
        found = {"partitions": [producers_json(one, now) for one in answer]}
        _print(document("describe-producers", found, complete=answer.complete and ok, problems=answer.problems))
    else:
        show_producers(answer, now)
        show_problems(answer.problems)
    _exit(found=bool(answer.problems) or not ok)


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
    timeout: Timeout = _TIMEOUT,
    as_json: AsJson = False,
) -> None:
    """Find open transactions that no coordinator will end: read_committed consumers wait behind them forever.

    Old transactions that their coordinator will end, and prepared ones, are not among them.
    """
    with _admin(kafka, kafka_config, timeout) as admin:
        search = admin.find_hanging(
            topic=topic,
            partitions=partitions or (),
            broker=broker,
            max_transaction_timeout=None if limit is None else limit * 60,
        )
    now = _now_ms()
    if as_json:
        _print(document("find-hanging", search_json(search, now), complete=search.complete, problems=search.problems))
    else:
        show_search(search, now)
        show_problems(search.problems)
    _exit(found=bool(search.hanging or search.problems) or not search.complete)


def _described(
    admin: TransactionAdmin, settings: Settings, named: Iterable[str]
) -> tuple[list[DescribedTransaction], dict[str, Decided]]:
    with ExitStack() as opened:
        decisions = None if settings.database_url is None else opened.enter_context(Decisions(settings))
        if decisions is None:
            return list(admin.describe(dict.fromkeys(named))), {}
        names = dict.fromkeys(name for given in named for name in decisions.kafka_ids(given))
        described = list(admin.describe(names))
        return described, {name: decisions.of(name) for name in names}


@contextmanager
def _admin(kafka: str | None, kafka_config: list[str] | None, timeout: float) -> Iterator[TransactionAdmin]:
    """The tools; an error that leaves nothing to show ends the command with exit code 2."""
    try:
        with TransactionAdmin(settings=settings_for(None, kafka, kafka_config), timeout=timeout) as admin:
            yield admin
    except DualWriteError as error:
        typer.echo(error_text(error), err=True)
        raise typer.Exit(USAGE_ERROR) from error


def _print(found: Any) -> None:
    typer.echo(json.dumps(found, indent=2))


def _now_ms() -> int:
    return int(time.time() * 1000)


def _exit(*, found: bool) -> None:
    if found:
        raise typer.Exit(FOUND)
