"""The findings about a Kafka cluster and its topics. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from dualwrite.diagnosis.findings import LIBRDKAFKA, NATIVE, Finding, Guarantee, Promise, Severity, duration, promise
from dualwrite.kafka.inspect import TRANSACTION_STATE_TOPIC, BrokerCapabilities, Retention, TopicFacts, TwoPhaseObstacle

_SHORT_BUDGET_MS: Final = 60_000
_DEFAULT_MESSAGE_MAX_BYTES: Final = 1_000_000  # librdkafka's message.max.bytes

_ENOUGH_MS: Final = 86_400_000  # a day, with a night in which nobody starts the recovery that failed
_WEEK_MS: Final = 7 * _ENOUGH_MS

_GRANT_CONFIGS: Final = "or grant the principal DescribeConfigs on the topic"


def judge_kafka(
    capabilities: BrokerCapabilities,
    *,
    producer: str = "auto",
    transaction_timeout_ms: int | None = None,
    two_phase: bool | None = None,
) -> list[Finding]:
    """The findings about the cluster for a writer with these settings; arguments as for `promise`."""
    found = [
        *_producer(capabilities, producer, two_phase),
        *_timeout(capabilities, producer, transaction_timeout_ms, two_phase),
    ]
    if two_phase and (producer == LIBRDKAFKA or not (capabilities.native and capabilities.two_phase)):
        found.append(
            _kafka(Severity.BROKEN, "two_phase=true requires two-phase commit, which is not available here.", "two_phase")
        )
    if capabilities.native and not capabilities.two_phase:
        found.append(_two_phase(capabilities))
    chosen = promise(capabilities, producer=producer, transaction_timeout_ms=transaction_timeout_ms, two_phase=two_phase)
    if chosen.producer == LIBRDKAFKA:
        found.append(_kafka(Severity.WEAK, _MARKERS_ALIKE, "the native producer, on Apache Kafka 4.2 or newer"))
    elif not capabilities.checks_markers:
        found.append(_kafka(Severity.WEAK, _MARKERS_UNCHECKED, "Apache Kafka 4.2 or newer on every broker"))
    if capabilities.may_skip_markers:
        found.append(_kafka(Severity.WEAK, _MARKERS_SKIPPED, "three replicas of each topic; a release that fixes it, or 4.2.2"))
    return found


def judge_refused_probe(transactional_id: str) -> Finding:
    """The finding about a principal that may not use the id of the probe, which no service has: an operator's, for example."""
    what = f"The principal may not use the transactional id {transactional_id!r}, so what Kafka offers is not known."
    step = "the same with --id, the id of a service, as its principal; or grant this one Write on the transactional id"
    return _kafka(Severity.UNKNOWN, what, f"{step} {transactional_id!r}")


def judge_two_phase(by_broker: Mapping[int, bool | None]) -> list[Finding]:
    """The findings about brokers that may not have two-phase commit, on a cluster where one broker has it.

    Args:
        by_broker: Whether it is switched on, by node id; None if that is not known.
    """
    if missing := [node for node, is_on in by_broker.items() if is_on is False]:
        what = f"Two-phase commit is off on {_brokers(missing)}: no writer can use it while its coordinator is there."
        return [_kafka(Severity.WEAK, what, f"{_SWITCH_ON} and {_UNSTABLE_ON} on every broker")]
    if unknown := [node for node, is_on in by_broker.items() if is_on is None]:
        what = f"Two-phase commit was tried on one broker; whether it is on could not be read for {_brokers(unknown)}."
        step = "grant the principal DescribeConfigs on the cluster; the brokers must respond"
        return [_kafka(Severity.UNKNOWN, what, step)]
    return []


def _brokers(nodes: Sequence[int]) -> str:
    return f"broker{'' if len(nodes) == 1 else 's'} {', '.join(map(str, nodes))}"


_MARKERS_UNCHECKED: Final = (
    "Kafka 4.0 and 4.1 don't check to which transaction a marker belongs (KAFKA-19446): one that is delayed between two "
    "brokers can end the id's next transaction early."
)
_MARKERS_ALIKE: Final = (
    "With librdkafka the markers of an id's transactions are alike, on every release of Kafka: one that is delayed between two "
    "brokers can end the id's next transaction early."
)
_MARKERS_SKIPPED: Final = (
    "Kafka 4.3.0 to 4.4.0 ends a transaction without writing its marker to a partition that has no leader (KAFKA-20734), and "
    "this is 4.3 or newer. Writers and recovery wait for leaders, but can't detect one that is lost during a commit."
)


