"""Inspects a cluster, topics and a database as a writer would see them. Read-only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from sqlalchemy import Engine

from dualwrite.admin.requests import Brokers
from dualwrite.deadline import Deadline
from dualwrite.diagnosis.database_findings import judge_database
from dualwrite.diagnosis.findings import DatabaseFacts, Finding, Guarantee, Promise, Severity, promise
from dualwrite.diagnosis.journal_findings import judge_journal, judge_missing
from dualwrite.diagnosis.kafka_findings import judge_kafka, judge_topic, judge_two_phase
from dualwrite.diagnosis.retention_findings import judge_retention
from dualwrite.errors import ConfigurationError, DualWriteError, StateTableMissingError
from dualwrite.kafka.client.broker_connection import Connection
from dualwrite.kafka.client.brokers import MakeRequest, Network
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.messages_generated import DescribeConfigsRequest, DescribeConfigsResponse, InitProducerIdRequest
from dualwrite.kafka.inspect import (
    BROKER_RESOURCE,
    INIT_PRODUCER_ID,
    PROBE_ID,
    TRANSACTION_STATE_TOPIC,
    TWO_PHASE_SETTING,
    BrokerCapabilities,
    TopicFacts,
    describe_topics,
    probe,
    settings_in,
    settings_request,
)
from dualwrite.outbox.journal_state import read_journals
from dualwrite.settings import Settings
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.identity import copied, moved
from dualwrite.stores.registry import keeps_a_table, store_from_url
from dualwrite.stores.sql import SqlStateStore
from dualwrite.transactional_id import validate_transactional_id

DEFAULT_TIMEOUT: Final = 15.0
_BROKER_TIMEOUT: Final = 5.0
_SERVERS: Final = "bootstrap.servers"
_ORDER: Final = list(Severity)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result; a part that was not requested, or could not be reached, is None.

    Args:
        servers: The bootstrap servers, as given.
        kafka: The cluster's capabilities.
        promise: The guarantee that a writer gets on it.
        topics: The requested topics, and Kafka's own `__transaction_state` if it is visible.
        database: The database.
        findings: The findings, most severe first.
    """

    servers: str | None
    kafka: BrokerCapabilities | None
    promise: Promise | None
    topics: tuple[TopicFacts, ...]
    database: DatabaseFacts | None
    findings: tuple[Finding, ...]

    @property
    def broken(self) -> bool:
        """Whether dual writes can't work with this setup."""
        return any(finding.severity is Severity.BROKEN for finding in self.findings)


def examine(
    settings: Settings,
    *,
    store: TxnStateStore | None = None,
    topics: Iterable[str] = (),
    timeout: float = DEFAULT_TIMEOUT,
) -> Diagnosis:
    """Inspect what the settings name: the cluster, the database, or both.

    The cluster is probed on the Kafka id `<transactional_id>#probe` if the settings have a transactional id, so that ACLs on
    its prefix apply, else on `dualwrite-probe`. See `dualwrite.kafka.probe` for why that leaves nothing behind.

    The database's settings are those of the connections that dualwrite makes from the URL, or of those of the store.

    Args:
        settings: The cluster and the database.
        store: The database to inspect instead, such as one with your own engine; the caller closes it.
        topics: Topics to inspect.
        timeout: Seconds for the cluster, and again for the topics.

    Raises:
        ConfigurationError: Neither a cluster nor a database is given, or a Kafka setting is wrong.
    """
    if _SERVERS not in settings.kafka and settings.database_url is None and store is None:
        raise ConfigurationError(
            "Neither bootstrap servers nor a database are given.",
            next_step="set DUALWRITE_KAFKA_BOOTSTRAP_SERVERS or DUALWRITE_DATABASE_URL, or both",
        )
    found = _examined_cluster(settings, topics, timeout) if _SERVERS in settings.kafka else _NOTHING
    if (database := _database_of(settings, store)) is not None:
        seen = "" if found.kafka is None else found.kafka.cluster_id
        answers = None if _SERVERS not in settings.kafka else found.kafka is not None
        facts, more = _examined_database(database, seen_cluster_id=seen, kafka_answers=answers)
        found = replace(found, database=facts, findings=(*found.findings, *more))
    return replace(found, findings=tuple(sorted(found.findings, key=lambda finding: _ORDER.index(finding.severity))))


_NOTHING: Final = Diagnosis(None, None, None, (), None, ())


def _examined_cluster(settings: Settings, topics: Iterable[str], timeout: float) -> Diagnosis:
    config = KafkaConfig.of(settings.kafka)
    limit = _message_max_bytes(config.properties)
    probe_id = _probe_id(settings)
    chosen, producer, two_phase = config.transaction_timeout_ms, settings.producer, settings.two_phase
    capabilities, promised = None, None
    seen: list[TopicFacts] = []
    found: list[Finding] = []
    try:
        capabilities = probe(config, transactional_id=probe_id, timeout=timeout)
        promised = promise(capabilities, producer=producer, transaction_timeout_ms=chosen, two_phase=two_phase)
        found += judge_kafka(capabilities, producer=producer, transaction_timeout_ms=chosen, two_phase=two_phase)
        if promised.guarantee is Guarantee.TWO_PHASE and capabilities.brokers > 1:
            found += judge_two_phase(two_phase_by_broker(config, timeout=timeout))
        seen = describe_topics(config, (TRANSACTION_STATE_TOPIC, *topics), timeout=timeout)
    except DualWriteError as error:
        found.append(_broken("kafka", error))
    found += [finding for topic in seen for finding in judge_topic(topic, message_max_bytes=limit)]
    found += [finding for topic in seen for finding in judge_retention(topic, promised)]
    shown = tuple(topic for topic in seen if topic.exists or topic.name != TRANSACTION_STATE_TOPIC)
    return Diagnosis(config.servers, capabilities, promised, shown, None, tuple(found))


