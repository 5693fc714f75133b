"""A member of a consumer group, over confluent-kafka, that begins each partition at an offset given by its caller.

The rebalance callbacks run inside `poll` and `wait`, never during the caller's own work. Between two of these calls, `owned`
therefore stays the same, and is as accurate as a member's view can be.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    OFFSET_INVALID,
    OFFSET_STORED,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)
from confluent_kafka.cimpl import Consumer  # the package's one may be auto-instrumented, and make spans of its own

from dualwrite.errors import ConfigurationError
from dualwrite.kafka.client.brokers import REFUSAL_LIMIT, check_not_refused
from dualwrite.kafka.librdkafka.client_settings import client_settings
from dualwrite.kafka.librdkafka.group_offsets import Batch, BrokerOffsets, MonitorOffsets, Partition, partition_of
from dualwrite.kafka.librdkafka.librdkafka_errors import consumer_recovers, consuming_error, text_of
from dualwrite.observability.logs import SubjectLogger, if_unexpected
from dualwrite.observability.outages import kafka_at

log = SubjectLogger(__name__)

Begin = Callable[[list[Partition]], Mapping[Partition, int]]

BEGINNING: Final = OFFSET_BEGINNING
"""In place of an offset: the first record that retention has left."""

_PLACES: Final = {
    OFFSET_BEGINNING: "at the beginning",
    OFFSET_END: "at the end",
    OFFSET_STORED: "at the group's offset",
    OFFSET_INVALID: "at the group's offset",
}

_OURS: Final = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",  # a position that retention has passed must be noticed
    "isolation.level": "read_committed",  # messages of aborted transactions must not be processed
}
_INTERNAL: Final = {"enable.partition.eof": True}
"""Settings whose effect is visible only in this class."""

_STEP: Final = 0.1
_MOMENT: Final = 0.005
_UNKNOWN_TOPIC: Final = "UNKNOWN_TOPIC_OR_PART"
_WARNING_INTERVAL: Final = 60.0

_END_OF_PARTITION: Final = "_PARTITION_EOF"
_ALL_DOWN: Final = "_ALL_BROKERS_DOWN"
_OUT_OF_RANGE: Final = "_AUTO_OFFSET_RESET"
_TRUNCATION: Final = "truncation"

_CONSUMING: Final = "a consumer reached no broker"
"""Kind of a call, for `kafka_at`."""

_LOOK_INTERVAL: Final = 1.0
_LOOK_LIMIT: Final = 0.5

_CLOSING: Final = 10.0
"""Seconds that `close` waits; librdkafka itself would wait for a coordinator that is down for `session.timeout.ms`."""

_REVOKING: Final = 5.0
"""Seconds of them for a rebalance in progress: it ends once every member has joined again."""


class GroupConsumer:
    """Subscribes to topics, and begins each partition at the offset that `begin` returns.

    Args:
        settings: For confluent-kafka's Consumer, with `group.id`. It reads committed messages only.
        topics: The topics.
        begin: Called with the partitions that were assigned; returns the offset to begin at, or BEGINNING, for each. It runs
            inside `poll`, and must not call the consumer's `list_topics`, which ends confluent-kafka's record of the call in
            progress: the next error that librdkafka reports in the same `poll` would abort the process.

    Raises:
        ConfigurationError: A setting is missing, unknown, or must not be changed.

    Attributes:
        offsets: Reads and commits offsets at the brokers.
    """

    def __init__(self, settings: Mapping[str, Any], topics: Iterable[str], begin: Begin) -> None:
        for name, value in _OURS.items():
            if name in settings and settings[name] != value:
                raise ConfigurationError(
                    f"The consumer's setting {name!r} can't be changed.",
                    cause="a processor begins where its positions are stored, and reads committed messages only",
                    next_step="leave it out; the processor's option `start` determines where a new group begins",
                )
        if not settings.get("group.id"):
            raise ConfigurationError("The consumer has no group.id.", next_step="set group.id")
        self.group_id = str(settings["group.id"])
        self._settings = settings
        self._begin = begin
        self._incremental = _is_incremental(settings)
        self._terms: dict[Partition, object] = {}  # a new object each time that a partition is assigned
        self._next_offsets: dict[Partition, int] = {}  # the offset of the next message
        self._ends: dict[Partition, int] = {}  # the end of each partition that was read to its end
        self._refused: dict[Partition, tuple[int, bool]] = {}  # the offset, and whether the log was truncated before it
        self._waiting = False
        self._is_closing = False
        self._kafka = kafka_at(str(settings.get("bootstrap.servers", "")))
        self._on_error: Callable[[KafkaError], object] | None = settings.get("error_cb")
        self._look_at = 0.0  # when to ask whether a broker answers
        self._down_since = 0.0  # when librdkafka's report was read
        self._unknown: dict[str, float] = {}  # topics that the brokers don't know, with the time of the last warning
        try:
            noting = {"error_cb": self._note_error}
            self._consumer = Consumer(client_settings({**settings, **_OURS, **_INTERNAL, **noting}, group_id=self.group_id))
            self._consumer.subscribe(list(topics), on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked)
        except KafkaException as error:
            raise ConfigurationError(f"The consumer can't be created: {text_of(error.args[0])}.") from error
        self.offsets: Final = BrokerOffsets(self._consumer, self.group_id)
        self._for_monitors = MonitorOffsets(self._consumer, self.group_id)

    @property
    def member(self) -> Consumer:
        """confluent-kafka's consumer, as `Transaction.send_offsets` needs it."""
        return self._consumer

    def owned(self) -> Mapping[Partition, object]:
        """The partitions that are assigned now, each with the term of its assignment: every assignment has its own term."""
        return dict(self._terms)

    def poll(self, most: int, timeout: float) -> Batch:
        """The next messages, at most `most`: waits `timeout` seconds for the first one, and adds those already fetched.

        There may be a rebalance between two of them. Messages of a partition that was revoked meanwhile are left out, even if
        it was assigned again, since it then begins again at an offset from the caller.

        Raises:
            BrokerAuthorizationError: The brokers refuse this client, or an ACL is missing.
            BrokerError: Consuming can't continue: librdkafka reports a fatal error.
        """
        self._for_monitors.commit_due()
        self._warn_of_unknown_topics()
        self._look_for_brokers()
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
        batch = Batch(tuple(found), terms).still_owned(self._terms)
        self._next_offsets |= batch.after
        return batch

    @property
    def refused(self) -> dict[Partition, int]:
        """The offsets that were out of range in assigned partitions, from which no messages come until `seek`.

        An entry may also be a late report, about an offset from before the last `seek`.
        """
        return {key: offset for key, (offset, _) in self._refused.items()}

    @property
    def truncated(self) -> frozenset[Partition]:
        """The partitions in `refused` of which librdkafka says that the log was truncated before the offset (KIP-320).

        The partition may have grown again since, so that its end is no proof.
        """
        return frozenset(key for key, (_, is_truncated) in self._refused.items() if is_truncated)

    @property
    def ends(self) -> dict[Partition, int]:
        """The ends of the partitions that were read to their end: before the first message of an open transaction.

        Any thread may call it.
        """
        return dict(self._ends)

    @property
    def passed(self) -> dict[Partition, tuple[int, int]]:
        """The partitions that were read to their end: the offset after the last message returned, and the end.

        Between the two are only records that are not returned to consumers: transaction markers, and messages of aborted
        transactions.
        """
        found = {key: (self._next_offsets.get(key), end) for key, end in self.ends.items()}
        return {key: (polled, end) for key, (polled, end) in found.items() if polled is not None and end > polled}

    def watermarks(self) -> dict[Partition, tuple[int, int]]:
        """The first offset and the end of the assigned partitions as of the last fetch, as far as known: without a request.

        Any thread may call it.
        """
        found = {}
        with suppress(KafkaException, RuntimeError):  # RuntimeError: it is closed
            for key in self.owned():
                marks = self._consumer.get_watermark_offsets(TopicPartition(*key), cached=True)
                if marks is not None and marks[1] >= 0:
                    found[key] = marks
        return found

    def wait(self, seconds: float, stopped: Callable[[], bool]) -> None:
        """Wait without consuming, until `stopped` or for so many seconds, and without exceeding `max.poll.interval.ms`."""
        self._for_monitors.commit_due()
        deadline = time.monotonic() + seconds
        self._waiting = True
        self._consumer.pause(_partitions(self._terms))
        try:
            while True:
                message = self._polled(min(_STEP, max(deadline - time.monotonic(), 0)))
                if message is not None and partition_of(message) in self._terms:  # fetched before the pause
                    self._ends.pop(partition_of(message), None)
                    self._seek([partition_of(message)])
                if time.monotonic() >= deadline or stopped():
                    return
        finally:
            self._waiting = False
            self._consumer.resume(_partitions(self._terms))

    def seek(self, offsets: Mapping[Partition, int]) -> None:
        """Continue at other offsets, in those of the partitions that are still assigned; each gets a new term."""
        ours = {key: offset for key, offset in offsets.items() if key in self._terms}
        self._began(ours)  # earlier messages are not followed by the messages at these offsets
        self._seek(ours)

    def show_progress(self, offsets: Mapping[Partition, int]) -> None:
        """Commit the offsets to Kafka, for monitors only: about once a second, and at the end; errors are only logged."""
        self._for_monitors.add(offsets)
        self._for_monitors.commit_due()

    def close(self) -> None:
        """Leave the group. If its coordinator does not respond within ten seconds, that continues in the background."""
        self._is_closing = True
        self._for_monitors.commit()
        closing = threading.Thread(target=self._close, name=f"dualwrite-leave-{self.group_id}", daemon=True)
        closing.start()
        closing.join(_CLOSING)
        if closing.is_alive():
            log.warning(
                "the group's coordinator does not respond: this member could not leave within %g s, and will be removed "
                "after session.timeout.ms",
                _CLOSING,
                group_id=self.group_id,
            )

    def _close(self) -> None:
        for step in (self._unsubscribe, self._consumer.close):  # close waits for the commit
            try:
                step()
            except Exception as error:  # nothing depends on it any more
                log.warning("leaving the group: %s", error, exc_info=if_unexpected(error), group_id=self.group_id)

    def _unsubscribe(self) -> None:
        """Give up the assignment, and run the rebalance callbacks that are left, so that librdkafka's close() has none to run.

        What a callback calls there can wait forever for a part of librdkafka that has ended meanwhile (librdkafka issue 4884).
        confluent-kafka holds the interpreter's lock during that wait, so that the whole process would stand still.
        """
        self._consumer.unsubscribe()
        deadline = time.monotonic() + _REVOKING
        while time.monotonic() < deadline:
            if self._consumer.poll(0) is None:
                if not self._consumer.assignment():
                    return
                time.sleep(_MOMENT)  # a rebalance is in progress: the callback that revokes the rest comes at its end

    # --- rebalances -------------------------------------------------------------------------------------------------------

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if self._is_closing:  # nothing will be read from them, and where they begin can't be found out any more
            return
        keys = [(one.topic, one.partition) for one in partitions]
        begin = self._begin(keys) if keys else {}
        assigned = [TopicPartition(*key, begin[key]) for key in keys]
        if self._incremental:
            consumer.incremental_assign(assigned)
        else:
            self._terms.clear()
            consumer.assign(assigned)
        self._began({key: begin[key] for key in keys})
        for topic, _ in keys:
            self._unknown.pop(topic, None)
        if self._waiting and assigned:
            consumer.pause(assigned)
        log.info(
            "assigned %s", ", ".join(f"{t}-{p} {where(begin[t, p])}" for t, p in keys) or "nothing", group_id=self.group_id
        )

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        keys = {(one.topic, one.partition) for one in partitions}
        self._for_monitors.commit(keys)
        for key in keys:
            self._terms.pop(key, None)
            self._refused.pop(key, None)
            self._ends.pop(key, None)
        if self._waiting and partitions:
            consumer.resume(partitions)  # librdkafka keeps a pause for the next assignment
        if self._incremental:
            consumer.incremental_unassign(partitions)
        else:
            consumer.unassign()
        log.info("revoked %s", ", ".join(f"{one.topic}-{one.partition}" for one in partitions), group_id=self.group_id)

    # --- parts ------------------------------------------------------------------------------------------------------------

    def _began(self, offsets: Mapping[Partition, int]) -> None:
        """Record where partitions begin or continue; each gets a new term."""
        for key, offset in offsets.items():
            self._terms[key] = object()
            self._next_offsets[key] = offset
            self._ends.pop(key, None)

    def _seek(self, keys: Iterable[Partition]) -> None:
        """Have librdkafka continue at the recorded offsets of these partitions."""
        stopped = []
        for key in keys:
            self._refused.pop(key, None)
            try:
                self._consumer.seek(TopicPartition(*key, self._next_offsets[key]))
            except KafkaException:  # librdkafka has stopped fetching it: the offset was out of range
                stopped.append(key)
        if not stopped:
            return
        if self._incremental:
            self._consumer.incremental_unassign(_partitions(stopped))
            self._consumer.incremental_assign([TopicPartition(*key, self._next_offsets[key]) for key in stopped])
        else:
            self._consumer.assign([TopicPartition(*key, self._next_offsets[key]) for key in self._terms])

    def _polled(self, timeout: float) -> Message | None:
        """The next message. The rebalance callbacks run here, before it."""
        deadline = time.monotonic() + timeout
        left = timeout
        while True:
            message = self._consumer.poll(left)
            if message is None:
                return None
            error = message.error()
            if error is None:
                return message
            left = max(deadline - time.monotonic(), 0.0)
            key = partition_of(message)
            if error.name() == _END_OF_PARTITION:  # after the partition's last message, among those of others
                offset = message.offset()
                if key in self._terms and offset is not None:
                    self._ends[key] = offset
                continue
            if error.name() == _OUT_OF_RANGE and not error.fatal():
                self._note_refused(key, message.offset(), error)
            elif not consumer_recovers(error):
                where = "" if message.topic() is None else f" of {message.topic()}-{message.partition()}"
                raise consuming_error(error, where, self.group_id)
            log.debug("%s", error, group_id=self.group_id)
            topic = message.topic()
            if error.name() == _UNKNOWN_TOPIC and topic is not None:
                self._unknown.setdefault(topic, -_WARNING_INTERVAL)
            return None

    def _note_refused(self, key: Partition, offset: int | None, error: KafkaError) -> None:
        if key not in self._terms:
            return
        is_truncated = _TRUNCATION in error.str().lower()  # which has no code of its own
        self._refused[key] = (self._next_offsets[key] if offset is None else offset, is_truncated)

    def _note_error(self, error: KafkaError) -> None:
        """Called in `poll` with librdkafka's errors that are no messages, each of which it recovers from."""
        if error.name() == _ALL_DOWN and not self._look_at:
            self._look_at = self._down_since = time.monotonic()
        if self._on_error is not None:
            self._on_error(error)

    def _look_for_brokers(self) -> None:
        """When librdkafka has reported that all brokers are down, ask for one, until one answers.

        The report may be old, if this thread was busy; and a consumer without new messages would not notice the end.

        Raises:
            BrokerAuthorizationError: They answer, and refuse this client.
        """
        if not self._look_at or time.monotonic() < self._look_at:
            return
        try:
            self._consumer.list_topics(timeout=_LOOK_LIMIT)
        except KafkaException as error:
            check_not_refused(self._settings, REFUSAL_LIMIT)
            self._kafka.failed(_CONSUMING, error, since=self._down_since)
            self._look_at = time.monotonic() + _LOOK_INTERVAL
        else:
            self._look_at = 0.0
            self._kafka.answered(_CONSUMING)

    def _warn_of_unknown_topics(self) -> None:
        """Warn at once, and then every minute: the topic may still be created, but its name may also be wrong."""
        now = time.monotonic()
        for topic, warned_at in self._unknown.items():
            if now - warned_at >= _WARNING_INTERVAL:
                self._unknown[topic] = now
                log.warning(
                    "the brokers don't know the topic %r. Is its name right?", topic, group_id=self.group_id, topic=topic
                )


def where(offset: int) -> str:
    """Readable text of an offset that librdkafka knows, including those with a meaning of their own."""
    return _PLACES.get(offset, f"at {offset}")


def _partitions(keys: Iterable[Partition]) -> list[TopicPartition]:
    return [TopicPartition(*key) for key in keys]


def _is_incremental(settings: Mapping[str, Any]) -> bool:
    """Whether rebalances are incremental: in the protocol of KIP-848, and with the cooperative assignors (KIP-429)."""
    if settings.get("group.protocol") == "consumer":
        return True
    return "cooperative" in str(settings.get("partition.assignment.strategy", ""))
