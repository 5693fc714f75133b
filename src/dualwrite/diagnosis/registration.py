"""Registers the id of the probe at Kafka in the way in which a writer registers its own."""

from __future__ import annotations

from contextlib import closing
from typing import cast

from dualwrite.deadline import Deadline
from dualwrite.errors import BrokerError
from dualwrite.kafka.base import TakeOverProducer
from dualwrite.kafka.choose import ProbedCluster, choose_producer
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.inspect import BrokerCapabilities
from dualwrite.settings import Settings
from dualwrite.state import TransactionStatus


def check_registration(
    config: KafkaConfig, settings: Settings, probe_id: str, capabilities: BrokerCapabilities, *, timeout: float
) -> None:
    """Register an id that nobody uses, with the producer that a writer with these settings gets on this cluster.

    If an earlier check has registered it, a native producer takes it over by EndTxn v5, as a writer does. The id stays at its
    coordinator, without a transaction, until it expires.

    Args:
        config: The cluster.
        settings: The writer's settings.
        probe_id: The id.
        capabilities: What the cluster supports.
        timeout: Seconds for everything.

    Raises:
        BrokerError: The cluster does not let a writer register its id, or does it in another way than Apache Kafka.
    """
    deadline = Deadline.after(timeout)
    probed = ProbedCluster()
    probed.capabilities(lambda: capabilities)
    with closing(WireTransactionCoordinator(config, timeout=timeout)) as coordinator:
        made = settings.with_changes(transactional_id=settings.transactional_id or "dualwrite")
        factory = choose_producer(config, coordinator, made, share_connections=True, probed=probed, timeout=deadline)
        with closing(factory(probe_id)) as producer:
            if not factory.kind.takes_over:
                producer.init_transactions(timeout=deadline)
                return
            described = coordinator.describe(probe_id, timeout=deadline)
            if described is None:
                taking = cast("TakeOverProducer", producer)
                (created,) = coordinator.create_all([taking.creation(timeout=deadline)], timeout=deadline)
                is_done, name = taking.created(created, timeout=deadline), created.name
            elif described.status is TransactionStatus.ONGOING:
                return  # somebody uses this id after all: leave it alone
            else:
                raised = coordinator.end_transaction(
                    probe_id, producer_id=described.producer_id, epoch=described.epoch, commit=False, timeout=deadline
                )
                is_done, name = raised.proven, raised.name
    if not is_done:
        raise BrokerError(
            f"A producer could not register a transactional id: Kafka answered {name}.",
            transactional_id=probe_id,
            cause="another check has registered it at the same moment, or the broker does it in another way than Apache Kafka",
            next_step="run it again; if it stays so, set producer='librdkafka' (environment: DUALWRITE_PRODUCER)",
        )
