"""The choice of a writer's producer, from its settings and what the cluster supports."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from dualwrite.deadline import Deadline, Limit
from dualwrite.errors import BrokerUnavailableError, ConfigurationError, TwoPhaseCommitRefusedError
from dualwrite.kafka.base import ProducerFactory, TransactionalProducer
from dualwrite.kafka.client.brokers import Network
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.inspect import BrokerCapabilities, TwoPhaseObstacle, probe
from dualwrite.observability.logs import SubjectLogger
from dualwrite.settings import Settings
from dualwrite.state import ProducerKind

log = SubjectLogger(__name__)

NATIVE_LANES: Final = 3
"""Enough that a transaction need not wait for the previous one's markers (docs/how-it-works/kafka-and-two-phase-commit.md)."""

LIBRDKAFKA_LANES: Final = 1
"""Each lane is a separate client with its own threads and connections."""


class ProbedCluster:
    """What a cluster supports, probed once for all writers of a pool. Thread-safe; two threads may both probe it at first."""

    def __init__(self) -> None:
        self._found: BrokerCapabilities | None = None

    def capabilities(self, probing: Callable[[], BrokerCapabilities]) -> BrokerCapabilities:
        """What was found, or is found now."""
        found = self._found
        if found is None:
            found = self._found = probing()
        return found

    def forget(self) -> None:
        """Probe it again for the next writer: it may have changed."""
        self._found = None


class LateProducers:
    """Producers of a writer that may start while Kafka is down: see `kafka.base.Producers`.

    Args:
        choosing: Chooses them within a time limit, as `choose_producer` does.
        cluster_id: The cluster that answers, within a time limit: what one supports is not what another one does.
        lanes: How many ids the writer uses if Kafka has not answered when it starts.
    """

    def __init__(self, choosing: Callable[[Limit], ProducerFactory], cluster_id: Callable[[Limit], str], *, lanes: int) -> None:
        self._choosing = choosing
        self._cluster_id = cluster_id
        self._chosen: ProducerFactory | None = None
        self._chosen_for = ""
        self._lanes = lanes

    @property
    def lanes(self) -> int:
        """How many ids the writer uses by default."""
        return self._lanes if self._chosen is None else self._chosen.lanes

    @property
    def kind(self) -> ProducerKind:
        return self._factory.kind

    def __call__(self, kafka_transactional_id: str) -> TransactionalProducer:
        return self._factory(kafka_transactional_id)

    def choose(self, *, timeout: Limit) -> None:
        cluster_id = self._cluster_id(timeout)
        if self._chosen is None or cluster_id != self._chosen_for:
            self._chosen, self._chosen_for = self._choosing(timeout), cluster_id

    @property
    def _factory(self) -> ProducerFactory:
        if self._chosen is None:
            raise BrokerUnavailableError(
                "Kafka has not answered since the writer has started, so what it supports is not known yet.",
                next_step="bring Kafka back; until then only the journal can be written",
            )
        return self._chosen


def choose_producer(
    config: KafkaConfig,
    coordinator: WireTransactionCoordinator,
    settings: Settings,
    *,
    share_connections: bool = False,
    probed: ProbedCluster | None = None,
    timeout: Limit | None = None,
) -> ProducerFactory:
    """The factory for `settings.producer` and `settings.two_phase`; where these leave a choice, the cluster decides.

    Probes the cluster without leaving a trace in it; nothing is claimed yet.

    Args:
        config: The cluster's settings.
        coordinator: The one that the producers will use.
        settings: The writer's settings, with a transactional id.
        share_connections: Whether the producers share the coordinator's connections, one to each broker: only if one thread
            at a time uses all of them.
        probed: What is known about the cluster already; by default it is probed.
        timeout: For probing it; by default the settings' limit for Kafka.

    Raises:
        ConfigurationError: The settings contradict each other, or the cluster does not support what they ask for.
        TwoPhaseCommitRefusedError: Two-phase commit is requested, and the cluster does not offer it.
        BrokerUnavailableError: The cluster can't be reached.
        BrokerAuthorizationError: The principal is not authorized to use the id.
    """
    if settings.producer == "librdkafka":
        if settings.two_phase:
            raise ConfigurationError(
                "two_phase is set with producer='librdkafka', which does not support two-phase commit.",
                next_step="set producer='auto' or 'native'",
            )
        return _librdkafka(config, coordinator, settings)
    found = (probed or ProbedCluster()).capabilities(
        lambda: probe(
            config,
            transactional_id=f"{settings.transactional_id}#probe",
            timeout=timeout.left if isinstance(timeout, Deadline) else timeout or settings.timeouts.kafka,
            network=coordinator.network if share_connections else None,
        )
    )
    if settings.two_phase and not (found.native and found.two_phase):
        raise _two_phase_refused(found)
    two_phase = found.two_phase if settings.two_phase is None else settings.two_phase
    if not found.native_with(two_phase=two_phase):
        _check_may_fall_back(settings, found)
        return _librdkafka(config, coordinator, settings)
    if two_phase and config.transaction_timeout_ms is not None:
        raise ConfigurationError(
            "transaction.timeout.ms is set, but this cluster offers two-phase commit, under which nothing times out (KIP-939).",
            next_step="remove transaction.timeout.ms; or set two_phase=False (environment: DUALWRITE_TWO_PHASE=false) to "
            "run without two-phase commit",
        )
    _log_two_phase(settings, found, two_phase=two_phase)
    return _native(config, coordinator, settings, coordinator.network if share_connections else None, two_phase=two_phase)


