"""The scene of the producer conformance suite: what it needs from a broker and from the producer under test."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self
from uuid import uuid4

from dualwrite.errors import BrokerError
from dualwrite.kafka.base import TransactionalProducer, TransactionCoordinator
from dualwrite.state import PreparedTxnState, TransactionDescription, TransactionStatus
from dualwrite.testing import TIMEOUT

_PAUSE: Final = 0.005
_MORE_THAN_HALF_A_BATCH: Final = bytes(600_000)


@dataclass(frozen=True, slots=True)
class ProducerCapabilities:
    """What a producer can do beyond the Protocol.

    Args:
        two_phase: Its transactions never time out (KIP-939).
        epoch_per_transaction: Each transaction has its own epoch, so `producerId:epoch` identifies it (KIP-890).
        checks_calls: A call in the wrong state raises InvalidTransitionError and changes nothing.
        splits_batches: A batch that is too large for the topic is split, as long as each message is small enough.
    """

    two_phase: bool = False
    epoch_per_transaction: bool = False
    checks_calls: bool = False
    splits_batches: bool = False


@dataclass(frozen=True, slots=True)
class SeenMessage:
    """One message as a `read_committed` consumer sees it.

    Args:
        partition: The partition.
        key: The key.
        value: The value.
        headers: The headers, in order; empty if there are none.
        timestamp_ms: The producer's timestamp, in milliseconds since 1970.
    """

    partition: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]
    timestamp_ms: int


class ProducerScene(ABC):
    """A broker and producers on it; as a context manager, it closes the producers.

    Args:
        capabilities: What the producer can do.
        coordinator: A client for the broker's transaction coordinator.
    """

    def __init__(self, capabilities: ProducerCapabilities, coordinator: TransactionCoordinator) -> None:
        self.capabilities = capabilities
        self.coordinator = coordinator
        self._opened = ExitStack()

    # --- required ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def make(self, kafka_transactional_id: str, settings: Mapping[str, Any]) -> TransactionalProducer:
        """Create a producer, not initialised, with these Kafka settings in addition to the usual ones."""

    @abstractmethod
    def make_topic(self, topic: str, partitions: int = 1, **settings: str) -> None:
        """Create a topic; topic settings are written with `_` instead of `.`: `max_message_bytes="2000"`."""

    @abstractmethod
    def read(self, topic: str) -> list[SeenMessage]:
        """What a `read_committed` consumer sees of a topic now, by partition and offset; ignores open transactions."""

    @abstractmethod
    def committed_offset(self, group: str, topic: str, partition: int) -> int | None:
        """The offset that a consumer group has committed, or None; does not wait for open transactions."""

    # --- used by the tests ------------------------------------------------------------------------------------------------

    def new_name(self, kind: str) -> str:
        """A unique name."""
        return f"{kind}-{uuid4().hex[:12]}"

    def new_producer(self, kafka_transactional_id: str | None = None, **settings: Any) -> TransactionalProducer:
        """Create and initialise a producer; Kafka settings are written with `_` instead of `.`."""
        given = {name.replace("_", "."): value for name, value in settings.items()}
        producer = self.make(kafka_transactional_id or self.new_name("id"), given)
        self._opened.callback(producer.close)
        producer.init_transactions(timeout=TIMEOUT)
        return producer

    def values(self, topic: str) -> list[bytes | None]:
        """The values of the visible messages of a topic."""
        return [message.value for message in self.read(topic)]

    def describe(
        self, producer: TransactionalProducer, until: Callable[[TransactionDescription], bool] = lambda _: True
    ) -> TransactionDescription:
        """The coordinator's description of the producer's id, repeated until the condition holds."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            found = self.coordinator.describe(producer.kafka_transactional_id)
            if found is not None and until(found):
                return found
            assert time.monotonic() < deadline, f"{producer.kafka_transactional_id} stays {found}"
            time.sleep(_PAUSE)

    def send_until_ongoing(self, producer: TransactionalProducer, topic: str) -> None:
        """Send until the coordinator knows the transaction.

        A producer without its own thread retries a batch that a new topic's leader refused only when it sends the next one.
        """
        deadline = time.monotonic() + TIMEOUT
        while True:
            producer.send(topic, _MORE_THAN_HALF_A_BATCH)
            found = self.coordinator.describe(producer.kafka_transactional_id)
            if found is not None and found.status is TransactionStatus.ONGOING:
                return
            assert time.monotonic() < deadline, f"{producer.kafka_transactional_id} stays {found}"
            time.sleep(_PAUSE)

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
            producer.abort_transaction(timeout=TIMEOUT)
        except BrokerError:
            assert producer.must_be_replaced, "abort failed, but the producer does not ask to be replaced"
        if not producer.must_be_replaced:
            return producer
        producer.close()
        return self.new_producer(producer.kafka_transactional_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._opened.close()


def prepare_and_commit(producer: TransactionalProducer) -> PreparedTxnState | None:
    """Prepare and commit; returns the prepared state."""
    state = producer.prepare_transaction(timeout=TIMEOUT)
    producer.commit_transaction(timeout=TIMEOUT)
    return state
