"""A topic of numbers, a processor that books each in the database and answers it in another topic, and the comparison."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from confluent_kafka import Consumer, TopicPartition

import dualwrite
from crash.events import Events
from dualwrite.devcluster import DevCluster
from dualwrite.processor import DualProcessor, ProcessorOptions
from fixtures.broker import make_topic, read_topic, read_values
from fixtures.pace import LIMIT, until_recorded
from fixtures.producing import producing

log = logging.getLogger(__name__)

PARTITIONS = 4
FAST = ProcessorOptions(batch=20, pause=0.01, longest_pause=0.1)
GENTLE = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 500, "fetch.wait.max.ms": 10}


class ProcessorScene:
    """Input and output topics, a group, and a database.

    Args:
        events: The database with its table of numbers.
        broker: The cluster.
        new_name: Makes names.
    """

    def __init__(self, events: Events, broker: DevCluster, new_name: Callable[[str], str]) -> None:
        self.events = events
        self.broker = broker
        self.source, self.target, self.group = new_name("source"), new_name("target"), new_name("group")
        self.prefix = new_name("processor")
        make_topic(broker, self.source, PARTITIONS)
        make_topic(broker, self.target, PARTITIONS)

    def produce(self, numbers: Sequence[int]) -> None:
        with producing(self.broker.bootstrap_servers) as produce:
            for number in numbers:
                produce(self.source, b"%d" % number, partition=number % PARTITIONS)

    def settings(self, **more: Any) -> dict[str, Any]:
        every = {"bootstrap.servers": self.broker.bootstrap_servers, "group.id": self.group, **GENTLE, **more}
        return {name: value for name, value in every.items() if value is not None}

    def book(self, message: Any, tx: dualwrite.Transaction[Any]) -> None:
        """What is processed: a row, and an answer."""
        number = int(message.value())
        self.events.write(tx.db, self.group, number)
        tx.send(self.target, b"%d" % number)

    def claim(self) -> None:
        """Claim the ids of all processors, as a pool does when their leases have expired."""
        dualwrite.recover(self.events.database, kafka=self.broker.bootstrap_servers, prefix=self.prefix).raise_for_problems()

    @contextmanager
    def writer(self, name: str = "1") -> Iterator[dualwrite.DualWriter[Any]]:
        with dualwrite.connect(
            self.events.database, kafka=self.broker.bootstrap_servers, transactional_id=f"{self.prefix}.{name}"
        ) as made:
            yield made

    @contextmanager
    def pool(self, size: int = 2, **options: Any) -> Iterator[dualwrite.WriterPool[Any]]:
        servers = self.broker.bootstrap_servers
        with dualwrite.create_pool(self.events.database, kafka=servers, prefix=self.prefix, size=size, **options) as made:
            yield made

    @contextmanager
    def running(
        self,
        handle: Callable[..., None] | None = None,
        *,
        name: str = "1",
        runner: Any = None,
        topics: Sequence[Any] = (),
        **more: Any,
    ) -> Iterator[Running]:
        """A processor in a thread of its own; its error is raised at the end, unless the test has read it.

        Args:
            handle: By default `book`.
            name: The last part of its writer's id.
            runner: Instead of a writer of its own.
            topics: By default the source.
            more: `handle_batch`, instead of `handle`; options of the processor; and, with a dot in their names, settings of
                the consumer.
        """
        handle_batch = more.pop("handle_batch", None)
        settings = {key: more.pop(key) for key in list(more) if "." in key}
        with self.writer(name) if runner is None else nullcontext(runner) as writer:
            processor = DualProcessor(
                writer,
                self.settings(**settings),
                topics or [self.source],
                handle=None if handle_batch else handle or self.book,
                handle_batch=handle_batch,
                options=replace(FAST, **more),
            )
            running = Running(processor)
            try:
                yield running
            finally:
                running.stop()

    def answers(self) -> list[int]:
        return sorted(int(message.value()) for message in read_topic(self.broker.bootstrap_servers, self.target))

    def shown(self, protocol: str = "classic") -> dict[int, int]:
        """The group's offsets at Kafka, by partition, for those that have one."""
        with closing(Consumer(self.settings(**{"enable.auto.commit": False, "group.protocol": protocol}))) as consumer:
            found = consumer.committed([TopicPartition(self.source, number) for number in range(PARTITIONS)], LIMIT)
        return {one.partition: one.offset for one in found if one.offset >= 0}

    def agree(self) -> list[int]:
        """The numbers that both sides have, each as often as it is there; they must be the same."""
        rows = sorted(self.events.numbers(self.group))
        assert rows == self.answers()
        return rows

    def wait_for(self, numbers: Iterable[int]) -> None:
        """Wait until the rows have these numbers."""
        until_recorded(lambda: self.events.numbers(self.group), numbers)

    def letter(self, topic: str, value: bytes) -> Any:
        """The only message of a dead-letter topic, once it is there."""
        servers = self.broker.bootstrap_servers
        until_recorded(lambda: read_values(servers, topic), [value])
        (found,) = read_topic(servers, topic)
        return found


class Running:
    """A processor in a thread."""

    def __init__(self, processor: DualProcessor) -> None:
        self.processor = processor
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.processor.run()
        except BaseException as error:
            log.exception("the processor has ended")  # a test that waits for records would not say so
            self.error = error

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def ended(self) -> BaseException | None:
        """The error with which it has ended by itself."""
        self._thread.join(LIMIT)
        assert self.has_ended
        found, self.error = self.error, None
        return found

    def stop(self) -> None:
        self.processor.stop()
        self._thread.join(LIMIT)
        assert self.has_ended
        if self.error is not None:
            raise self.error