def _check_may_fall_back(settings: Settings, found: BrokerCapabilities) -> None:
    upgrade = "upgrade the brokers, then: kafka-features.sh upgrade --release-version <theirs>"
    if settings.producer == "native":
        has = "the metadata.version of 4.0" if found.native else f"transaction.version {found.transaction_version}"
        raise ConfigurationError(
            "producer='native' requires transaction.version 2 and the metadata.version of Apache Kafka 4.1; this cluster has "
            f"{has}.",
            next_step=f"set producer='auto'; or {upgrade}",
        )
    if found.native:
        log.warning(
            "librdkafka, because the metadata.version is that of Kafka 4.0 (KAFKA-19367); to use the native producer, %s",
            upgrade,
            transactional_id=settings.transactional_id,
        )


def _two_phase_refused(found: BrokerCapabilities) -> TwoPhaseCommitRefusedError:
    why = "transaction.version is below 2" if found.two_phase_obstacle is None else found.two_phase_obstacle.value
    return TwoPhaseCommitRefusedError(
        f"Two-phase commit is requested, but this cluster does not offer it: {why}.",
        next_step="run `dualwrite doctor` to see which broker setting or ACL is missing; or leave two_phase unset",
    )


def _log_two_phase(settings: Settings, found: BrokerCapabilities, *, two_phase: bool) -> None:
    if two_phase or settings.two_phase is False:
        log.info(
            "native producer, %s two-phase commit",
            "with" if two_phase else "without",
            transactional_id=settings.transactional_id,
        )
        return
    obstacle = found.two_phase_obstacle or TwoPhaseObstacle.UNKNOWN
    log.log(
        logging.WARNING if obstacle is TwoPhaseObstacle.FORBIDDEN else logging.INFO,  # the brokers have it, and we don't get it
        "native producer, without two-phase commit: %s (two_phase=True requires it, two_phase=False turns it off)",
        obstacle.value,
        transactional_id=settings.transactional_id,
    )


def _native(
    config: KafkaConfig,
    coordinator: WireTransactionCoordinator,
    settings: Settings,
    network: Network | None,
    *,
    two_phase: bool,
) -> ProducerFactory:
    from dualwrite.kafka.native.native_producer import NativeProducer  # noqa: PLC0415  (loaded only if used)

    def make(kafka_transactional_id: str) -> TransactionalProducer:
        return NativeProducer(
            config,
            kafka_transactional_id,
            coordinator,
            two_phase=two_phase,
            delivery_timeout=settings.timeouts.for_delivery,
            throttled_timeout=settings.timeouts.for_throttled,
            network=network,
        )

    make(f"{settings.transactional_id}#check").close()  # rejects bad settings now, before anything is claimed
    kind = ProducerKind.NATIVE_TWO_PHASE if two_phase else ProducerKind.NATIVE
    return ProducerFactory(kind, make, lanes=NATIVE_LANES)


def _librdkafka(config: KafkaConfig, coordinator: WireTransactionCoordinator, settings: Settings) -> ProducerFactory:
    from dualwrite.kafka.librdkafka.librdkafka_producer import (  # noqa: PLC0415
        LibrdkafkaProducer,
        check_settings,
    )

    check_settings(config)

    def make(kafka_transactional_id: str) -> TransactionalProducer:
        return LibrdkafkaProducer(
            config,
            kafka_transactional_id,
            coordinator,
            delivery_timeout=settings.timeouts.for_delivery,
            throttled_timeout=settings.timeouts.for_throttled,
        )

    return ProducerFactory(ProducerKind.LIBRDKAFKA, make, lanes=LIBRDKAFKA_LANES)
