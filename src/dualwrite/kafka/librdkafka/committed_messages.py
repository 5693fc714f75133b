"""Read the committed messages of a topic, up to its end at the beginning of the call."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec

from dualwrite.deadline import Deadline
from dualwrite.errors import BrokerUnavailableError, UnknownTopicError
from dualwrite.kafka.client.brokers import check_not_refused
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.librdkafka.client_settings import client_settings
from dualwrite.kafka.librdkafka.librdkafka_errors import LEADER_MOVED, NO_ANSWER, consumer_recovers, consuming_error, text_of

_POLL: Final = 0.02
_BATCH: Final = 1000
_WAIT: Final = 0.1
_ATTEMPT: Final = 5.0
"""The maximum seconds of one attempt to learn where a topic ends."""

_UNAVAILABLE: Final = LEADER_MOVED | NO_ANSWER | {KafkaError._NOENT}  # noqa: SLF001  no partition has a leader
"""No answer; or the answer while a partition changes its leader, or of a broker that has just restarted."""
_LATEST: Final[OffsetSpec] = OffsetSpec.latest()  # type: ignore[no-untyped-call]  # confluent-kafka leaves it untyped


class OpenTransactionsError(BrokerUnavailableError):
    """A transaction on the topic stays open: consumers can't read past it. Attributes: `partitions`."""


def committed_messages(
    kafka: str | Mapping[str, Any] | KafkaConfig,
    topic: str,
    *,
    since: Mapping[int, int] | None = None,
    is_settled: bool = True,
    timeout: float,
) -> list[Message]:
    """Every committed message that a topic has when this is called, in order of partition and offset.

    Waits until the last stable offset has reached the end that each partition had at first, so that a missing message is really
    missing, and not just hidden behind an open transaction.

    Args:
        kafka: Settings in librdkafka's names, or `host:port`.
        topic: The topic.
        since: The first offset to read in each partition; where there is none, the beginning.
        is_settled: False: do not wait for open transactions, and return what consumers see now.
        timeout: Seconds to wait for open transactions to end, and then for the messages.

    Raises:
        OpenTransactionsError: A transaction on the topic stays open.
        UnknownTopicError: There is no such topic.
        BrokerAuthorizationError: The brokers refuse this client, or it may not read the topic.
        BrokerUnavailableError: No broker answers, a partition has no leader, or the messages could not all be read within the
            timeout.
    """
    settings = _settings(kafka, timeout)
    ends = _ends(settings, topic, is_settled=is_settled, timeout=timeout)
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
        with _unavailability(f"topic {topic!r}"):
            consumer.list_topics(topic, timeout=timeout)  # assign() alone waits 500 ms before it asks for the leaders
        return sorted(_read(consumer, topic, starts, ends, timeout), key=lambda m: (m.partition(), m.offset()))
    finally:
        consumer.close()


def ends_of_topics(kafka: str | Mapping[str, Any] | KafkaConfig, *, timeout: float) -> dict[str, dict[int, int]]:
    """The end of each partition of every topic, open transactions included.

    Raises:
        BrokerAuthorizationError: The brokers refuse this client.
        BrokerUnavailableError: No broker answers within the timeout.
    """
    admin, ends = AdminClient(_settings(kafka, timeout)), dict[str, dict[int, int]]()
    with _unavailability("Kafka's topics"):
        topics = admin.list_topics(timeout=timeout).topics
        partitions = [TopicPartition(name, number) for name, found in topics.items() for number in found.partitions]
        for (topic, number), end in _latest(admin, partitions, IsolationLevel.READ_UNCOMMITTED, timeout).items():
            ends.setdefault(topic, {})[number] = end
    return ends


def _settings(kafka: str | Mapping[str, Any] | KafkaConfig, timeout: float) -> dict[str, Any]:
    config = KafkaConfig.of(kafka)
    check_not_refused(config, timeout)
    # quiet: errors are raised, and without a broker there would be hundreds of lines
    return client_settings({**config.properties, "bootstrap.servers": config.servers, "log_level": 2})