def _producer(capabilities: BrokerCapabilities, producer: str, two_phase: bool | None) -> list[Finding]:
    if capabilities.native_with(two_phase=capabilities.two_phase and two_phase is not False):
        if producer != LIBRDKAFKA:
            return []
        gain = "two-phase commit and one epoch for each transaction" if capabilities.two_phase else "one epoch per transaction"
        return [_kafka(Severity.NOTE, f"producer=librdkafka is set; the native producer has {gain} here.", "producer=auto")]
    level = capabilities.transaction_version
    if capabilities.end_txn_v5 and capabilities.produce_v12 and not capabilities.has_4_0:
        change = "kafka-features.sh upgrade --feature transaction.version=2"
    else:
        change = "upgrade the brokers to Apache Kafka 4.1 or newer, then: kafka-features.sh upgrade --release-version <theirs>"
    severity = Severity.BROKEN if producer == NATIVE else Severity.NOTE
    what = (
        "metadata.version is that of Kafka 4.0, and the native producer needs 4.1 (KAFKA-19367): only librdkafka can be used"
        if capabilities.has_4_0
        else f"transaction.version is {level}, and the native producer needs 2: only librdkafka can be used"
    )
    return [_kafka(severity, f"{what}, without two-phase commit.", change)]


def _timeout(capabilities: BrokerCapabilities, producer: str, timeout_ms: int | None, two_phase: bool | None) -> list[Finding]:
    promised = promise(capabilities, producer=producer, transaction_timeout_ms=timeout_ms, two_phase=two_phase)
    if promised.guarantee is Guarantee.TWO_PHASE:
        if timeout_ms is None:
            return []
        what = f"transaction.timeout.ms is set to {timeout_ms}; with two-phase commit no transaction times out (KIP-939)."
        return [_kafka(Severity.BROKEN, what, "remove transaction.timeout.ms from the settings, or set two_phase=false")]
    limit = capabilities.transaction_max_timeout_ms
    if timeout_ms is not None and limit is not None and timeout_ms > limit:
        what = f"transaction.timeout.ms is {timeout_ms}, but the broker allows {limit} at most: it rejects every producer."
        return [_kafka(Severity.BROKEN, what, "lower or remove it, or raise the brokers' transaction.max.timeout.ms")]
    if promised.budget_ms is not None and promised.budget_ms < _SHORT_BUDGET_MS:
        what = f"A crashed transaction must be recovered within {duration(promised.budget_ms)} of its first message."
        is_set = timeout_ms is not None
        change = "remove transaction.timeout.ms" if is_set else "raise the brokers' transaction.max.timeout.ms"
        return [_kafka(Severity.WEAK, what, f"{change}; consumers wait only until recovery, not for the whole timeout")]
    if promised.budget_ms is None:
        what = "transaction.max.timeout.ms can't be read. Writers assume 15 min, within which a crashed transaction must be "
        what += "recovered; a broker with a lower maximum rejects them."
        step = "the brokers' transaction.max.timeout.ms; grant the principal DescribeConfigs on the cluster"
        return [_kafka(Severity.UNKNOWN, what, step)]
    return []


_SWITCH_ON: Final = "transaction.two.phase.commit.enable=true"
_UNSTABLE_ON: Final = "unstable.api.versions.enable=true"
_GRANT: Final = "grant the principal TwoPhaseCommit on its transactional ids (kafka-acls.sh --operation TwoPhaseCommit)"
_REMEDIES: Final[Mapping[TwoPhaseObstacle, str]] = {
    TwoPhaseObstacle.BROKER_TOO_OLD: f"Apache Kafka 4.1 or newer, with {_SWITCH_ON} and {_UNSTABLE_ON} on every broker",
    TwoPhaseObstacle.UNSTABLE_VERSIONS_OFF: f"{_UNSTABLE_ON} on every broker",
    TwoPhaseObstacle.NO_INIT_PRODUCER_ID_V6: f"Apache Kafka 4.1 or newer, with {_SWITCH_ON} and {_UNSTABLE_ON} on every broker",
    TwoPhaseObstacle.SWITCHED_OFF: f"{_SWITCH_ON} on every broker; where the cluster has ACLs, also {_GRANT}",
    TwoPhaseObstacle.FORBIDDEN: _GRANT,
    TwoPhaseObstacle.OFF_OR_FORBIDDEN: f"{_SWITCH_ON} on every broker, or {_GRANT}",
}


