"""The scene of the producers' suite: a broker, producers of one kind on it, and what consumers see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from uuid import uuid4

from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient

from dualwrite.devcluster import DevCluster
from dualwrite.errors import BrokerError
from dualwrite.kafka.base import TransactionalProducer
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.librdkafka.librdkafka_producer import LibrdkafkaProducer
from dualwrite.kafka.native.native_producer import NativeProducer
from dualwrite.state import PreparedTxnState, TransactionDescription, TransactionStatus
from fixtures import pace
from fixtures.broker import make_topic, read_topic
from fixtures.pace import LIMIT

_PAUSE: Final = 0.005
_MORE_THAN_HALF_A_BATCH: Final = bytes(600_000)


@dataclass(frozen=True, slots=True)
class ProducerCase:
    """A kind of producer, and what it can do beyond the Protocol.

    Args:
        make: Creates one, not initialised, from settings, an id, a coordinator and the limit for sending.
        two_phase: Its transactions never time out (KIP-939).
        epoch_per_transaction: Each transaction has its own epoch, so `producerId:epoch` identifies it (KIP-890).
        splits_batches: A batch that is too large for the topic is split, as long as each message is small enough.
    """

    make: Callable[..., TransactionalProducer]
    two_phase: bool = False
    epoch_per_transaction: bool = False
    splits_batches: bool = False


CASES: Final = {
    "librdkafka": ProducerCase(LibrdkafkaProducer),
    "native": ProducerCase(NativeProducer, epoch_per_transaction=True, splits_batches=True),
    "native two-phase": ProducerCase(
        partial(NativeProducer, two_phase=True),
        two_phase=True,
        epoch_per_transaction=True,
        splits_batches=True,
    ),
}


@dataclass(frozen=True, slots=True)
class SeenMessage:
    """One message as a `read_committed` consumer sees it; no headers are an empty list."""

    partition: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]
    timestamp_ms: int


class ProducerScene:
    """A broker and producers on it, which are closed with `opened`."""

    def __init__(
        self, case: ProducerCase, cluster: DevCluster, coordinator: WireTransactionCoordinator, opened: ExitStack
    ) -> None:
        self.case = case
        self.coordinator = coordinator
        self.servers = cluster.bootstrap_servers
        self.make_topic = partial(make_topic, cluster)
        self._opened = opened

    def make(self, kafka_transactional_id: str, settings: Mapping[str, Any]) -> TransactionalProducer:
        """Create a producer, not initialised, with these Kafka settings in addition to the usual ones."""
        config = KafkaConfig.of({"bootstrap.servers": self.servers, **settings})
        return self.case.make(config, kafka_transactional_id, self.coordinator, delivery_timeout=LIMIT)

    def new_name(self, kind: str) -> str:
        return f"{kind}-{uuid4().hex[:12]}"

    def new_producer(self, kafka_transactional_id: str | None = None, **settings: Any) -> TransactionalProducer:
        """Create and initialise a producer; Kafka settings are written with `_` instead of `.`."""
        given = {name.replace("_", "."): value for name, value in settings.items()}
        producer = self.make(kafka_transactional_id or self.new_name("id"), given)
        self._opened.callback(producer.close)
        producer.init_transactions(timeout=LIMIT)
        return producer

    def read(self, topic: str) -> list[SeenMessage]:
        """What a `read_committed` consumer sees of a topic now, by partition and offset; ignores open transactions."""
        found: list[Any] = read_topic(self.servers, topic)
        return [SeenMessage(m.partition(), m.key(), m.value(), m.headers() or [], m.timestamp()[1]) for m in found]

    def values(self, topic: str) -> list[bytes | None]:
        """The values of the visible messages of a topic."""
        return [message.value for message in self.read(topic)]

    def committed_offset(self, group: str, topic: str, partition: int) -> int | None:
        """The offset that a consumer group has committed, or None; does not wait for open transactions."""
        admin = AdminClient({"bootstrap.servers": self.servers})
        wanted = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, partition)])
        (found,) = admin.list_consumer_group_offsets([wanted], require_stable=False)[group].result(LIMIT).topic_partitions
        return found.offset if found.offset >= 0 else None

    def describe(
        self, producer: TransactionalProducer, until: Callable[[TransactionDescription], bool] = lambda _: True
    ) -> TransactionDescription:
        """The coordinator's description of the producer's id, repeated until the condition holds."""

        def look() -> TransactionDescription | None:
            found = self.coordinator.describe(producer.kafka_transactional_id)
            return found if found is not None and until(found) else None

        return pace.until(look, lambda: f"{self.coordinator.describe(producer.kafka_transactional_id)}", pause=_PAUSE)

    def send_until_ongoing(self, producer: TransactionalProducer, topic: str) -> None:
        """Send until the coordinator knows the transaction.

        A producer without its own thread retries a batch that a new topic's leader refused only when it sends the next one.
        """

        def is_ongoing() -> bool:
            producer.send(topic, _MORE_THAN_HALF_A_BATCH)
            found = self.coordinator.describe(producer.kafka_transactional_id)
            return found is not None and found.status is TransactionStatus.ONGOING

        pace.until(is_ongoing, "an ongoing transaction", pause=_PAUSE)

    def end_by_another_process(self, producer: TransactionalProducer, *, commit: bool) -> None:
        """End the producer's ongoing transaction without the producer, as recovery does: by EndTxn for the described epoch."""
        found = self.describe(producer, lambda d: d.status is TransactionStatus.ONGOING)
        result = self.coordinator.end_transaction(
            producer.kafka_transactional_id, producer_id=found.producer_id, epoch=found.epoch, commit=commit
        )
        assert result.proven, result

    def abort(self, producer: TransactionalProducer) -> TransactionalProducer:
        """Abort the transaction; returns the producer to continue with, a new one of the same id if it must be replaced."""
        try:
            producer.abort_transaction(timeout=LIMIT)
        except BrokerError:
            assert producer.must_be_replaced, "abort failed, but the producer does not ask to be replaced"
        if not producer.must_be_replaced:
            return producer
        producer.close()
        return self.new_producer(producer.kafka_transactional_id)

    def check_next_transaction(self, failed: TransactionalProducer, topic: str, *, delivery_failed: bool = False) -> None:
        """Abort the transaction; check that the next one succeeds, and that only its message is visible in the topic."""
        if delivery_failed and not self.case.epoch_per_transaction:
            assert failed.must_be_replaced, "a delivery has failed, and the next transaction would have the same epoch"
        commit_one(self.abort(failed), topic, b"next", key=b"k")
        assert self.values(topic) == [b"next"]


def prepare_and_commit(producer: TransactionalProducer) -> PreparedTxnState | None:
    """Prepare and commit; returns the prepared state."""
    state = producer.prepare_transaction(timeout=LIMIT)
    producer.commit_transaction(timeout=LIMIT)
    return state


def commit_one(producer: TransactionalProducer, topic: str, value: bytes | str | None, **options: Any) -> None:
    """One message in a transaction of its own."""
    producer.begin_transaction()
    producer.send(topic, value, **options)
    prepare_and_commit(producer)
