"""Compares DualProcessor with consumers that guarantee less, by size of the batch. One run; see README.md."""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import uuid4

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from sqlalchemy import BigInteger, Column, Connection, Engine, MetaData, String, Table, create_engine, func, insert, select

import dualwrite
from brokers import WARM_UP_SECONDS
from dualwrite.pool.options import PoolOptions
from dualwrite.processor import DualProcessor, ProcessorOptions
from dualwrite.settings import Acknowledge
from machine import Conditions, ProcessorTimes
from options import count, counts, seconds
from services import services
from surroundings import line, surroundings, warnings

VALUE: Final = b"x" * 200
JOINING: Final = {"group.initial.rebalance.delay.ms": "1000"}
"""Members that start together get their partitions together."""

TIMEOUT: Final = 60.0
PARTITIONS: Final = 4
MAX_MESSAGES: Final = {1: 500, 10: 5_000, 100: 50_000}
"""The maximum number of messages by size of the batch, unless --all is given: small batches would take too long."""

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
        messages: How many it has.
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

    def outputs(self) -> int:
        """How many output messages consumers see, up to the end of each partition; no transaction may be open there."""
        settings = {"group.id": "bench-outputs", "enable.auto.commit": False, "enable.partition.eof": True}
        found, ended = 0, set()
        with closing(
            Consumer({"bootstrap.servers": self.servers, "isolation.level": "read_committed", **settings})
        ) as consumer:
            consumer.assign([TopicPartition(self.target, number, OFFSET_BEGINNING) for number in range(PARTITIONS)])
            while len(ended) < PARTITIONS:
                for message in consumer.consume(10_000, 1.0):
                    error = message.error()
                    if error is None:
                        found += 1
                    elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001  (confluent-kafka's name for it)
                        ended.add(message.partition())
                    else:
                        sys.exit(f"the output messages can't be read: {error}")
        return found


@dataclass
class Clock:
    """The time from the first message to the last, for any number of threads.

    Args:
        messages: How many are to be processed.
        done: Called once, when the last of them is being processed.
    """

    messages: int
    done: Callable[[], object]
    began: float = 0.0
    ended: float = 0.0
    _after: dict[int, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Start with the first batch."""
        with self._lock:
            self.began = self.began or time.perf_counter()

    def count(self, messages: Iterable[Message]) -> None:
        """Count processed messages; those that are processed again, after a rebalance or an error, count once."""
        with self._lock:
            was = self.seen
            for message in messages:
                partition, offset = message.partition(), message.offset()
                assert partition is not None
                assert offset is not None
                self._after[partition] = max(self._after.get(partition, 0), offset + 1)
            self.ended = time.perf_counter()
            is_last = was < self.messages <= self.seen
        if is_last:
            self.done()

    @property
    def seen(self) -> int:
        """The number of messages that were processed: each partition from its beginning."""
        return sum(self._after.values())

    @property
    def rate(self) -> float:
        """Messages per second."""
        return self.seen / (self.ended - self.began)


def write(connection: Connection, messages: Sequence[Message]) -> None:
    """Insert the rows of a batch."""
    rows = [{"number": message.offset(), "text": (message.value() or b"").decode()} for message in messages]
    connection.execute(insert(results), rows)


def together(members: Sequence[Callable[[], None]]) -> None:
    """Run each in a thread of its own."""
    with ThreadPoolExecutor(len(members)) as threads:
        for running in [threads.submit(member) for member in members]:
            running.result()


def ours(place: Place, batch: int, messages: int, *, acknowledge: Acknowledge = "visible") -> float:
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


def ours_on_a_pool(place: Place, batch: int, messages: int) -> float:
    """DualProcessor: the same, on one pool."""
    name = uuid4().hex[:12]
    options = PoolOptions(acknowledge="decided")
    with dualwrite.create_pool(place.engine, kafka=place.servers, prefix=f"bench-{name}", options=options) as pool:
        return process(place, [pool] * place.members, batch, messages)


def process(place: Place, runners: Sequence[Any], batch: int, messages: int) -> float:
    """Process the messages with one DualProcessor for each of the runners; the rate is without the commit of the last batch."""
    target, group = place.topic(), f"bench-{uuid4().hex[:12]}"

    def stop() -> None:
        for processor in processors:
            processor.stop()

    def handle(some: Sequence[Message], tx: dualwrite.Transaction[Any]) -> None:
        clock.start()
        write(tx.db, some)
        tx.send_many(target, [message.value() for message in some])
        place.batches.append(len(some))
        clock.count(some)

    clock = Clock(messages, stop)
    processors = [
        DualProcessor(
            runner,
            {"bootstrap.servers": place.servers, "group.id": group},
            [place.source],
            handle_batch=handle,
            options=ProcessorOptions(batch=batch),
        )
        for runner in runners
    ]
    together([processor.run for processor in processors])
    return clock.rate


def database(place: Place, batch: int, messages: int) -> float:
    """Rows, then the offsets at Kafka: after a crash in between, the batch is processed again. No output messages."""
    done, group = threading.Event(), f"bench-{uuid4().hex[:12]}"
    clock = Clock(messages, done.set)

    def member() -> None:
        with closing(place.consumer(group)) as consumer:
            while not done.is_set():
                some = [one for one in consumer.consume(batch, 1.0) if one.error() is None]
                if not some:
                    continue
                clock.start()
                with place.engine.begin() as connection:
                    write(connection, some)
                consumer.commit(asynchronous=False)
                clock.count(some)

    together([member] * place.members)
    return clock.rate


def kafka_only(place: Place, batch: int, messages: int) -> float:
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
                some = [one for one in consumer.consume(batch, 1.0) if one.error() is None]
                if not some:
                    continue
                clock.start()
                producer.begin_transaction()
                for message in some:
                    producer.produce(target, message.value())
                producer.send_offsets_to_transaction(
                    consumer.position(consumer.assignment()), consumer.consumer_group_metadata(), TIMEOUT
                )
                producer.commit_transaction(TIMEOUT)
                clock.count(some)

    together([functools.partial(member, producer) for producer in producers])
    return clock.rate


ALTERNATIVES: Final[dict[str, Callable[[Place, int, int], float]]] = {
    OURS: ours,
    DECIDED: functools.partial(ours, acknowledge="decided"),
    POOL: ours_on_a_pool,
    DATABASE: database,
    KAFKA: kafka_only,
}


def new_topic(servers: str) -> str:
    """A new topic."""
    name = f"bench-{uuid4().hex[:12]}"
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic(name, PARTITIONS)])[name].result(TIMEOUT)
    return name


def fill(servers: str, topic: str, messages: int) -> None:
    """Produce the messages that are read."""
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 50, "queue.buffering.max.messages": 1_000_000})
    for number in range(messages):
        producer.produce(topic, VALUE, partition=number % PARTITIONS)
        if not number % 1000:
            producer.poll(0)
    if producer.flush(TIMEOUT):
        sys.exit("the messages could not be produced")


def verify(place: Place, name: str, messages: int) -> None:
    """Exit unless there are a row and an output message for each message; there may be more: the last batch may be larger."""
    with place.engine.begin() as connection:
        rows = connection.scalar(select(func.count()).select_from(results)) or 0
        connection.execute(results.delete())
    outputs = 0 if name == DATABASE else place.outputs()
    if (name != KAFKA and rows < messages) or (name != DATABASE and outputs < messages):
        sys.exit(f"{name}: {rows} rows and {outputs} output messages for {messages} messages")
    if name in (OURS, DECIDED, POOL) and rows != outputs:
        sys.exit(f"{name}: {rows} rows, but {outputs} output messages")


def table(place: Place, batch: int, rounds: int, *, whole: bool) -> None:
    """Measure every alternative in each round and print medians; ratios are medians of the rounds' ratios."""
    messages = place.messages if whole else min(place.messages, MAX_MESSAGES.get(batch, place.messages))
    found: dict[str, list[float]] = {name: [] for name in ALTERNATIVES}
    place.batches.clear()
    first = ProcessorTimes.now()
    for _ in range(rounds):
        for name, measure in ALTERNATIVES.items():
            found[name].append(measure(place, batch, messages))
            verify(place, name, messages)
    around = Conditions.since(first)
    members = "1 member" if place.members == 1 else f"{place.members} members"
    print(f"\n### Batches of {batch:,}: {messages:,} messages, {members}\n")
    print(f"| alternative | messages/s | ÷ {DATABASE} |\n|---|---|---|")
    for name, rates in found.items():
        ratio = statistics.median(mine / theirs for mine, theirs in zip(rates, found[DATABASE], strict=True))
        print(f"| {name} | {statistics.median(rates):,.0f} | {ratio:.2f} |")
    print(
        f"\nMean batch of DualProcessor: {statistics.mean(place.batches):.0f}. "
        f"Busy {around.busy:.0%}, stolen {around.stolen:.1%}, load average {around.load:.1f}. "
        "Rows and output messages are counted after each measurement.",
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
        fill(servers, source, chosen.messages)
        for members in chosen.members:
            place = Place(servers, engine, source, chosen.messages, members)
            for batch in chosen.batches:
                table(place, batch, chosen.rounds, whole=chosen.all)


if __name__ == "__main__":
    main()
