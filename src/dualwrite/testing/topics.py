"""Read the committed messages of a topic, once no transaction is open on it any more: all, or those since a test began."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import (
    OFFSET_BEGINNING,
    TIMESTAMP_NOT_AVAILABLE,
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec

from dualwrite.errors import BrokerUnavailableError, UnknownTopicError
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.librdkafka.librdkafka_errors import LEADER_MOVED
from dualwrite.kafka.topic import Topic
from dualwrite.state import TransactionStatus
from dualwrite.testing import TIMEOUT
from dualwrite.testing.sent import SentMessage

_POLL: Final = 0.02
_BATCH: Final = 1000
_WAIT: Final = 0.1
_UNAVAILABLE: Final = LEADER_MOVED | {
    KafkaError._TIMED_OUT,  # noqa: SLF001  (librdkafka's own codes, public): a broker is down, or does not answer yet
    KafkaError._TRANSPORT,  # noqa: SLF001
    KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError._NOENT,  # noqa: SLF001  no partition has a leader
    KafkaError.LEADER_NOT_AVAILABLE,
}
"""No answer; or the answer while a partition changes its leader, or of a broker that has just restarted."""
_LATEST: Final[OffsetSpec] = OffsetSpec.latest()  # type: ignore[no-untyped-call]  # confluent-kafka leaves it untyped


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


class OpenTransactionsError(BrokerUnavailableError):
    """A transaction on the topic stays open: consumers can't read past it. Attributes: `partitions`."""


def read_committed(
    kafka: str | Mapping[str, Any] | KafkaConfig,
    topic: str,
    *,
    since: Mapping[int, int] | None = None,
    timeout: float = 30.0,
) -> list[CommittedMessage]:
    """Every committed message of a topic, in order of partition and offset.

    Waits until the last stable offset has reached the end of every partition, so that a missing message is really missing, and
    not just hidden behind an open transaction.

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
    settings = _settings(kafka)
    ends = _stable_ends(settings, topic, timeout)
    starts = {number: (since or {}).get(number, 0) for number in ends}
    consumer = Consumer(
        {
            **settings,
            "group.id": "dualwrite-read-committed",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,  # the end of a partition is reported by an empty fetch
            "reconnect.backoff.ms": 10,
        }
    )
    try:
        with _unavailability(f"Topic {topic!r}"):
            consumer.list_topics(topic, timeout=timeout)  # assign() alone waits 500 ms before it asks for the leaders
        return sorted(_read(consumer, topic, starts, ends, timeout), key=lambda m: (m.partition, m.offset))
    finally:
        consumer.close()


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
        self._since: dict[str, dict[int, int]] = {}
        admin = AdminClient(_settings(kafka))
        with _unavailability("Kafka's topics"):
            topics = admin.list_topics(timeout=timeout).topics
            partitions = [TopicPartition(name, number) for name, found in topics.items() for number in found.partitions]
            for (topic, number), end in _latest(admin, partitions, IsolationLevel.READ_UNCOMMITTED, timeout).items():
                self._since.setdefault(topic, {})[number] = end

    def __call__(self, topic: str | Topic[Any, Any], *, timeout: float | None = None) -> list[CommittedMessage]:
        """The messages of a topic, in order of partition and offset; none if there is no such topic.

        Waits until no transaction is open on the topic, so that a message that is missing is really missing.

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
            DualWriteError: As for a call.
        """
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        while True:
            found = self(topic)
            if len(found) == count:
                return found
            if len(found) > count or time.monotonic() > deadline:
                what = "\n".join(f"  {message}" for message in found)
                raise AssertionError(f"{len(found)} messages instead of {count} in {topic!r}:\n{what}")
            time.sleep(_POLL)


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


def _settings(kafka: str | Mapping[str, Any] | KafkaConfig) -> dict[str, Any]:
    config = KafkaConfig.of(kafka)
    return {**config.properties, "bootstrap.servers": config.servers, "log_level": 4}  # no notices about cleanup


def _stable_ends(settings: dict[str, Any], topic: str, timeout: float) -> dict[int, int]:
    admin = AdminClient(settings)
    with _unavailability(f"Topic {topic!r}"):
        found = admin.list_topics(topic, timeout=timeout).topics[topic]
    if found.error is not None:
        raise UnknownTopicError(f"Topic {topic!r} can't be read: {found.error.str()}.")
    partitions = [TopicPartition(topic, number) for number in found.partitions]
    deadline = time.monotonic() + timeout
    while True:
        try:
            with _unavailability(f"Topic {topic!r}"):
                ends, stable = (
                    {number: end for (_, number), end in _latest(admin, partitions, level, timeout).items()}
                    for level in (IsolationLevel.READ_UNCOMMITTED, IsolationLevel.READ_COMMITTED)
                )
        except BrokerUnavailableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL)
            admin = AdminClient(settings)  # librdkafka's keeps the leader epoch that it knows
            continue
        if ends == stable:
            return ends
        if time.monotonic() > deadline:
            waiting = sorted(p for p in ends if ends[p] != stable[p])
            raise OpenTransactionsError(
                f"Transactions stay open on topic {topic!r}, partitions {waiting}.",
                next_step="recover them: `dualwrite recover`",
                partitions=waiting,
            )
        time.sleep(_POLL)


@contextmanager
def _unavailability(what: str) -> Iterator[None]:
    """Raises `BrokerUnavailableError` for librdkafka's errors when a broker or a leader is unavailable."""
    try:
        yield
    except KafkaException as error:
        if error.args[0].code() not in _UNAVAILABLE:
            raise
        raise BrokerUnavailableError(
            f"{what} can't be read: {error.args[0].str()}.",
            next_step="wait until every partition has a leader: kafka-topics.sh --describe --unavailable-partitions",
        ) from error


def _latest(
    admin: AdminClient, partitions: list[TopicPartition], level: IsolationLevel, timeout: float
) -> dict[tuple[str, int], int]:
    """The end of each partition, as consumers of this isolation level see it."""
    answers = admin.list_offsets(dict.fromkeys(partitions, _LATEST), isolation_level=level, request_timeout=timeout)
    return {(partition.topic, partition.partition): answer.result().offset for partition, answer in answers.items()}


def _read(
    consumer: Consumer, topic: str, starts: Mapping[int, int], ends: Mapping[int, int], timeout: float
) -> list[CommittedMessage]:
    waiting = {number for number, end in ends.items() if end > starts[number]}
    consumer.assign([TopicPartition(topic, number, starts[number] or OFFSET_BEGINNING) for number in waiting])
    messages = []
    deadline = time.monotonic() + timeout
    while waiting:
        for message in _next(consumer):
            error = message.error()
            if error is not None:
                if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001  (librdkafka's own code, public)
                    waiting.discard(message.partition())
                continue
            messages.append(_committed(message))
            deadline = time.monotonic() + timeout
        if time.monotonic() > deadline:
            raise BrokerUnavailableError(f"Topic {topic!r} was not read to its end; remaining partitions: {sorted(waiting)}.")
    return messages


def _next(consumer: Consumer) -> list[Any]:
    """The messages that are available, or the first that comes soon: `consume` alone waits for a whole batch or its timeout."""
    first = consumer.poll(_WAIT)
    return [] if first is None else [first, *consumer.consume(_BATCH, 0)]


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
