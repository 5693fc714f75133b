"""Messages and offsets by partition: those that a consumer has read, its group's, the first and last ones at the brokers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any, ClassVar, Final, Self

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.cimpl import Consumer  # the package's one may be auto-instrumented

from dualwrite.errors import BrokerError, BrokerUnavailableError
from dualwrite.kafka.librdkafka.client_settings import client_settings
from dualwrite.kafka.librdkafka.librdkafka_errors import broker_error, text_of
from dualwrite.kafka.librdkafka.topic_admin import admin_client
from dualwrite.observability.logs import SubjectLogger

log = SubjectLogger(__name__)

Partition = tuple[str, int]
"""A topic, and one of its partitions."""

_EARLIEST: Final = -2
"""ListOffsets' timestamp for the first offset."""

_LATEST: Final = -1
"""ListOffsets' timestamp for the end: the last stable offset, for a consumer that reads committed messages."""

_WITHOUT_LEADER: Final = frozenset({"_UNKNOWN_PARTITION", "_UNKNOWN_TOPIC", "UNKNOWN_TOPIC_OR_PART"})
_REBALANCING: Final = frozenset({"REBALANCE_IN_PROGRESS", "STALE_MEMBER_EPOCH"})
_INTERVAL: Final = 1.0


@dataclass(frozen=True)
class Batch:
    """Messages of partitions that were assigned when they were read, in order, with the terms of the assignments.

    A pass over the messages is made at most once for a batch, and only if something changes: with small messages these passes
    are a noticeable part of the work.
    """

    messages: tuple[Any, ...]
    terms: Mapping[Partition, object]

    def only(self, keys: Collection[Partition]) -> Batch:
        """The messages of these partitions."""
        if self.terms.keys() <= set(keys):
            return self
        kept = {key: term for key, term in self.terms.items() if key in keys}
        return Batch(tuple(one for one in self.messages if partition_of(one) in kept), kept)

    def still_owned(self, owned: Mapping[Partition, object]) -> Batch:
        """The batch without partitions that have been revoked since; those assigned again are also read again."""
        return self.only({key for key, term in self.terms.items() if owned.get(key) is term})

    def from_offsets(self, begin: Mapping[Partition, int]) -> Batch:
        """The batch without messages before these offsets."""
        if all(first >= begin.get(key, 0) for key, (first, _) in self._ranges.items()):
            return self
        kept = tuple(one for one in self.messages if one.offset() >= begin.get(partition_of(one), 0))
        return Batch(kept, self.terms)

    def one_by_one(self) -> Iterator[Batch]:
        """A batch for each message."""
        for message in self.messages:
            key = partition_of(message)
            yield Batch((message,), {key: self.terms[key]})

    @cached_property
    def after(self) -> Mapping[Partition, int]:
        """The next offset of each partition that has messages here."""
        return {key: after for key, (_, after) in self._ranges.items()}

    @cached_property
    def _ranges(self) -> Mapping[Partition, tuple[int, int]]:
        """The first offset of each partition, and the one after its last message."""
        first: dict[Partition, int] = {}
        after: dict[Partition, int] = {}
        for message in self.messages:
            key, offset = partition_of(message), message.offset()
            first.setdefault(key, offset)
            after[key] = offset + 1
        return {key: (first[key], after[key]) for key in first}


def partition_of(message: Any) -> Partition:
    """The partition of a message."""
    return message.topic(), message.partition()


def fields_of(message: Any) -> dict[str, Any]:
    """The place of a message, for errors and log records."""
    return {"topic": message.topic(), "partition": message.partition(), "offset": message.offset()}


def name_of(message: Any) -> str:
    """Readable text: `orders-0 at 17`."""
    return f"{message.topic()}-{message.partition()} at {message.offset()}"


def _result(
    call: Callable[[], list[TopicPartition] | None], error_of: Callable[[KafkaError], BrokerError]
) -> list[TopicPartition]:
    """What a request about partitions returned, or the first of its errors."""
    try:
        found = call() or []
    except KafkaException as error:
        raise error_of(error.args[0]) from error
    refused = next((one.error for one in found if one.error is not None), None)
    if refused is not None:
        raise error_of(refused)
    return found


