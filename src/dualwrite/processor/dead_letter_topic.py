"""A processor's dead-letter topic: list its letters, and replay each once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.librdkafka.committed_messages import committed_messages
from dualwrite.processor.dead_letters import MARK, REPLAYED_FOR, DeadLetter, letters_in, mark_headers, replayed_headers
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
        """The dead letters that consumers see now, in order of partition and offset; those of one group, if it is given.

        Other messages are left out.

        Raises:
            UnknownTopicError: There is no such topic.
            BrokerUnavailableError: Kafka does not answer.
        """
        return self._letters(group, is_settled=False)

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
            OpenTransactionsError: A transaction of another process on the dead-letter topic stays open.
            UnknownTopicError, BrokerUnavailableError: As for `letters`.
            DualWriteError: A letter can't be sent; those of earlier transactions are replayed, in lots of 100.
        """
        if all(each.is_replayed for each in self.letters(group)):
            return 0
        with KafkaWriter(self._settings, transactional_id=f"{self._topic}.replay.{group}") as writer:
            # opening it has ended the transaction of an earlier replay
            waiting = [each for each in self._letters(group, is_settled=True) if not each.is_replayed]
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
                    for partition, through in {letter.partition: letter.offset for letter in lot}.items():
                        key = f"{REPLAYED_FOR} {group}"  # a compacted topic keeps the last mark
                        tx.send(self._topic, MARK, key=key, headers=mark_headers(group, through), partition=partition)
            return len(waiting)

    def _letters(self, group: str | None, *, is_settled: bool) -> list[DeadLetter]:
        found = committed_messages(self._config, self._topic, is_settled=is_settled, timeout=self._timeout)
        return letters_in(found, group)

    @property
    def _settings(self) -> dict[str, Any]:
        return {**self._config.properties, "bootstrap.servers": self._config.servers}