def _two_phase(capabilities: BrokerCapabilities) -> Finding:
    obstacle = capabilities.two_phase_obstacle or TwoPhaseObstacle.UNKNOWN
    change = _REMEDIES.get(obstacle)
    if obstacle is TwoPhaseObstacle.UNSTABLE_VERSIONS_OFF and capabilities.two_phase_setting is False:
        change = f"{_SWITCH_ON} and {change}"
    return _kafka(Severity.NOTE, f"Two-phase commit is not available: {obstacle.value}.", change)


def _kafka(severity: Severity, what: str, change: str | None) -> Finding:
    return Finding(severity, "kafka", what, change)


def judge_topic(topic: TopicFacts, *, message_max_bytes: int = _DEFAULT_MESSAGE_MAX_BYTES) -> list[Finding]:
    """The findings about a topic that a writer sends to, or about the topic in which Kafka stores its transactions.

    Args:
        topic: What is known about it.
        message_max_bytes: The producer's limit for one message.
    """
    if not topic.exists:
        return _missing(topic)
    found = [*_replication(topic), *_sizes(topic, message_max_bytes)]
    if topic.writable is False and topic.name != TRANSACTION_STATE_TOPIC:
        found.append(_topic(topic, Severity.BROKEN, "The principal may not write to it.", "grant it Write on the topic"))
    if topic.without_leader:
        what = f"{topic.without_leader} of {topic.partitions} partitions have no leader: nothing can be written there now."
        found.append(_topic(topic, Severity.BROKEN, what, "see which brokers are down"))
    if topic.unclean_leader_election:
        what = "unclean.leader.election.enable is on: a lagging replica may become leader, and the messages it lacks are lost."
        found.append(_topic(topic, Severity.WEAK, what, "unclean.leader.election.enable=false"))
    hidden = [name for name, value in _durability(topic) if value is None]
    if hidden:
        what = f"{' and '.join(hidden)} can't be read: whether {_what_is_lost(topic)} may be lost is not known."
        found.append(_topic(topic, Severity.UNKNOWN, what, f"both settings, as an administrator; {_GRANT_CONFIGS}"))
    return found


def _durability(topic: TopicFacts) -> tuple[tuple[str, object], ...]:
    """The settings that decide whether what is acknowledged is durable; the first has no effect on a single replica."""
    least = topic.min_insync_replicas if topic.replicas > 1 else 1
    return (("min.insync.replicas", least), ("unclean.leader.election.enable", topic.unclean_leader_election))


def _what_is_lost(topic: TopicFacts) -> str:
    return "the outcome of a transaction" if topic.name == TRANSACTION_STATE_TOPIC else "an acknowledged message"


def _missing(topic: TopicFacts) -> list[Finding]:
    if topic.name == TRANSACTION_STATE_TOPIC:  # few principals may describe Kafka's internal topics
        what = "It is not visible: whether the outcome of a transaction may be lost is not known."
        step = "its replicas and min.insync.replicas, as an administrator; or grant the principal Describe and "
        step += "DescribeConfigs on it"
        return [_topic(topic, Severity.UNKNOWN, what, step)]
    if topic.error is not None:
        what = f"Kafka reports {topic.error} for it."
        return [_topic(topic, Severity.BROKEN, what, "check its name, and that the principal has Describe and Write on it")]
    if topic.made_at_first_use:
        what = "It does not exist; the broker creates it at the first message, with the broker's default replication."
        return [_topic(topic, Severity.WEAK, what, "create it first, with the replication and settings that you want")]
    what = "It does not exist" + (", and the broker does not create topics." if topic.made_at_first_use is False else ".")
    return [_topic(topic, Severity.BROKEN, what, "create it")]


