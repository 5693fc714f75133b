"""Read the committed messages of a topic, once what was sent to it is decided: all, or those since a test began."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE

from dualwrite.deadline import check_may_block
from dualwrite.errors import UnknownTopicError
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.librdkafka.committed_messages import OpenTransactionsError, committed_messages, ends_of_topics
from dualwrite.kafka.topic import Topic
from dualwrite.state import TransactionStatus
from dualwrite.testing import TIMEOUT
from dualwrite.testing.sent import SentMessage

__all__ = ["CommittedMessage", "OpenTransactionsError", "SentMessages", "abort_open_transactions", "read_committed"]

_POLL: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedMessage(SentMessage):
    """One message that a `read_committed` consumer gets: a SentMessage with its place in the topic.

    Args:
        partition: The partition.
        offset: The offset in the partition.
        timestamp: Milliseconds since 1970; None if the message has none.
    """

    partition: int
    offset: int


def read_committed(
    kafka: str | Mapping[str, Any] | KafkaConfig,
    topic: str,
    *,
    since: Mapping[int, int] | None = None,
    timeout: float = 30.0,
) -> list[CommittedMessage]:
    """Every committed message that a topic has when this is called, in order of partition and offset.

    Waits until the last stable offset has reached the end that each partition had at first, so that a missing message is really
    missing, and not just hidden behind an open transaction.

    Args:
        kafka: Settings in librdkafka's names, or `host:port`.
        topic: The topic.
        since: The first offset to read in each partition; where there is none, the beginning.
        timeout: Seconds to wait for open transactions to end, and then for the messages.

    Raises:
        OpenTransactionsError: A transaction on the topic stays open.
        UnknownTopicError: There is no such topic.
        BrokerUnavailableError: No broker answers, a partition has no leader, or the messages could not all be read within the
            timeout.
    """
    return [_committed(message) for message in committed_messages(kafka, topic, since=since, timeout=timeout)]


class SentMessages:
    """The committed messages of topics since this object was made: the fixture `sent` of a test.

    Messages of transactions that were open then, and have been committed since, do not count.

    Args:
        kafka: Settings in librdkafka's names, or `host:port`.
        timeout: Seconds to wait for an answer of the brokers.

    Raises:
        BrokerUnavailableError: No broker answers.
    """

    def __init__(self, kafka: str | Mapping[str, Any] | KafkaConfig, *, timeout: float = TIMEOUT) -> None:
        self._kafka = kafka
        self._timeout = timeout
        self._since = ends_of_topics(kafka, timeout=timeout)

    def __call__(self, topic: str | Topic[Any, Any], *, timeout: float | None = None) -> list[CommittedMessage]:
        """The messages of a topic, in order of partition and offset; none if there is no such topic.

        Waits until the transactions on the topic have ended, so that a message that is missing is really missing.

        Args:
            topic: The topic's name, or a Topic.
            timeout: Seconds to wait for open transactions; by default that of the class.

        Raises: as for `read_committed`, without UnknownTopicError.
        """
        name = topic.name if isinstance(topic, Topic) else topic
        limit = self._timeout if timeout is None else timeout
        try:
            return read_committed(self._kafka, name, since=self._since.get(name), timeout=limit)
        except UnknownTopicError:
            return []

    def wait_for(self, topic: str | Topic[Any, Any], count: int, *, timeout: float | None = None) -> list[CommittedMessage]:
        """Wait until a topic has so many messages: for what another thread or process sends.

        Args:
            topic: The topic's name, or a Topic.
            count: The number of messages; one more fails at once.
            timeout: Seconds to wait; by default that of the class.

        Raises:
            AssertionError: There are more messages, or too few when the time is over.
            UsageError: It was called in a coroutine, whose loop would wait and send nothing.
            DualWriteError: As for a call.
        """
        check_may_block("sent.wait_for()", f"a thread: `await asyncio.to_thread(sent.wait_for, {str(topic)!r}, {count})`")
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        while True:
            found = self(topic)
            if len(found) == count:
                return found
            if len(found) > count or time.monotonic() > deadline:
                what = "\n".join(f"  {message}" for message in found)
                raise AssertionError(f"{len(found)} messages instead of {count} in {topic!r}:\n{what}")
            time.sleep(_POLL)


@contextmanager
def alone_on(kafka: str | Mapping[str, Any] | KafkaConfig) -> Iterator[None]:
    """Keep brokers for this process during the block: it waits until no other one of this user on this machine has them so.

    Args:
        kafka: Settings in librdkafka's names, or `host:port`: another name of the same broker is another broker here.
    """
    servers = hashlib.sha256(KafkaConfig.of(kafka).servers.encode()).hexdigest()[:16]
    with Path(tempfile.gettempdir(), f"dualwrite-test-{os.getuid()}-{servers}.lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a forked process may still have the file open


def abort_open_transactions(kafka: str | Mapping[str, Any] | KafkaConfig, *, timeout: float = TIMEOUT) -> None:
    """Abort every transaction that is open on a cluster for tests, where nobody is left to recover them.

    Args:
        kafka: Settings in librdkafka's names, or `host:port`.
        timeout: Seconds to wait for an answer of the brokers.

    Raises:
        BrokerUnavailableError: No broker answers.
    """
    with closing(WireTransactionCoordinator(KafkaConfig.of(kafka), timeout=timeout)) as coordinator:
        for listed in coordinator.list_transactions():
            if listed.status is not TransactionStatus.ONGOING:
                continue
            found = coordinator.describe(listed.kafka_transactional_id)
            if found is not None and found.status is TransactionStatus.ONGOING:
                coordinator.end_transaction(
                    listed.kafka_transactional_id, producer_id=found.producer_id, epoch=found.epoch, commit=False
                )


def _committed(message: Any) -> CommittedMessage:
    kind, time_of = message.timestamp()
    return CommittedMessage(
        topic=message.topic(),
        value=message.value(),
        key=message.key(),
        headers=tuple(message.headers() or ()),
        partition=message.partition(),
        timestamp=None if kind == TIMESTAMP_NOT_AVAILABLE else time_of,
        offset=message.offset(),
    )
