"""Inspects a cluster, topics and a database as a writer would see them. Read-only, except for an id of the probe's own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from dualwrite.admin.requests import Brokers
from dualwrite.deadline import Deadline
from dualwrite.diagnosis.database_findings import CHECKED_USES, judge_database, judge_rights
from dualwrite.diagnosis.findings import DatabaseFacts, Finding, Guarantee, Promise, Severity, promise
from dualwrite.diagnosis.journals import judge_journal, judge_missing
from dualwrite.diagnosis.kafka_findings import judge_kafka, judge_refused_probe, judge_retention, judge_topic, judge_two_phase
from dualwrite.diagnosis.registration import check_registration
from dualwrite.errors import BrokerAuthorizationError, ConfigurationError, DualWriteError, StateTableMissingError, StoreError
from dualwrite.kafka.client.broker_connection import Connection
from dualwrite.kafka.client.brokers import MakeRequest, Network
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.kafka_errors import ErrorCode
from dualwrite.kafka.client.messages_generated import DescribeConfigsRequest, DescribeConfigsResponse, InitProducerIdRequest
from dualwrite.kafka.client.requests import BROKER_RESOURCE, INIT_TWO_PHASE, settings_in, settings_request
from dualwrite.kafka.inspect import (
    PROBE_ID,
    TRANSACTION_STATE_TOPIC,
    TWO_PHASE_SETTING,
    BrokerCapabilities,
    TopicFacts,
    describe_topics,
    probe,
)
from dualwrite.observability.logs import unheard
from dualwrite.relay.journal_state import read_journals
from dualwrite.relay.layout import OutboxLayout
from dualwrite.relay.outbox_table import why_unordered
from dualwrite.settings import Settings
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.registry import store_from_url
from dualwrite.stores.sql import SqlStateStore
from dualwrite.transactional_id import validate_transactional_id

TIMEOUT_SECONDS: Final = 15.0
_BROKER_TIMEOUT_SECONDS: Final = 5.0
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
    timeout: float = TIMEOUT_SECONDS,
    registers: bool = False,
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
        registers: Register that Kafka id, too, as a writer does: see `check_registration`.

    Raises:
        ConfigurationError: Neither a cluster nor a database is given, or a Kafka setting is wrong.
    """
    if _SERVERS not in settings.kafka and settings.database_url is None and store is None:
        raise ConfigurationError(
            "Neither bootstrap servers nor a database are given.",
            next_step="set DUALWRITE_KAFKA_BOOTSTRAP_SERVERS or DUALWRITE_DATABASE_URL, or both",
        )
    found, answers = _NOTHING, None
    if _SERVERS in settings.kafka:
        found, answers = _examined_cluster(settings, topics, timeout, registers=registers)
    if store is not None or settings.database_url is not None:
        seen = "" if found.kafka is None else found.kafka.cluster_id
        with unheard("alembic.runtime.migration", "alembic.runtime.plugins"):
            facts, more = _examined_database(settings, store, seen_cluster_id=seen, kafka_answers=answers)
        found = replace(found, database=facts, findings=(*found.findings, *more))
    return replace(found, findings=tuple(sorted(found.findings, key=lambda finding: _ORDER.index(finding.severity))))


_NOTHING: Final = Diagnosis(None, None, None, (), None, ())


def _examined_cluster(settings: Settings, topics: Iterable[str], timeout: float, *, registers: bool) -> tuple[Diagnosis, bool]:
    """What is known about the cluster, and whether it answers: also if it refuses the id of the probe."""
    config = KafkaConfig.of(settings.kafka)
    limit = _message_max_bytes(config.properties)
    probe_id = _probe_id(settings)
    chosen, producer, two_phase = config.transaction_timeout_ms, settings.producer, settings.two_phase
    capabilities, promised = None, None
    seen: list[TopicFacts] = []
    found: list[Finding] = []
    try:
        try:
            capabilities = probe(config, transactional_id=probe_id, timeout=timeout)
        except BrokerAuthorizationError as error:
            if error.facts.get("code") != ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
                raise
            found.append(_broken("kafka", error) if settings.transactional_id else judge_refused_probe(probe_id))
        else:
            promised = promise(capabilities, producer=producer, transaction_timeout_ms=chosen, two_phase=two_phase)
            found += judge_kafka(capabilities, producer=producer, transaction_timeout_ms=chosen, two_phase=two_phase)
            if promised.guarantee is Guarantee.TWO_PHASE and capabilities.brokers > 1:
                found += judge_two_phase(two_phase_by_broker(config, timeout=timeout))
            if registers and not any(finding.severity is Severity.BROKEN for finding in found):
                found += _registration(config, settings, probe_id, capabilities, timeout)
        seen = describe_topics(config, (TRANSACTION_STATE_TOPIC, *topics), timeout=timeout)
    except DualWriteError as error:
        found.append(_broken("kafka", error))
    found += [finding for topic in seen for finding in judge_topic(topic, message_max_bytes=limit)]
    found += [finding for topic in seen for finding in judge_retention(topic, promised)]
    shown = tuple(topic for topic in seen if topic.exists or topic.name != TRANSACTION_STATE_TOPIC)
    return Diagnosis(config.servers, capabilities, promised, shown, None, tuple(found)), bool(seen)


def _registration(
    config: KafkaConfig, settings: Settings, probe_id: str, capabilities: BrokerCapabilities, timeout: float
) -> list[Finding]:
    try:
        check_registration(config, settings, probe_id, capabilities, timeout=timeout)
    except DualWriteError as error:
        return [_broken("kafka", error)]
    return []


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


