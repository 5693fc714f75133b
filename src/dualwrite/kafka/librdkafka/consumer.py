"""A member of a consumer group whose positions come from somewhere else than Kafka, over confluent-kafka.

The rebalance callbacks run inside `poll` and `wait`, never beside the caller's work: whoever is between two calls of them owns
what `owned` says, as far as a member can know.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from dualwrite.errors import BrokerError, BrokerUnavailableError, ConfigurationError
from dualwrite.kafka.librdkafka.batch import Batch, Partition, partition_of
from dualwrite.kafka.librdkafka.errors import broker_error

log = logging.getLogger(__name__)

Begin = Callable[[list[Partition]], Mapping[Partition, int]]

BEGINNING: Final = OFFSET_BEGINNING
"""A place to begin: the first record that retention has left."""

_OURS: Final = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",  # a position that retention has passed must be noticed
    "isolation.level": "read_committed",  # what is aborted must not take effect
}
_UNSEEN: Final = {"enable.partition.eof": True}
"""Settings whose effect nobody but this class sees."""

_STEP: Final = 0.1
_SHOWN_AFTER: Final = 1.0
_EARLIEST: Final = -2
"""ListOffsets' timestamp for the first offset."""

_LATEST: Final = -1
"""ListOffsets' timestamp for the end: the last stable offset, for a consumer that reads committed messages."""

_TRANSIENT: Final = frozenset(
    {
        "_ALL_BROKERS_DOWN",
        "_TRANSPORT",
        "_RESOLVE",
        "_TIMED_OUT",
        "_MAX_POLL_EXCEEDED",  # it has left the group, and joins it again
        "COORDINATOR_LOAD_IN_PROGRESS",
        "COORDINATOR_NOT_AVAILABLE",
        "NOT_COORDINATOR",
        "UNKNOWN_TOPIC_OR_PART",
        "LEADER_NOT_AVAILABLE",
        "NOT_LEADER_FOR_PARTITION",
    }
)
"""librdkafka's names of errors after which it goes on by itself."""

_UNKNOWN_TOPIC: Final = "UNKNOWN_TOPIC_OR_PART"
_WARNED_AFTER: Final = 60.0
_REBALANCING: Final = frozenset({"REBALANCE_IN_PROGRESS", "STALE_MEMBER_EPOCH"})

_END_OF_PARTITION: Final = "_PARTITION_EOF"
_OUT_OF_RANGE: Final = "_AUTO_OFFSET_RESET"


