"""A processor's dead-letter topic: list its letters, and replay each once (with KIP-447's transactional offsets)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, Final

from confluent_kafka import Consumer, KafkaException, TopicPartition

from dualwrite.errors import BrokerUnavailableError
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.librdkafka.committed_messages import committed_messages
from dualwrite.processor.dead_letters import DeadLetter, parsed, replayed_headers
from dualwrite.processor.kafka_writer import KafkaWriter
from dualwrite.settings import Settings

_LOT: Final = 100
"""Letters that are replayed in one transaction."""


class DeadLetterTopic:
    """The dead-letter topic of one or more consumer groups.

    Args:
        topic: The topic.
        kafka: Settings in librdkafka's names, or `host:port`, as for `connect`.
        timeout: Seconds for reading the topic.

    Raises:
        ConfigurationError: A setting is unknown or not allowed.
    """

    def __init__(self, topic: str, kafka: str | Mapping[str, Any] | None = None, *, timeout: float = 30.0) -> None:
        self._topic = topic
        self._config = KafkaConfig.over(kafka, Settings.from_environment().kafka)
        self._timeout = timeout

    def letters(self, group: str | None = None) -> list[DeadLetter]:
        """The dead letters, in order of partition and offset; those of one group, if it is given.

        Messages that are no dead letters of a processor are left out.

        Raises:
            UnknownTopicError: There is no such topic.
            BrokerUnavailableError: Kafka does not answer, or a transaction on the topic stays open.
        """
        found = map(parsed, committed_messages(self._config, self._topic, timeout=self._timeout))
        letters = [each for each in found if each is not None and group in (None, each.group)]
        replayed = {name: self._replayed(name) for name in {each.group for each in letters}}
        return [replace(each, is_replayed=each.offset < replayed[each.group].get(each.partition, 0)) for each in letters]

    def replay(self, group: str, *, to: str | None = None) -> int:
        """Send the letters of a group that were not replayed yet to where they came from; each is replayed once.

        They are sent in their order, each to the partition that it came from, with the header `dualwrite.replayed_for`.
        Processors of other groups skip such a message; other consumers of the topic see it a second time. The call may be
        repeated after any error.

        Args:
            group: The consumer group.
            to: Another topic, where the message's key determines the partition. The group must consume it.

        Returns:
            The number of letters that this call has replayed: those that were there when it began.

        Raises:
            FencedError: Another process replays the same letters.
            InDoubtTransactionError: Kafka did not answer a commit; the next call knows what was replayed.
            UnknownTopicError, BrokerUnavailableError: As for `letters`.
            DualWriteError: A letter can't be sent; those of earlier transactions are replayed, in lots of 100.
        """
        letters = self.letters(group)
        if all(each.is_replayed for each in letters):
            return 0
        with KafkaWriter(self._settings, transactional_id=self._reader(group)) as writer, self._consumer(group) as consumer:
            replayed = self._replayed(group)  # again: opening the writer has ended the transaction of an earlier replay
            waiting = [each for each in letters if each.offset >= replayed.get(each.partition, 0)]
            for lot in (waiting[at : at + _LOT] for at in range(0, len(waiting), _LOT)):
                with writer.transaction() as tx:
                    for letter in lot:
                        tx.send(
                            to or letter.topic,
                            letter.value,
                            key=letter.key,
                            headers=replayed_headers(letter),
                            partition=letter.source_partition if to is None else None,
                        )
                    tx.send_offsets(consumer, {(self._topic, letter.partition): letter.offset + 1 for letter in lot})
            return len(waiting)

    @property
    def _settings(self) -> dict[str, Any]:
        return {**self._config.properties, "bootstrap.servers": self._config.servers}

    def _reader(self, group: str) -> str:
        """The consumer group whose offsets say which letters of a group were replayed; also the replay's transactional id."""
        return f"{self._topic}.replay.{group}"

    @contextmanager
    def _consumer(self, group: str) -> Iterator[Consumer]:
        """A consumer that does not join its group: it only reads and names the group's offsets."""
        made = Consumer({**self._settings, "group.id": self._reader(group), "enable.auto.commit": False, "log_level": 4})
        with closing(made) as consumer:
            yield consumer

    def _replayed(self, group: str) -> dict[int, int]:
        """The offset after the last replayed letter of a group, for each partition that has one."""
        with self._consumer(group) as consumer:
            try:
                partitions = consumer.list_topics(self._topic, timeout=self._timeout).topics[self._topic].partitions
                asked = [TopicPartition(self._topic, number) for number in partitions]
                found = consumer.committed(asked, timeout=self._timeout)
            except KafkaException as error:
                what = f"The offsets of {self._reader(group)!r} can't be read: {error.args[0].str()}."
                raise BrokerUnavailableError(what) from error
        return {each.partition: each.offset for each in found if each.offset >= 0}
