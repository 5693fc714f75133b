"""The findings about a Kafka cluster. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from dualwrite.diagnosis.findings import Finding, Severity
from dualwrite.diagnosis.promise import LIBRDKAFKA, NATIVE, Guarantee, duration, promise
from dualwrite.kafka.inspect.capabilities import BrokerCapabilities, TwoPhaseObstacle

_SHORT_BUDGET_MS: Final = 60_000


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
    if capabilities.may_skip_markers:
        found.append(_kafka(Severity.WEAK, _MARKERS_SKIPPED, "three replicas of each topic; a release that fixes it, or 4.2.2"))
    return found


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
