"""`dualwrite doctor`: which guarantee a cluster and a database give, what weakens it, how to improve it.

Exit codes: 0 dual writes work here, 1 something is broken, 2 usage error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from enum import Enum
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dualwrite.cli.options import AsJson, JsonGroup, ProbedId, Target, grouped, refuse
from dualwrite.cli.output import print_json, table_of
from dualwrite.diagnosis import DatabaseFacts, Diagnosis, Severity, examine
from dualwrite.diagnosis.examination import TIMEOUT_SECONDS
from dualwrite.diagnosis.kafka_findings import records_last
from dualwrite.kafka import BrokerCapabilities
from dualwrite.kafka.inspect import TRANSACTION_STATE_TOPIC, Retention, TopicFacts

BROKEN: Final = 1
_STYLES: Final = {Severity.BROKEN: "bold red", Severity.WEAK: "yellow", Severity.UNKNOWN: "yellow", Severity.NOTE: ""}
_LABELS: Final = {Severity.UNKNOWN: "Look at"}
_UNSEEN: Final = "not visible"
_INDENTED: Final = (0, 0, 1, 2)
_FILE_WIDTH: Final = 80

_TOPICS: Final[Mapping[str, str]] = {
    "": "name",
    "partitions": "partitions",
    "replicas": "replicas",
    "in sync": "in_sync",
    "min.insync.replicas": "min_insync_replicas",
    "max.message.bytes": "max_message_bytes",
    "unclean election": "unclean_leader_election",
    "records last": "retention",
}

app = typer.Typer(cls=JsonGroup)


@app.callback(invoke_without_command=True)
@grouped
def doctor(
    *,
    target: Target,
    topics: Annotated[list[str] | None, typer.Option("--topic", help="A topic to check too; repeatable.")] = None,
    transactional_id: ProbedId = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for Kafka.", min=0.1)] = TIMEOUT_SECONDS,
    as_json: AsJson = False,
) -> None:
    """Report what this cluster supports, which guarantee you get from it, what weakens it, and which setting improves it.

    With a database it also checks the table, settings that may lose an acknowledged commit, and journals. Changes nothing, but
    registers a transactional id of its own at Kafka, as a producer does.
    """
    settings = target.settings().with_changes(transactional_id=transactional_id)
    if "bootstrap.servers" not in settings.kafka and settings.database_url is None:
        refuse("Neither Kafka nor a database is given: use --kafka, --url, or their environment variables.")
    diagnosis = examine(settings, topics=topics or (), timeout=timeout, registers=True)
    if as_json:
        print_json("doctor", _to_json(diagnosis))
    else:
        _show(diagnosis)
    if diagnosis.broken:
        raise typer.Exit(BROKEN)


# --- text -------------------------------------------------------------------------------------------------------------


def _show(diagnosis: Diagnosis) -> None:
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    if diagnosis.kafka is not None:
        _show_facts(console, f"Kafka at {diagnosis.servers}", _kafka_facts(diagnosis.kafka))
    if diagnosis.topics:
        console.print("Topics")
        topics = table_of(_TOPICS, map(_topic_row, diagnosis.topics), console.width - 2)
        console.print(Padding(topics, _INDENTED, expand=False))
    if diagnosis.database is not None:
        _show_facts(console, f"Database {diagnosis.database.address}", _database_facts(diagnosis.database))
    if diagnosis.promise is not None:
        console.print("Guarantee")
        console.print(Padding(str(diagnosis.promise), _INDENTED, expand=False))
    for finding in diagnosis.findings:
        console.print(Text(finding.severity.value.upper().ljust(8), _STYLES[finding.severity]).append(finding.about, "bold"))
        change = f"\n{_LABELS.get(finding.severity, 'Change')}: {finding.change}" if finding.change else ""
        console.print(Padding(finding.what + change, (0, 0, 0, 8), expand=False))
    if not diagnosis.findings:
        console.print("No problems found.")
    if diagnosis.kafka is not None and all(topic.name == TRANSACTION_STATE_TOPIC for topic in diagnosis.topics):
        console.print("No topic of yours was checked: name those that you write to with --topic.")


def _show_facts(console: Console, heading: str, facts: Mapping[str, Any]) -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, value in facts.items():
        table.add_row(name, _shown(value))
    console.print(heading, soft_wrap=True)  # an address is not folded
    console.print(Padding(table, _INDENTED, expand=False))


def _shown(value: Any) -> str:
    if isinstance(value, Retention):
        return records_last(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _UNSEEN if value is None else str(value)


def _kafka_facts(found: BrokerCapabilities) -> dict[str, Any]:
    return {
        "cluster.id": found.cluster_id or None,
        "brokers": found.brokers,
        "transaction.version": found.transaction_version,
        "metadata.version": f"{found.metadata_level}, up to {found.metadata_version}",
        "EndTxn v5": found.end_txn_v5,
        "InitProducerId v6": found.init_producer_id_v6,
        "Produce v12": found.produce_v12,
        "native producer": found.native,
        "two-phase commit": found.two_phase,
        "keepPreparedTxn": found.keep_prepared_txn,
        "transaction.max.timeout.ms": found.transaction_max_timeout_ms,
    }


def _topic_row(topic: TopicFacts) -> list[str | None]:
    if topic.exists:
        return [_shown(getattr(topic, name)) for name in _TOPICS.values()]
    return [topic.name, topic.error or "missing", *[None] * (len(_TOPICS) - 2)]


def _database_facts(found: DatabaseFacts) -> Mapping[str, str]:
    if found.newest_revision is None:
        return found.settings
    table = "missing or too old" if found.table_error else f"revision {found.revision or 'not set by dualwrite'}"
    return {"table": f"{table} (newest: {found.newest_revision})", **found.settings}


# --- JSON -------------------------------------------------------------------------------------------------------------


def _to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    kafka, promised, database = diagnosis.kafka, diagnosis.promise, diagnosis.database
    return {
        "broken": diagnosis.broken,
        "kafka": None if kafka is None else {"servers": diagnosis.servers, **_plain(kafka), "native": kafka.native},
        "guarantee": None if promised is None else {**_plain(promised), "text": str(promised)},
        "topics": [_plain(topic) for topic in diagnosis.topics],
        "database": None if database is None else _plain(database),
        "findings": [_plain(finding) for finding in diagnosis.findings],
    }


def _plain(facts: Any) -> dict[str, Any]:
    """A dataclass as JSON values."""
    return {name: value.name.lower() if isinstance(value, Enum) else value for name, value in asdict(facts).items()}
