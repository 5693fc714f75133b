"""Which producer a writer gets: by its settings, and by what the cluster can do."""

from __future__ import annotations

import logging
from typing import Final

from dualwrite.errors import ConfigurationError, TwoPhaseCommitRefusedError
from dualwrite.kafka.base import ProducerFactory, TransactionalProducer
from dualwrite.kafka.client.cluster import Network
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.inspect.capabilities import BrokerCapabilities, probe
from dualwrite.producer_kind import ProducerKind
from dualwrite.settings import Settings

log = logging.getLogger(__name__)

NATIVE_LANES: Final = 3
"""Enough for a transaction not to meet the markers of the one before (DESIGN.md §2)."""

LIBRDKAFKA_LANES: Final = 1
"""Each is a client of its own, with threads and connections."""


def choose_producer(
    config: KafkaConfig, coordinator: WireTransactionCoordinator, settings: Settings, *, share_connections: bool = False
) -> ProducerFactory:
    """The factory for `settings.producer` and `settings.two_phase`; what is left open there, the cluster decides.

    Asks the cluster, and leaves nothing behind in it; nothing is claimed yet.

    Args:
        config: The cluster's settings.
        coordinator: For the producers.
        settings: A transactional id stands in them.
        share_connections: Whether the producers use the coordinator's connections, one to each broker: only where one thread
            at a time uses all of them.

    Raises:
        ConfigurationError: The settings contradict each other, or the cluster can't do what they ask for.
        TwoPhaseCommitRefusedError: Two-phase commit is asked for, and the cluster does not offer it.
        BrokerUnavailableError: The cluster can't be reached.
        BrokerAuthorizationError: The principal may not use the id.
    """
    if settings.producer == "librdkafka":
        if settings.two_phase:
            raise ConfigurationError(
                "two_phase is asked for with producer='librdkafka', which can't take part in two-phase commit.",
                next_step="producer='auto' or 'native'",
            )
        return _librdkafka(config, coordinator, settings)
    found = probe(config, transactional_id=f"{settings.transactional_id}#probe", timeout=settings.timeouts.kafka)
    if not found.native:
        _refuse_what_needs_native(settings, found)
        return _librdkafka(config, coordinator, settings)
    if settings.two_phase and not found.two_phase:
        raise _two_phase_refused(found)
    two_phase = found.two_phase if settings.two_phase is None else settings.two_phase
    if two_phase and config.transaction_timeout_ms is not None:
        raise ConfigurationError(
            "transaction.timeout.ms is set, but nothing times out under two-phase commit (KIP-939), which this cluster offers.",
            next_step="leave transaction.timeout.ms out; or two_phase=False (environment: DUALWRITE_TWO_PHASE=false) to do "
            "without two-phase commit",
        )
    log.info("%s: native producer, %s two-phase commit", settings.transactional_id, "with" if two_phase else "without")
    return _native(config, coordinator, settings, coordinator.network if share_connections else None, two_phase=two_phase)


def _native(
    config: KafkaConfig,
    coordinator: WireTransactionCoordinator,
    settings: Settings,
    network: Network | None,
    *,
    two_phase: bool,
) -> ProducerFactory:
    from dualwrite.kafka.native.producer import NativeProducer  # noqa: PLC0415  (only who uses it loads it)

    def make(kafka_transactional_id: str) -> TransactionalProducer:
        return NativeProducer(
            config,
            kafka_transactional_id,
            coordinator,
            two_phase=two_phase,
            delivery_timeout=settings.timeouts.delivery,
            network=network,
        )

    make(f"{settings.transactional_id}#check").close()  # its settings are refused now, before anything is claimed
    kind = ProducerKind.NATIVE_TWO_PHASE if two_phase else ProducerKind.NATIVE
    return ProducerFactory(kind, make, lanes=NATIVE_LANES)


def _librdkafka(config: KafkaConfig, coordinator: WireTransactionCoordinator, settings: Settings) -> ProducerFactory:
    from dualwrite.kafka.librdkafka.producer import LibrdkafkaProducer, check_settings  # noqa: PLC0415  (only who uses it loads it)

    check_settings(config)

    def make(kafka_transactional_id: str) -> TransactionalProducer:
        return LibrdkafkaProducer(config, kafka_transactional_id, coordinator, delivery_timeout=settings.timeouts.delivery)

    return ProducerFactory(ProducerKind.LIBRDKAFKA, make, lanes=LIBRDKAFKA_LANES)


def _refuse_what_needs_native(settings: Settings, found: BrokerCapabilities) -> None:
    if settings.two_phase:
        raise _two_phase_refused(found)
    if settings.producer == "native":
        raise ConfigurationError(
            f"producer='native' needs transaction.version 2, EndTxn v5 and Produce v12 (Apache Kafka 4.0 or newer); this "
            f"cluster has transaction.version {found.transaction_version}.",
            next_step="producer='auto'; or raise the feature: kafka-features.sh upgrade --feature transaction.version=2",
        )


def _two_phase_refused(found: BrokerCapabilities) -> TwoPhaseCommitRefusedError:
    why = "it has no transaction.version 2" if found.two_phase_obstacle is None else found.two_phase_obstacle.value
    return TwoPhaseCommitRefusedError(
        f"Two-phase commit is asked for, but this cluster does not offer it: {why}.",
        next_step="`dualwrite doctor` tells which broker setting or right to add; or leave two_phase out",
    )