def _ends(settings: dict[str, Any], topic: str, *, is_settled: bool, timeout: float) -> dict[int, int]:
    """The end of each partition, once what is before it is decided; or where the first open transaction begins."""
    deadline = Deadline(timeout)
    wanted: dict[int, int] = {}
    admin = AdminClient(settings)
    partitions: list[TopicPartition] | None = None
    while True:
        try:
            with _unavailability(f"topic {topic!r}"):
                limit = max(deadline.within(_ATTEMPT).left, _WAIT)
                partitions = _partitions(admin, topic, limit) if partitions is None else partitions
                ends, stable = (
                    {number: end for (_, number), end in _latest(admin, partitions, level, limit).items()}
                    for level in (IsolationLevel.READ_UNCOMMITTED, IsolationLevel.READ_COMMITTED)
                )
        except BrokerUnavailableError:
            if deadline.expired:
                raise
            time.sleep(_POLL)
            admin = AdminClient(settings)  # librdkafka's keeps the leader epoch, and the missing controller, that it knows
            continue
        if not is_settled:
            return stable
        wanted = {number: min(end, wanted.get(number, end)) for number, end in ends.items()}  # lower after a lost leader
        waiting = sorted(number for number, end in wanted.items() if stable[number] < end)
        if not waiting:
            return wanted
        if deadline.expired:
            raise OpenTransactionsError(
                f"Transactions stay open on topic {topic!r}, partitions {waiting}.",
                next_step="recover them: `dualwrite recover`",
                partitions=waiting,
            )
        time.sleep(_POLL)


def _partitions(admin: AdminClient, topic: str, timeout: float) -> list[TopicPartition]:
    """The topic's partitions. Not by list_topics(), which creates the topic where brokers do so automatically."""
    found = admin.describe_topics(TopicCollection([topic]), request_timeout=timeout)[topic].result()
    return [TopicPartition(topic, each.id) for each in found.partitions]


@contextmanager
def _unavailability(what: str) -> Iterator[None]:
    """Raises `BrokerUnavailableError` for librdkafka's errors when a broker or a leader is unavailable, or its error."""
    try:
        yield
    except KafkaException as error:
        if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise UnknownTopicError(
                f"{what[0].upper()}{what[1:]} can't be read: {error.args[0].str()}.", next_step="check its name"
            ) from error
        if error.args[0].code() not in _UNAVAILABLE:
            raise consuming_error(error.args[0], f" of {what}") from error
        raise BrokerUnavailableError(
            f"{what[0].upper()}{what[1:]} can't be read: {text_of(error.args[0])}.",
            next_step="check that the brokers are running and that bootstrap.servers is correct; wait until each partition has "
            "a leader: kafka-topics.sh --describe --unavailable-partitions",
        ) from error


def _latest(
    admin: AdminClient, partitions: list[TopicPartition], level: IsolationLevel, timeout: float
) -> dict[tuple[str, int], int]:
    """The end of each partition, as consumers of this isolation level see it."""
    answers = admin.list_offsets(dict.fromkeys(partitions, _LATEST), isolation_level=level, request_timeout=timeout)
    return {(partition.topic, partition.partition): answer.result().offset for partition, answer in answers.items()}


def _read(consumer: Consumer, topic: str, starts: Mapping[int, int], ends: Mapping[int, int], timeout: float) -> list[Message]:
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
                elif message.topic() is not None and not consumer_recovers(error):  # others are about the group: there is none
                    raise consuming_error(error, f" of {topic}-{message.partition()}")
                continue
            deadline = time.monotonic() + timeout
            after = message.offset() + 1 - ends[message.partition()]
            if after >= 0:  # it is the last one, or was sent since
                waiting.discard(message.partition())
            if after <= 0:
                messages.append(message)
        if time.monotonic() > deadline:
            raise BrokerUnavailableError(f"Topic {topic!r} was not read to its end; remaining partitions: {sorted(waiting)}.")
    return messages


def _next(consumer: Consumer) -> list[Any]:
    """The messages that are available, or the first that comes soon: `consume` alone waits for a whole batch or its timeout."""
    first = consumer.poll(_WAIT)
    return [] if first is None else [first, *consumer.consume(_BATCH, 0)]