class BrokerOffsets:
    """Reads offsets through a member of a group, and commits those of the group."""

    _SETTING: ClassVar = "committing offsets"

    def __init__(self, consumer: Consumer, group_id: str) -> None:
        self._consumer = consumer
        self._group = group_id

    def committed(self, partitions: Iterable[Partition], timeout: float) -> dict[Partition, int]:
        """The group's committed offsets, for those partitions that have one.

        Raises:
            BrokerError: They can't be read: a transaction that commits offsets of the group is open, or no broker responds.
        """
        wanted = [TopicPartition(*key) for key in partitions]
        found = _result(lambda: self._consumer.committed(wanted, timeout), self._unreadable) if wanted else []
        return {(one.topic, one.partition): one.offset for one in found if one.offset >= 0}

    def commit(self, offsets: Mapping[Partition, int]) -> None:
        """Commit offsets of the group, and wait for the response; refused if this member's generation is over.

        Raises:
            BrokerError: They were not committed.
        """
        wanted = [TopicPartition(*key, offset) for key, offset in offsets.items()]
        if wanted:
            _result(lambda: self._consumer.commit(offsets=wanted, asynchronous=False), self._uncommitted)

    def first_offsets(self, partitions: Iterable[Partition], timeout: float) -> dict[Partition, int]:
        """The first offset that retention has left in each partition: one request to each leader, or a BrokerError."""
        return self._listed(partitions, _EARLIEST, "first", timeout)

    def end_offsets(self, partitions: Iterable[Partition], timeout: float) -> dict[Partition, int]:
        """The end of each partition, before the first open transaction; see `first_offsets`."""
        return self._listed(partitions, _LATEST, "last stable", timeout)

    def _listed(self, partitions: Iterable[Partition], timestamp: int, name: str, timeout: float) -> dict[Partition, int]:
        wanted = [TopicPartition(*key, timestamp) for key in partitions]
        try:
            found = self._consumer.offsets_for_times(wanted, timeout) if wanted else ()
        except KafkaException as error:
            raise _unlisted(error.args[0], f"reading the {name} offsets of partitions") from error
        for one in found:
            if one.error is not None:
                raise _unlisted(one.error, f"reading the {name} offset of {one.topic}-{one.partition}")
        return {(one.topic, one.partition): one.offset for one in found}

    def _unreadable(self, error: KafkaError) -> BrokerError:
        found = broker_error(error, None, f"reading the offsets of group {self._group!r}")
        if isinstance(found, BrokerUnavailableError):
            found.cause = "no broker responds, or a process that has died left a transaction with the group's offsets open"
            found.next_step = (
                f"check that the brokers are running; `dualwrite stuck --group {self._group}` shows such a transaction, and "
                "`dualwrite recover` ends it"
            )
        return found

    def _uncommitted(self, error: KafkaError) -> BrokerError:
        doing = f"{self._SETTING} of group {self._group!r}"
        if error.name() in _REBALANCING:
            return BrokerUnavailableError(f"Kafka error during {doing}: {text_of(error)}.", next_step="retry")
        return broker_error(error, None, doing)


def _unlisted(error: KafkaError, doing: str) -> BrokerError:
    """The error of a lookup of offsets; librdkafka calls partitions without a leader unknown, if all that it looks up are."""
    if error.name() not in _WITHOUT_LEADER:
        return broker_error(error, None, doing)
    return BrokerUnavailableError(
        f"Kafka error during {doing}: {text_of(error)}.",
        cause="the partitions have no leader, or the brokers don't know them yet",
        next_step="retry; check that every broker is running",
    )


class IdleGroup(BrokerOffsets):
    """A group without members; `timeout` seconds for each request. Must be closed, by `with` or `close()`.

    Its coordinator refuses to set offsets while the group has a member.

    Raises:
        BrokerAuthorizationError: The brokers refuse this client.
    """

    _SETTING = "setting the offsets"

    def __init__(self, settings: Mapping[str, Any], group_id: str, timeout: float) -> None:
        self._timeout = timeout
        self._admin = admin_client(settings, timeout)
        made = client_settings({**settings, "group.id": group_id, "enable.auto.commit": False}, group_id=group_id)
        super().__init__(Consumer(made), group_id)

    def members(self) -> int:
        """How many members the group has.

        Raises:
            BrokerError: Its coordinator does not respond.
        """
        described = self._admin.describe_consumer_groups([self._group], request_timeout=self._timeout)[self._group]
        try:
            return len(described.result(self._timeout).members or ())
        except KafkaException as error:
            raise broker_error(error, None, f"describing the group {self._group!r}") from error

    def close(self) -> None:
        """Close the connections, and pass on what librdkafka has logged."""
        self._admin.poll(0)
        self._consumer.poll(0)
        self._consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class MonitorOffsets:
    """The offsets of a group whose positions are stored elsewhere, until a member commits them to Kafka."""

    def __init__(self, consumer: Consumer, group_id: str) -> None:
        self._consumer = consumer
        self._group = group_id
        self._pending: dict[Partition, int] = {}
        self._committed_at = 0.0

    def add(self, offsets: Mapping[Partition, int]) -> None:
        """Add offsets to be committed; they replace earlier ones of the same partitions."""
        self._pending |= offsets

    def commit_due(self) -> None:
        """Commit what is pending if the last commit was at least a second ago."""
        if time.monotonic() - self._committed_at >= _INTERVAL:
            self.commit()

    def commit(self, keys: Collection[Partition] | None = None) -> None:
        """Commit what is pending, of these or all partitions, without waiting for the response; an error is only logged."""
        chosen = {key: offset for key, offset in self._pending.items() if keys is None or key in keys}
        if not chosen:
            return
        offsets = [TopicPartition(*key, offset) for key, offset in chosen.items()]
        self._pending = {key: offset for key, offset in self._pending.items() if key not in chosen}
        self._committed_at = time.monotonic()
        try:
            self._consumer.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            log.debug("offsets were not committed for monitors: %s", error, group_id=self._group)
