"""Compares DualProcessor with consumers that guarantee less, by size of the batch. One run; see README.md."""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import uuid4

from confluent_kafka import Consumer, KafkaException, Message, Producer
from sqlalchemy import BigInteger, Column, Connection, Engine, MetaData, String, Table, create_engine, insert, select

import dualwrite
from brokers import WARM_UP_SECONDS
from cases import rotated
from committed import committed
from dualwrite.kafka.librdkafka.admin import create_topic
from dualwrite.pool.options import PoolOptions
from dualwrite.processor import DualProcessor, ProcessorOptions
from dualwrite.settings import Acknowledge
from figures import Spread
from machine import Conditions, ProcessorTimes
from options import count, counts, seconds
from progress import show_progress
from records import VerificationError, check_records, place_of, record
from services import services
from surroundings import line, surroundings, warnings
from tables import with_range

JOINING: Final = {"group.initial.rebalance.delay.ms": "1000"}
"""Members that start together get their partitions together."""

TIMEOUT: Final = 60.0
PARTITIONS: Final = 4
MAX_MESSAGES: Final = {1: 500, 10: 5_000, 100: 50_000}
"""The maximum number of messages by size of the batch, unless --all is given: small batches would take too long."""

WARM_UP_BATCHES: Final = 20
"""How many batches each alternative processes before the first round."""

OURS: Final = "DualProcessor"
DECIDED: Final = "DualProcessor, decided"
POOL: Final = "DualProcessor on a pool, decided"
DATABASE: Final = "database, then offsets"
KAFKA: Final = "consume-transform-produce"

results = Table("results", MetaData(), Column("number", BigInteger), Column("text", String(300)))


@dataclass
class Place:
    """Where a measurement happens.

    Args:
        servers: Kafka.
        engine: The database.
        source: The topic that is read.
        messages: How many are to be processed. It has some more; see `fill`.
        members: The members of the group, each in a thread of its own.
        batches: The sizes of DualProcessor's batches.
        target: The topic with the output messages of the latest measurement.
    """

    servers: str
    engine: Engine
    source: str
    messages: int
    members: int = 1
    batches: list[int] = field(default_factory=list)
    target: str = ""

    def consumer(self, group: str) -> Consumer:
        """A consumer of the source, for the alternatives."""
        made = Consumer(
            {
                "bootstrap.servers": self.servers,
                "group.id": group,
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
            }
        )
        made.subscribe([self.source])
        return made

    def topic(self) -> str:
        """A new topic for the output messages."""
        self.target = new_topic(self.servers)
        return self.target

    def outputs(self) -> Iterator[bytes]:
        """The output messages that consumers see."""
        return (message.value() or b"" for message in committed({"bootstrap.servers": self.servers}, self.target))

    def rows(self) -> Iterator[tuple[int, str]]:
        """The rows, which are deleted."""
        with self.engine.begin() as connection:
            yield from connection.execute(select(results.c.number, results.c.text)).tuples()
            connection.execute(results.delete())