def _examined_database(
    settings: Settings, given: TxnStateStore | None, *, seen_cluster_id: str, kafka_answers: bool | None
) -> tuple[DatabaseFacts | None, list[Finding]]:
    from dualwrite import migration  # noqa: PLC0415  (alembic is slow to import; --help must not wait for it)

    rights: list[Finding] = []
    try:
        with _opened(settings) if given is None else nullcontext(given) as store:
            rights = _rights(store)
            problem = None
            try:
                store.check()
            except StateTableMissingError as error:
                problem = (_sentence(error), error.next_step)
            revisions: tuple[str | None, str | None] = (None, None)
            if isinstance(store, SqlStateStore):
                with suppress(StoreError):  # the role may not read the table of revisions, which no writer needs
                    revisions = migration.current(store.engine, schema=settings.schema), migration.newest()
            rows = [] if problem else [row for row in map(store.read, store.list()) if row is not None]
            facts = DatabaseFacts(
                address=store.description,
                revision=revisions[0],
                newest_revision=revisions[1],
                table_error=problem,
                settings=dict(store.durability()),
                copied=None if problem else _copied(store),
                why_no_marks=None if problem else store.why_no_marks(),
                elsewhere=tuple(
                    row.transactional_id for row in rows if seen_cluster_id and row.cluster_id not in ("", seen_cluster_id)
                ),
                forgotten=tuple(row.transactional_id for row in rows if row.lost != row.without_messages),
            )
            journals = [] if problem else _journals(store, kafka_answers=kafka_answers)
            orders = [] if problem else _orders(store)
    except DualWriteError as error:
        return None, rights or [_broken("database", error)]
    return facts, [*rights, *judge_database(facts), *journals, *orders]


def _opened(settings: Settings) -> TxnStateStore:
    assert settings.database_url is not None
    return store_from_url(settings.database_url, schema=settings.schema)


def _rights(store: TxnStateStore) -> list[Finding]:
    if not isinstance(store, SqlStateStore):
        return []
    short = store.short_transactions
    found = {use: short.missing_rights(*uses) for use, uses in CHECKED_USES.items()}
    missing = {use: rights for use, (_, rights) in found.items() if rights}
    role = next((role for role, rights in found.values() if rights), "")
    return judge_rights(
        role, missing, _prefixes_with_a_gate(store) if "journal" in missing else [], short.errors.grants_command
    )


def _orders(store: TxnStateStore) -> list[Finding]:
    """Of the outboxes that relays with default names publish."""
    if not isinstance(store, SqlStateStore):
        return []
    names = [re.fullmatch(r"relay\.(.+)\.\d+", each) for each in store.list("relay.")]
    found = []
    for outbox in sorted({name[1] for name in names if name is not None}):
        reason = why_unordered(store, OutboxLayout(outbox))
        found += [] if reason is None else [Finding(Severity.NOTE, f"outbox {outbox}", reason)]
    return found


def _journals(store: TxnStateStore, *, kafka_answers: bool | None) -> list[Finding]:
    try:
        states = read_journals(store)
    except StateTableMissingError as error:
        return [judge_missing(_sentence(error), _prefixes_with_a_gate(store))]
    except StoreError as error:
        if error.retriable:
            raise
        return []  # the role may not read them: see the finding about its rights
    return [finding for state in states for finding in judge_journal(state, kafka_answers=kafka_answers)]


def _prefixes_with_a_gate(store: TxnStateStore) -> list[str]:
    try:
        return [] if store.journal is None else [gate.prefix for gate in store.journal.gates(counts=False)]
    except StoreError:
        return []


def two_phase_by_broker(config: KafkaConfig, *, timeout: float) -> dict[int, bool | None]:
    """Whether each live broker has two-phase commit switched on, by node id; None if that is not known."""
    has_version: dict[int, bool] = {}

    def request(node: int) -> MakeRequest:
        def made(connection: Connection) -> DescribeConfigsRequest:
            has_version[node] = connection.supports(InitProducerIdRequest, INIT_TWO_PHASE)
            return settings_request(BROKER_RESOURCE, [str(node)], [TWO_PHASE_SETTING])

        return made

    def setting(node: int, response: DescribeConfigsResponse) -> str | None:
        return settings_in(response).get(str(node), {}).get(TWO_PHASE_SETTING)

    with closing(Network(config)) as network:
        brokers = Brokers(network, Deadline.after(timeout), _BROKER_TIMEOUT_SECONDS)
        live = brokers.view([]).brokers
        settings = brokers.request(live, {node: request(node) for node in live}, setting)
    return {node: _is_on(settings.get(node), has_version=has_version.get(node)) for node in sorted(live)}


def _is_on(setting: str | None, *, has_version: bool | None) -> bool | None:
    if has_version is False:
        return False
    return None if setting is None else setting == "true"


def _copied(store: TxnStateStore) -> tuple[str, bool] | None:
    """The finding for a database that is not where its store id was created, and whether it is certain that it is another."""
    identity = store.identity()
    doubt = None if identity is None else identity.doubt(store.description, store.marks())
    if doubt is None:
        return None
    return (f"{doubt}. It may be a copy.", False) if isinstance(doubt, str) else (_sentence(doubt), store.detects_copies)


def _broken(about: str, error: DualWriteError) -> Finding:
    return Finding(Severity.BROKEN, about, _sentence(error), error.next_step)


def _sentence(error: DualWriteError) -> str:
    subject = "" if error.transactional_id is None else f" [transactional id {error.transactional_id!r}]"
    return f"{error.what}{subject}" + (f" Cause: {error.cause}" if error.cause else "")