def _replication(topic: TopicFacts) -> list[Finding]:
    replicas, in_sync, least = topic.replicas, topic.in_sync, topic.min_insync_replicas
    if topic.name == TRANSACTION_STATE_TOPIC:
        advice = "three replicas, min.insync.replicas=2 (new cluster: transaction.state.log.replication.factor, .min.isr)"
    else:
        advice = "three replicas, min.insync.replicas=2"
    lost = _what_is_lost(topic)
    severity, what, change = Severity.WEAK, None, advice
    if least is not None and least > replicas:
        severity, change = Severity.BROKEN, f"min.insync.replicas={max(replicas - 1, 1)}, or more replicas"
        what = f"min.insync.replicas is {least}, but there are {replicas} replicas: no message can be acknowledged."
    elif least is not None and in_sync < least:
        severity, change = Severity.BROKEN, "see which brokers are down"
        what = f"Only {in_sync} of {replicas} replicas are in sync, but min.insync.replicas is {least}: writes fail now."
    elif replicas == 1:
        what = f"It has one replica: {lost} is lost with that broker's disk, or in a power failure before it is flushed to it, "
        what += "and nothing works while the broker is down."
    elif least == 1:
        what = f"min.insync.replicas is 1: while the other replicas lag, {lost} is on one broker only, perhaps only in memory."
    elif least == replicas:
        severity = Severity.NOTE
        what = f"min.insync.replicas is {least}, the number of replicas: one broker down stops every write."
    return [] if what is None else [_topic(topic, severity, what, change)]


def _sizes(topic: TopicFacts, message_max_bytes: int) -> list[Finding]:
    limit = topic.max_message_bytes
    if limit is None or limit >= message_max_bytes or topic.name == TRANSACTION_STATE_TOPIC:
        return []
    what = f"Its max.message.bytes is {limit}; the producer allows messages of up to {message_max_bytes} bytes."
    return [_topic(topic, Severity.NOTE, what, f"the topic's max.message.bytes, or the producer's message.max.bytes={limit}")]


def _topic(topic: TopicFacts, severity: Severity, what: str, change: str) -> Finding:
    return Finding(severity, f"topic {topic.name}", what, change)


# --- how long the records of a topic last: for so long, lost messages can be published again ------------------------------


def records_last(retention: Retention) -> str:
    """How long records last, for a table: `7 days`, `no limit`, `1 h, until compacted`."""
    deleted = retention.deletes and (retention.retention_ms is not None or retention.retention_bytes is not None)
    limits = []
    if deleted and retention.retention_ms is not None:
        limits.append(duration(retention.retention_ms))
    if deleted and retention.retention_bytes is not None:
        limits.append(f"{retention.retention_bytes} bytes")
    if retention.compacts:
        limits.append("until compacted")
    return ", ".join(limits) or "no limit"


def judge_retention(topic: TopicFacts, promised: Promise | None) -> list[Finding]:
    """The findings about a topic that a writer sends to, where Kafka may abort a transaction that the database committed.

    With two-phase commit it does not, and nothing needs to be published again.
    """
    if (
        promised is None
        or promised.guarantee is Guarantee.TWO_PHASE
        or not topic.exists
        or topic.name == TRANSACTION_STATE_TOPIC
    ):
        return []
    if topic.retention is None:
        what = f"Its retention settings can't be read: how long {_LOST} can be published again is not known."
        step = "retention.ms and cleanup.policy, as an administrator; or grant the principal DescribeConfigs on the topic"
        return [_topic(topic, Severity.UNKNOWN, what, step)]
    return [*_deleted(topic, topic.retention), *_compacted(topic, topic.retention)]


_LOST: Final = "the messages of a transaction that Kafka has aborted and the database has committed"


def _deleted(topic: TopicFacts, retention: Retention) -> list[Finding]:
    found = []
    lasts = retention.retention_ms
    if retention.deletes and lasts is not None and lasts < _ENOUGH_MS:
        what = f"Its records last {duration(lasts)}: later, {_LOST} can't be published again."
        found.append(_topic(topic, Severity.WEAK, what, f"retention.ms={_WEEK_MS} (7 days), or at least {_ENOUGH_MS} (24 h)"))
    if retention.deletes and retention.retention_bytes is not None:
        what = f"retention.bytes is {retention.retention_bytes} for each partition: records that exceed it are deleted earlier "
        what += f"than retention.ms says, and with them {_LOST}."
        found.append(_topic(topic, Severity.NOTE, what, "remove retention.bytes, or make it larger than what a day brings"))
    return found


def _compacted(topic: TopicFacts, retention: Retention) -> list[Finding]:
    lag = retention.min_compaction_lag_ms
    if not retention.compacts or lag >= _ENOUGH_MS:
        return []
    aged = f", and {duration(lag)} after they were written (min.compaction.lag.ms)" if lag else ""
    what = f"It is compacted: the cleaner removes {_LOST}, as soon as their segment is closed{aged}. That is after "
    what += f"{duration(retention.segment_ms)} (segment.ms), or once it is full."
    return [_topic(topic, Severity.WEAK, what, f"min.compaction.lag.ms={_WEEK_MS} (7 days), or at least {_ENOUGH_MS} (24 h)")]