@dataclass
class Clock:
    """The time from the first batch until the last one has been committed, for any number of threads.

    Args:
        messages: How many messages are to be processed.
        done: Called once, when this many have been committed.

    Attributes:
        after: For each partition, the offset after the messages that have been committed.
    """

    messages: int
    done: Callable[[], object]
    began: float = 0.0
    ended: float = 0.0
    after: dict[int, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Start with the first batch."""
        with self._lock:
            self.began = self.began or time.perf_counter()

    def count(self, messages: Iterable[Message]) -> None:
        """Count messages that have been committed; those that are processed again, after a rebalance, count once."""
        with self._lock:
            was = self.seen
            for message in messages:
                partition, offset = message.partition(), message.offset()
                assert partition is not None
                assert offset is not None
                self.after[partition] = max(self.after.get(partition, 0), offset + 1)
            self.ended = time.perf_counter()
            is_last = was < self.messages <= self.seen
        if is_last:
            self.done()

    @property
    def seen(self) -> int:
        """The number of messages that have been committed: each partition from its beginning."""
        return sum(self.after.values())

    @property
    def rate(self) -> float:
        """Messages per second."""
        return self.seen / (self.ended - self.began)


def write(connection: Connection, messages: Sequence[Message]) -> None:
    """Insert the rows of a batch."""
    rows = [{"number": message.offset(), "text": (message.value() or b"").decode()} for message in messages]
    connection.execute(insert(results), rows)


def together(members: Sequence[Callable[[], None]], stop: Callable[[], object]) -> None:
    """Run each in a thread of its own; if one fails, stop the others, and raise its error."""
    with ThreadPoolExecutor(len(members)) as threads:
        try:
            for running in as_completed([threads.submit(member) for member in members]):
                running.result()
        finally:
            stop()


def polled(consumer: Consumer, batch: int) -> list[Message]:
    """Up to this many messages.

    Raises:
        KafkaException: The consumer reports an error.
    """
    messages = consumer.consume(batch, 1.0)
    for message in messages:
        if (error := message.error()) is not None:
            raise KafkaException(error)
    return messages


def ours(place: Place, batch: int, messages: int, *, acknowledge: Acknowledge = "visible") -> Clock:
    """DualProcessor: rows and output messages, each message once. Each member has a writer of its own."""
    name = uuid4().hex[:12]
    with ExitStack() as opened:
        writers = [
            opened.enter_context(
                dualwrite.connect(
                    place.engine,
                    kafka=place.servers,
                    transactional_id=f"bench-{name}-{number}",
                    acknowledge=acknowledge,
                )
            )
            for number in range(place.members)
        ]
        return process(place, writers, batch, messages)


def ours_on_a_pool(place: Place, batch: int, messages: int) -> Clock:
    """DualProcessor: the same, on one pool."""
    name = uuid4().hex[:12]
    options = PoolOptions(acknowledge="decided")
    with dualwrite.create_pool(place.engine, kafka=place.servers, prefix=f"bench-{name}", options=options) as pool:
        return process(place, [pool] * place.members, batch, messages)


def process(place: Place, runners: Sequence[Any], batch: int, messages: int) -> Clock:
    """Process the messages with one DualProcessor for each of the runners."""
    target, group = place.topic(), f"bench-{uuid4().hex[:12]}"

    def stop() -> None:
        for processor in processors:
            processor.stop()

    def handler() -> Callable[[Sequence[Message], dualwrite.Transaction[Any]], None]:
        before: Sequence[Message] = ()

        def handle(some: Sequence[Message], tx: dualwrite.Transaction[Any]) -> None:
            nonlocal before
            clock.start()
            if before and _where(before[0]) != _where(some[0]):  # the batch before has been committed; else this is it again
                clock.count(before)
            before = some
            write(tx.db, some)
            tx.send_many(target, [message.value() for message in some])
            place.batches.append(len(some))

        return handle

    clock = Clock(messages, stop)
    processors = [
        DualProcessor(
            runner,
            {"bootstrap.servers": place.servers, "group.id": group},
            [place.source],
            handle_batch=handler(),
            options=ProcessorOptions(batch=batch),
        )
        for runner in runners
    ]
    together([processor.run for processor in processors], stop)
    return clock


def _where(message: Message) -> tuple[int | None, int | None]:
    return message.partition(), message.offset()


def database(place: Place, batch: int, messages: int) -> Clock:
    """Rows, then the offsets at Kafka: after a crash in between, the batch is processed again. No output messages."""
    done, group = threading.Event(), f"bench-{uuid4().hex[:12]}"
    clock = Clock(messages, done.set)

    def member() -> None:
        with closing(place.consumer(group)) as consumer:
            while not done.is_set():
                some = polled(consumer, batch)
                if not some:
                    continue
                with place.engine.begin() as connection:
                    clock.start()  # where DualProcessor's starts
                    write(connection, some)
                consumer.commit(asynchronous=False)
                clock.count(some)

    together([member] * place.members, done.set)
    return clock


def kafka_only(place: Place, batch: int, messages: int) -> Clock:
    """Output messages and offsets in one Kafka transaction (KIP-447). No database."""
    target, done, name = place.topic(), threading.Event(), uuid4().hex[:12]
    clock = Clock(messages, done.set)
    producers = []
    for number in range(place.members):
        settings = {"bootstrap.servers": place.servers, "transactional.id": f"bench-{name}-{number}", "linger.ms": 0}
        producers.append(Producer(settings))
        producers[-1].init_transactions(TIMEOUT)

    def member(producer: Producer) -> None:
        with closing(place.consumer(f"bench-{name}")) as consumer:
            while not done.is_set():
                some = polled(consumer, batch)
                if not some:
                    continue
                producer.begin_transaction()
                clock.start()
                for message in some:
                    producer.produce(target, message.value())
                producer.send_offsets_to_transaction(
                    consumer.position(consumer.assignment()), consumer.consumer_group_metadata(), TIMEOUT
                )
                producer.commit_transaction(TIMEOUT)
                clock.count(some)

    together([functools.partial(member, producer) for producer in producers], done.set)
    return clock


ALTERNATIVES: Final[dict[str, Callable[[Place, int, int], Clock]]] = {
    OURS: ours,
    DECIDED: functools.partial(ours, acknowledge="decided"),
    POOL: ours_on_a_pool,
    DATABASE: database,
    KAFKA: kafka_only,
}


def new_topic(servers: str) -> str:
    """A new topic."""
    name = f"bench-{uuid4().hex[:12]}"
    create_topic({"bootstrap.servers": servers}, name, PARTITIONS, timeout=TIMEOUT)
    return name


def fill(servers: str, topic: str, messages: int) -> None:
    """Produce the messages that are read, a record for each: the partition is its writer, the offset its number."""
    settings = {"linger.ms": 50, "queue.buffering.max.messages": 1_000_000, "enable.idempotence": True}
    producer = Producer({"bootstrap.servers": servers, **settings})
    for number in range(messages):
        partition = number % PARTITIONS
        producer.produce(topic, record(partition, number // PARTITIONS), partition=partition)
        if not number % 1000:
            producer.poll(0)
    if producer.flush(TIMEOUT):
        sys.exit("the messages could not be produced")


def verify(
    name: str, after: Mapping[int, int], rows: Iterable[tuple[int, str]], outputs: Iterable[bytes], *, messages: int
) -> None:
    """Check that a row and an output message are there for each message, from the first of each partition on.

    There may be more than were counted, because each member commits another batch before it stops. Only "database, then
    offsets" may have written a row twice, after a rebalance.

    Args:
        name: The alternative.
        after: For each partition, the offset after the messages that were counted.
        rows: The numbers and texts of the rows.
        outputs: The output messages.
        messages: How many messages were to be processed.

    Raises:
        VerificationError: A row or an output message is lost, doubled, or altered.
    """
    texts = []
    for number, content in rows:
        texts.append(content.encode())
        if place_of(texts[-1])[1] != number:
            raise VerificationError(f"{name}: the row of {content!r} has the number {number}")
    found: dict[str, list[bytes]] = {}
    if name != KAFKA:
        found["rows"] = list(set(texts)) if name == DATABASE else texts
    if name != DATABASE:
        found["output messages"] = list(outputs)
    processed = Counter(place_of(content)[0] for content in next(iter(found.values())))
    if processed.total() < messages or any(processed[partition] < offset for partition, offset in after.items()):
        raise VerificationError(f"{name}: {dict(processed)} by partition, but {messages} messages, and {after} were counted")
    for what, contents in found.items():
        check_records(name, what, processed, contents)


def measure(place: Place, name: str, batch: int, messages: int) -> float:
    """Measure and verify an alternative once; returns messages per second."""
    clock = ALTERNATIVES[name](place, batch, messages)
    verify(name, clock.after, place.rows(), () if name == DATABASE else place.outputs(), messages=messages)
    return clock.rate


def table(place: Place, batch: int, rounds: int, *, whole: bool) -> None:
    """Measure every alternative in each round and print medians; ratios are those of the rounds."""
    messages = place.messages if whole else min(place.messages, MAX_MESSAGES.get(batch, place.messages))
    names = list(ALTERNATIVES)
    for name in names:
        show_progress(f"batches of {batch:,}, warm-up: {name}")
        measure(place, name, batch, min(messages, WARM_UP_BATCHES * batch))
    found: dict[str, list[float]] = {name: [] for name in names}
    place.batches.clear()
    first = ProcessorTimes.now()
    for number in range(rounds):
        for name in rotated(names, number):
            found[name].append(measure(place, name, batch, messages))
            show_progress(f"batches of {batch:,}, round {number + 1}/{rounds}, {name}: {found[name][-1]:,.0f}/s")
    around = Conditions.since(first)
    members = "1 member" if place.members == 1 else f"{place.members} members"
    print(f"\n### Batches of {batch:,}: {messages:,} messages, {members}\n")
    print(f"| alternative | messages/s | ÷ {DATABASE} |\n|---|---|---|")
    for name, rates in found.items():
        print(f"| {name} | {statistics.median(rates):,.0f} | {with_range(Spread.of_ratios(rates, found[DATABASE]), 2)} |")
    print(
        f"\nMean batch of DualProcessor: {statistics.mean(place.batches):.0f}. "
        f"Busy {around.busy:.0%}, stolen {around.stolen:.1%}, load average {around.load:.1f}. "
        "Rows and output messages are compared with the messages after each measurement.",
        flush=True,
    )


def main(given: Sequence[str] | None = None) -> None:
    """Run the benchmark with the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--messages", type=count, default=1_000_000, help="messages per measurement; fewer for small batches")
    parser.add_argument("--all", action="store_true", help="use as many messages with small batches")
    parser.add_argument("--batches", type=counts, default=[1, 100, 1000], help="sizes of the batches, comma-separated")
    parser.add_argument("--members", type=counts, default=[1], help="members of the consumer group, comma-separated")
    parser.add_argument("--rounds", type=count, default=3, help="number of rounds; each measures every alternative in turn")
    parser.add_argument("--url", help="an existing PostgreSQL database; by default a server is started")
    parser.add_argument("--kafka", metavar="HOST:PORT", help="an existing cluster; by default one broker is started")
    parser.add_argument("--broker-warm-up", type=seconds, default=WARM_UP_SECONDS, help="see recipe.py")
    parser.set_defaults(producer="auto")
    chosen = parser.parse_args(given)
    with ExitStack() as opened:
        found = opened.enter_context(services(chosen.url, chosen.kafka, {}, warm_up=chosen.broker_warm_up, config=JOINING))
        around = surroundings(found, chosen, {})
        print("\n\n".join([line(around), *warnings(around)]), flush=True)
        servers = found.kafka["bootstrap.servers"]
        engine = create_engine(found.url)
        opened.callback(engine.dispose)
        results.create(engine)
        opened.callback(results.drop, engine)
        source = new_topic(servers)
        # an alternative is counted when its members continue with the next batch, so each needs one more
        fill(servers, source, chosen.messages + max(chosen.members) * max(chosen.batches))
        for members in chosen.members:
            place = Place(servers, engine, source, chosen.messages, members)
            for batch in chosen.batches:
                table(place, batch, chosen.rounds, whole=chosen.all)


if __name__ == "__main__":
    try:
        main()
    except VerificationError as error:
        sys.exit(f"VerificationError: {error}")