def _probe_id(settings: Settings) -> str:
    if settings.transactional_id is None:
        return PROBE_ID
    return f"{validate_transactional_id(settings.transactional_id)}#probe"


def _message_max_bytes(properties: Mapping[str, Any]) -> int:
    try:
        return int(properties.get("message.max.bytes", 1_000_000))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"message.max.bytes is {properties['message.max.bytes']!r}, not a number of bytes.",
            next_step="set it to a number of bytes, such as 1000000, or remove it",
        ) from error


@dataclass(frozen=True)
class _Database:
    """A database to inspect: how to open it, and where its table is; None for a database without migrations."""

    opened: Callable[[], AbstractContextManager[TxnStateStore]]
    table: str | Engine | None
    schema: str | None


def _database_of(settings: Settings, store: TxnStateStore | None) -> _Database | None:
    if store is not None:
        engine = store.engine if isinstance(store, SqlStateStore) else None
        return _Database(lambda: nullcontext(store), engine, settings.schema)
    url = settings.database_url
    if url is None:
        return None
    made = partial(store_from_url, url, schema=settings.schema)
    return _Database(made, url if keeps_a_table(url) else None, settings.schema)


def _examined_database(
    database: _Database, *, seen_cluster_id: str, kafka_answers: bool | None
) -> tuple[DatabaseFacts | None, list[Finding]]:
    from dualwrite import migration  # noqa: PLC0415  (alembic is slow to import; --help must not wait for it)

    try:
        with database.opened() as store:
            problem = None
            try:
                store.check()
            except StateTableMissingError as error:
                problem = (_sentence(error), error.next_step)
            facts = DatabaseFacts(
                address=store.description,
                revision=None if database.table is None else migration.current(database.table, schema=database.schema),
                newest_revision=None if database.table is None else migration.newest(),
                table_error=problem,
                settings=dict(store.durability()),
                copied=None if problem else _copied(store),
                why_no_marks=None if problem else store.why_no_marks(),
                elsewhere=() if problem else _on_other_clusters(store, seen_cluster_id),
            )
            journals = [] if problem else _journals(store, kafka_answers=kafka_answers)
    except DualWriteError as error:
        return None, [_broken("database", error)]
    return facts, [*judge_database(facts), *journals]


def _journals(store: TxnStateStore, *, kafka_answers: bool | None) -> list[Finding]:
    try:
        states = read_journals(store)
    except StateTableMissingError as error:
        return [judge_missing(_sentence(error), _prefixes_with_a_gate(store))]
    return [finding for state in states for finding in judge_journal(state, kafka_answers=kafka_answers)]


def _prefixes_with_a_gate(store: TxnStateStore) -> list[str]:
    try:
        return [] if store.journal is None else [gate.prefix for gate in store.journal.gates(counts=False)]
    except StateTableMissingError:
        return []


def two_phase_by_broker(config: KafkaConfig, *, timeout: float) -> dict[int, bool | None]:
    """Whether each live broker has two-phase commit switched on, by node id; None if that is not known."""
    has_version: dict[int, bool] = {}

    def request(node: int) -> MakeRequest:
        def made(connection: Connection) -> DescribeConfigsRequest:
            has_version[node] = connection.supports(InitProducerIdRequest, INIT_PRODUCER_ID)
            return settings_request(BROKER_RESOURCE, [str(node)], [TWO_PHASE_SETTING])

        return made

    def setting(node: int, response: DescribeConfigsResponse) -> str | None:
        return settings_in(response).get(str(node), {}).get(TWO_PHASE_SETTING)

    with closing(Network(config)) as network:
        brokers = Brokers(network, Deadline.after(timeout), _BROKER_TIMEOUT)
        live = brokers.view([]).brokers
        settings = brokers.request(live, {node: request(node) for node in live}, setting)
    return {node: _is_on(settings.get(node), has_version=has_version.get(node)) for node in sorted(live)}


def _is_on(setting: str | None, *, has_version: bool | None) -> bool | None:
    if has_version is False:
        return False
    return None if setting is None else setting == "true"


def _copied(store: TxnStateStore) -> tuple[str, bool] | None:
    """The finding for a database that is not where its store id was created, and whether it is certain that it is another."""
    identity, found = store.identity(), store.marks()
    if identity is None:
        return None
    if identity.matches_partly(found):
        return f"{moved(store.description, identity, found)}. It may be a copy.", False
    if not identity.is_elsewhere(found):
        return None
    return _sentence(copied(store.description, identity, found)), store.detects_copies


def _on_other_clusters(store: TxnStateStore, seen_cluster_id: str) -> tuple[str, ...]:
    """The ids whose rows name another cluster than the inspected one."""
    if not seen_cluster_id:
        return ()
    rows = map(store.read, store.list())
    return tuple(row.transactional_id for row in rows if row is not None and row.cluster_id not in ("", seen_cluster_id))


def _broken(about: str, error: DualWriteError) -> Finding:
    return Finding(Severity.BROKEN, about, _sentence(error), error.next_step)


def _sentence(error: DualWriteError) -> str:
    subject = "" if error.transactional_id is None else f" [transactional id {error.transactional_id!r}]"
    return f"{error.what}{subject}" + (f" Cause: {error.cause}" if error.cause else "")