class GroupConsumer:
    """Subscribes to topics, and begins each partition where `begin` says.

    Args:
        settings: For confluent-kafka's Consumer, with `group.id`. It reads committed messages only.
        topics: The topics.
        begin: Called with the partitions that were assigned; returns the offset to begin at, or BEGINNING, for each.

    Raises:
        ConfigurationError: A setting is missing, unknown, or one that must not be set.
    """

    def __init__(self, settings: Mapping[str, Any], topics: Iterable[str], begin: Begin) -> None:
        for name, value in _OURS.items():
            if name in settings and settings[name] != value:
                raise ConfigurationError(
                    f"The consumer's setting {name!r} can't be changed.",
                    cause="a processor begins where its positions are stored, and reads committed messages only",
                    next_step="leave it out; where a new group begins is an option of the processor",
                )
        if not settings.get("group.id"):
            raise ConfigurationError("The consumer has no group.id.", next_step="give the setting group.id")
        self.group_id = str(settings["group.id"])
        self._begin = begin
        self._incremental = _is_incremental(settings)
        self._terms: dict[Partition, object] = {}  # a new object for each time that a partition was assigned
        self._places: dict[Partition, int] = {}  # where the next message is taken
        self._ends: dict[Partition, int] = {}  # where a partition ended when it was read to its end
        self._refused: dict[Partition, int] = {}
        self._waiting = False
        self._unshown: dict[Partition, int] = {}
        self._shown_at = 0.0
        self._unknown: dict[str, float] = {}  # topics that the brokers don't know, with the time of the last warning
        try:
            self._consumer = Consumer({**settings, **_OURS, **_UNSEEN})
            self._consumer.subscribe(list(topics), on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked)
        except KafkaException as error:
            raise ConfigurationError(f"The consumer can't be created: {error.args[0].str()}.") from error

    @property
    def member(self) -> Consumer:
        """Who commits offsets in a transaction: for `Transaction.send_offsets`."""
        return self._consumer

    def owned(self) -> Mapping[Partition, object]:
        """The partitions that are assigned now, each with the term of this assignment: another one has another term."""
        return dict(self._terms)

    def poll(self, most: int, timeout: float) -> Batch:
        """The next messages: waits for the first one, and adds what has arrived.

        A rebalance may come between two of them. Messages of a partition that was given up since are left out, even if it came
        back: it was begun anew.

        Args:
            most: How many at most.
            timeout: Seconds to wait for the first.

        Raises:
            BrokerError: Kafka refuses to go on: an ACL is missing, a fatal error.
        """
        self._show_due()
        self._warn_of_unknown_topics()
        found: list[Message] = []
        terms: dict[Partition, object] = {}
        while len(found) < most:
            message = self._polled(0 if found else timeout)
            if message is None:
                break
            key = partition_of(message)
            term = self._terms.get(key)
            if term is None:
                continue
            if terms.setdefault(key, term) is not term:
                found = [one for one in found if partition_of(one) != key]
                terms[key] = term
            found.append(message)
        batch = Batch(found, terms).still_owned(self._terms)
        self._places |= batch.after()
        return batch

    @property
    def refused(self) -> dict[Partition, int]:
        """The places that were out of range in assigned partitions: nothing more comes of these before `seek`.

        Or it was one before an earlier `seek`, and was reported late.
        """
        return dict(self._refused)

    @property
    def passed(self) -> dict[Partition, tuple[int, int]]:
        """The partitions that were read to their end: behind the last message that was taken, and that end.

        What lies between, if anything, is no message for us: markers of transactions, and messages of aborted ones.
        """
        return {key: (self._places[key], end) for key, end in self._ends.items() if end > self._places[key]}

    def wait(self, seconds: float, stopped: Callable[[], bool]) -> None:
        """Let time pass without messages, and without losing the assignment (`max.poll.interval.ms`).

        Args:
            seconds: How long.
            stopped: Whether to end the wait.
        """
        self._show_due()
        deadline = time.monotonic() + seconds
        self._waiting = True
        self._consumer.pause(_partitions(self._terms))
        try:
            while True:
                message = self._polled(min(_STEP, max(deadline - time.monotonic(), 0)))
                if message is not None and partition_of(message) in self._terms:  # it had been fetched before the pause
                    self._ends.pop(partition_of(message), None)
                    self._seek([partition_of(message)])
                if time.monotonic() >= deadline or stopped():
                    return
        finally:
            self._waiting = False
            self._consumer.resume(_partitions(self._terms))

    def seek(self, places: Mapping[Partition, int]) -> None:
        """Go on at other offsets, for those partitions that are still assigned; each has a new term from then on."""
        ours = {key: place for key, place in places.items() if key in self._terms}
        self._began(ours)  # what has come before does not continue there
        self._seek(ours)

    def show_progress(self, places: Mapping[Partition, int]) -> None:
        """Commit the offsets to Kafka, for monitors only: about once a second, and at the end. An error changes nothing."""
        self._unshown |= places
        self._show_due()

    def committed(self, partitions: Iterable[Partition], timeout: float) -> dict[Partition, int]:
        """The group's committed offsets at Kafka, for those partitions that have one.

        Raises:
            BrokerError: They can't be read: a transaction that commits offsets of the group is open, or no broker answers.
        """
        try:
            found = self._consumer.committed([TopicPartition(*key) for key in partitions], timeout)
        except KafkaException as error:
            raise self._unreadable(error) from error
        refused = next((one.error for one in found if one.error is not None), None)
        if refused is not None:
            raise self._unreadable(refused)
        return {(one.topic, one.partition): one.offset for one in found if one.offset >= 0}

    def first_offsets(self, partitions: Iterable[Partition], timeout: float) -> dict[Partition, int]:
        """The first offset that retention has left in each partition; one request to each leader.

        Raises:
            BrokerError: A partition's leader can't be asked.
        """
        return self._edges(partitions, _EARLIEST, "first", timeout)

    def end_offsets(self, partitions: Iterable[Partition], timeout: float) -> dict[Partition, int]:
        """The end of each partition, before the first open transaction; one request to each leader.

        Raises:
            BrokerError: A partition's leader can't be asked.
        """
        return self._edges(partitions, _LATEST, "last stable", timeout)

    def partitions_of(self, topic: str, timeout: float) -> list[Partition]:
        """The partitions of a topic.

        Raises:
            BrokerError: No broker answers.
        """
        try:
            found = self._consumer.list_topics(topic, timeout=timeout).topics[topic]
        except KafkaException as error:
            raise broker_error(error, None, f"reading the partitions of {topic!r}") from error
        if found.error is not None:
            raise broker_error(found.error, None, f"reading the partitions of {topic!r}")
        return [(topic, number) for number in sorted(found.partitions)]

    def commit(self, places: Mapping[Partition, int]) -> None:
        """Commit offsets to Kafka, and wait for the answer. The coordinator refuses them if our generation is over.

        Raises:
            BrokerError: They were not committed.
        """
        offsets = [TopicPartition(*key, place) for key, place in places.items()]
        try:
            done = self._consumer.commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:
            raise self._uncommitted(error.args[0]) from error
        refused = next((one.error for one in done or () if one.error is not None), None)
        if refused is not None:
            raise self._uncommitted(refused)

    def close(self) -> None:
        """Leave the group."""
        self._show(self._unshown)
        self._consumer.close()  # waits for that

    # --- rebalances -------------------------------------------------------------------------------------------------------

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        keys = [(one.topic, one.partition) for one in partitions]
        begin = self._begin(keys) if keys else {}
        places = [TopicPartition(*key, begin[key]) for key in keys]
        if self._incremental:
            consumer.incremental_assign(places)
        else:
            self._terms.clear()
            consumer.assign(places)
        self._began({key: begin[key] for key in keys})
        for topic, _ in keys:
            self._unknown.pop(topic, None)
        if self._waiting and places:
            consumer.pause(places)
        log.info("%s: assigned %s", self.group_id, ", ".join(f"{t}-{p} at {begin[t, p]}" for t, p in keys) or "nothing")

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        keys = {(one.topic, one.partition) for one in partitions}
        self._show({key: offset for key, offset in self._unshown.items() if key in keys})
        for key in keys:
            self._terms.pop(key, None)
            self._refused.pop(key, None)
            self._ends.pop(key, None)
        if self._waiting and partitions:
            consumer.resume(partitions)  # librdkafka keeps a pause, also for the next time that they are assigned
        if self._incremental:
            consumer.incremental_unassign(partitions)
        else:
            consumer.unassign()
        log.info("%s: gave up %s", self.group_id, ", ".join(f"{one.topic}-{one.partition}" for one in partitions))

    def _unreadable(self, error: KafkaException | KafkaError) -> BrokerError:
        found = broker_error(error, None, f"reading the offsets of group {self.group_id!r}")
        if isinstance(found, BrokerUnavailableError):
            found.cause = "no broker answers, or a transaction with offsets of the group is open, of a process that has died"
            found.next_step = (
                f"check that the brokers are running; `dualwrite stuck --group {self.group_id}` shows such a transaction, and "
                "`dualwrite recover` ends it"
            )
        return found

    def _uncommitted(self, error: KafkaError) -> BrokerError:
        doing = f"committing offsets of group {self.group_id!r}"
        if error.name() in _REBALANCING:
            return BrokerUnavailableError(f"Kafka error during {doing}: {error.str()}.", next_step="retry")
        return broker_error(error, None, doing)

    # --- parts ------------------------------------------------------------------------------------------------------------

    def _began(self, places: Mapping[Partition, int]) -> None:
        """Partitions that go on at other places: each has a new term."""
        for key, place in places.items():
            self._terms[key] = object()
            self._places[key] = place
            self._ends.pop(key, None)

    def _seek(self, keys: Iterable[Partition]) -> None:
        """Read on from the places of these partitions."""
        stopped = []
        for key in keys:
            self._refused.pop(key, None)
            try:
                self._consumer.seek(TopicPartition(*key, self._places[key]))
            except KafkaException:  # librdkafka has stopped fetching: its place was out of range
                stopped.append(key)
        if not stopped:
            return
        if self._incremental:
            self._consumer.incremental_unassign(_partitions(stopped))
            self._consumer.incremental_assign([TopicPartition(*key, self._places[key]) for key in stopped])
        else:
            self._consumer.assign([TopicPartition(*key, self._places[key]) for key in self._terms])

    def _edges(self, partitions: Iterable[Partition], which: int, name: str, timeout: float) -> dict[Partition, int]:
        wanted = [TopicPartition(*key, which) for key in partitions]
        try:
            found = self._consumer.offsets_for_times(wanted, timeout) if wanted else ()
        except KafkaException as error:
            raise broker_error(error, None, f"reading the {name} offsets of partitions") from error
        for one in found:
            if one.error is not None:
                raise broker_error(one.error, None, f"reading the {name} offset of {one.topic}-{one.partition}")
        return {(one.topic, one.partition): one.offset for one in found}

    def _show_due(self) -> None:
        if time.monotonic() - self._shown_at >= _SHOWN_AFTER:
            self._show(self._unshown)

    def _show(self, places: Mapping[Partition, int]) -> None:
        if not places:
            return
        offsets = [TopicPartition(*key, offset) for key, offset in places.items()]
        self._unshown = {key: offset for key, offset in self._unshown.items() if key not in places}
        self._shown_at = time.monotonic()
        try:
            self._consumer.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            log.debug("%s: offsets were not committed for monitors: %s", self.group_id, error)

    def _polled(self, timeout: float) -> Message | None:
        """The next message. The rebalance callbacks run here, before it."""
        deadline = time.monotonic() + timeout
        while True:
            message = self._consumer.poll(max(deadline - time.monotonic(), 0))
            error = None if message is None else message.error()
            if message is None or error is None:
                return message
            key = partition_of(message)
            if error.name() == _END_OF_PARTITION:  # it comes after the partition's messages, and between those of others
                offset = message.offset()
                if key in self._terms and offset is not None:
                    self._ends[key] = offset
                continue
            if error.name() == _OUT_OF_RANGE and not error.fatal():
                if key in self._terms:
                    offset = message.offset()
                    self._refused[key] = self._places[key] if offset is None else offset
            elif error.name() not in _TRANSIENT or error.fatal():
                raise _failed(error, message)
            log.debug("%s: %s", self.group_id, error)
            topic = message.topic()
            if error.name() == _UNKNOWN_TOPIC and topic is not None:
                self._unknown.setdefault(topic, -_WARNED_AFTER)
            return None

    def _warn_of_unknown_topics(self) -> None:
        """At once, and every minute: the topic may be created later, but its name may also be wrong."""
        now = time.monotonic()
        for topic, warned_at in self._unknown.items():
            if now - warned_at >= _WARNED_AFTER:
                self._unknown[topic] = now
                log.warning("%s: the brokers don't know the topic %r. Is its name right?", self.group_id, topic)


def _partitions(keys: Iterable[Partition]) -> list[TopicPartition]:
    return [TopicPartition(*key) for key in keys]


def _is_incremental(settings: Mapping[str, Any]) -> bool:
    """Whether partitions come and go one by one: in the protocol of KIP-848, and with the cooperative assignors (KIP-429)."""
    if settings.get("group.protocol") == "consumer":
        return True
    return "cooperative" in str(settings.get("partition.assignment.strategy", ""))


def _failed(error: KafkaError, message: Message) -> BrokerError:
    where = "" if message.topic() is None else f" of {message.topic()}-{message.partition()}"
    return BrokerError(f"Consuming{where} failed: {error.str()}.", code=error.code(), name=error.name())
