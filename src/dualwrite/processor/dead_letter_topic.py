"""A processor's dead-letter topic: list its letters, and replay each once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, Final

from dualwrite.errors import BrokerUnavailableError, DualWriteError, InDoubtTransactionError, ProducerFencedError
from dualwrite.failpoints import hit
from dualwrite.kafka.base import Message, TransactionalProducer
from dualwrite.kafka.choose import choose_producer
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.librdkafka.committed_messages import committed_messages
from dualwrite.kafka.messages import checked
from dualwrite.observability import tracing
from dualwrite.processor.dead_letters import MARK, REPLAYED_FOR, DeadLetter, letters_in, mark_headers, replayed_headers
from dualwrite.settings import Settings
from dualwrite.transactional_id import validate_transactional_id

_LOT_SIZE: Final = 100
"""Letters that are replayed in one transaction."""

_SUFFIX: Final = "#kafka"
"""Keeps the id at Kafka apart from those of writers; a prefixed ACL covers it."""


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
        environment = Settings.from_environment()
        self._config = KafkaConfig.over(kafka, environment.kafka)
        self._timeouts = environment.timeouts
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
            ProducerFencedError: Another process replays the same letters.
            InDoubtTransactionError: Kafka did not answer a commit; the next call knows what was replayed.
            OpenTransactionsError: A transaction of another process on the dead-letter topic stays open.
            UnknownTopicError, BrokerUnavailableError: As for `letters`.
            DualWriteError: A letter can't be sent; those of earlier transactions are replayed, in lots of 100.
        """
        if all(each.is_replayed for each in self.letters(group)):
            return 0
        count = 0
        while True:
            with self._registered(group) as producer:  # which has ended the transaction of an earlier replay
                waiting = [each for each in self._letters(group, is_settled=True) if not each.is_replayed]
                for lot in (waiting[at : at + _LOT_SIZE] for at in range(0, len(waiting), _LOT_SIZE)):
                    self._send(producer, self._messages(group, lot, to))
                    count += len(lot)
                    if producer.must_be_replaced:
                        break  # and whoever registers the id again looks again what there is to do
                else:
                    return count

    def _letters(self, group: str | None, *, is_settled: bool) -> list[DeadLetter]:
        found = committed_messages(self._config, self._topic, is_settled=is_settled, timeout=self._timeout)
        return letters_in(found, group)

    @contextmanager
    def _registered(self, group: str) -> Iterator[TransactionalProducer]:
        """A producer with the id of the topic and the group; it has fenced earlier ones and aborted their transactions."""
        name = validate_transactional_id(f"{self._topic}.replay.{group}", lanes=1)
        settings = Settings(transactional_id=name, two_phase=False, timeouts=self._timeouts)
        with closing(WireTransactionCoordinator(self._config, timeout=self._timeouts.kafka)) as coordinator:
            make = choose_producer(self._config, coordinator, settings, share_connections=True).make
            with closing(make(name + _SUFFIX)) as producer:
                producer.init_transactions(timeout=self._timeouts.kafka)
                yield producer

    def _messages(self, group: str, lot: Sequence[DeadLetter], to: str | None) -> Iterator[Message]:
        """What replays these letters: the letters themselves, and the marks that say so."""
        for each in lot:
            partition = each.source_partition if to is None else None
            yield checked((to or each.topic, each.value, each.key, replayed_headers(each), partition, None))
        for partition, through in {each.partition: each.offset for each in lot}.items():
            key = f"{REPLAYED_FOR} {group}"  # a compacted topic keeps the last mark
            yield checked((self._topic, MARK, key, mark_headers(group, through), partition, None))

    def _send(self, producer: TransactionalProducer, messages: Iterable[Message]) -> None:
        """Send messages in a transaction on Kafka alone."""
        producer.begin_transaction()
        try:
            for message in messages:
                producer.send_messages(tracing.traced([message]))
            hit("after_send")
            producer.prepare_transaction(timeout=self._timeouts.for_delivery)
        except BaseException:
            with suppress(DualWriteError):  # then the next replay does it
                producer.abort_transaction(timeout=self._timeouts.kafka)
            raise
        try:
            producer.commit_transaction(timeout=self._timeouts.kafka)
        except (BrokerUnavailableError, ProducerFencedError) as error:  # a timeout fences, too: neither is an outcome
            raise InDoubtTransactionError(
                f"It is not known whether dead letters of {self._topic!r} were replayed.",
                cause=f"{error}",
                next_step="replay them again: the topic shows what was replayed",
                state="",
                database_committed=None,
            ) from error
