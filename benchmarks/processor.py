"""Compares DualProcessor with consumers that guarantee less, by size of the batch. See README.md.

The time begins when the first batch is in its transaction, and ends with the commit by which enough messages are done; for
DualProcessor, when the next batch is handed to the handler, which is a little later.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import uuid4

from confluent_kafka import Consumer, KafkaException, Message, Producer
from sqlalchemy import BigInteger, Column, Connection, Engine, MetaData, String, Table, create_engine, insert, select

import dualwrite
from dualwrite.processor import DualProcessor, ProcessorOptions
from figures import FigureColumn, compared
from options import add_servers, count, counts, parser_of
from processes import committed
from records import VerificationError, check_records, place_of, record, run_verified
from servers import Servers, servers
from surroundings import heading, in_rounds, surroundings

JOINING: Final = {"group.initial.rebalance.delay.ms": "1000"}
"""Members that start together get their partitions together."""

TIMEOUT: Final = 60.0
PARTITIONS: Final = 4
MAX_MESSAGES: Final = {1: 500, 10: 5_000, 100: 50_000}
"""The maximum number of messages by size of the batch, unless --all is given: small batches would take too long."""

WARM_UP_BATCHES: Final = 20
OURS: Final = "DualProcessor"
POOL: Final = "DualProcessor on a pool"
DATABASE: Final = "database, then offsets"
KAFKA: Final = "consume-transform-produce"

results = Table("results", MetaData(), Column("number", BigInteger), Column("text", String(300)))


@dataclass
class Place:
    """The servers, the topic that is read, the members of the group (a thread each); and the latest target topic."""

    servers: Servers
    engine: Engine
    source: str
    members: int
    target: str = ""

    def new_target(self) -> str:
        self.target = self.servers.make_topic(new_name(), PARTITIONS)
        return self.target


@dataclass
class Clock:
    """The time from the first batch until `messages` have been committed; then `done` is called, once. For any thread.

    `after` has for each partition the offset after the messages that have been committed, from its beginning.
    """

    messages: int
    done: Callable[[], object]
    began: float = 0.0
    ended: float = 0.0
    after: Counter[int] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        with self._lock:
            self.began = self.began or time.perf_counter()

    def count(self, messages: Iterable[Message]) -> None:
        """Count messages that have been committed; those that are processed again, after a rebalance, count once."""
        with self._lock:
            was = self.after.total()
            for partition, offset in map(_where, messages):
                self.after[partition] = max(self.after[partition], offset + 1)
            self.ended = time.perf_counter()
            is_last = was < self.messages <= self.after.total()
        if is_last:
            self.done()

    @property
    def rate(self) -> float:
        return self.after.total() / (self.ended - self.began)


def _where(message: Message) -> tuple[int, int]:
    partition, offset = message.partition(), message.offset()
    assert partition is not None
    assert offset is not None
    return partition, offset


def new_name() -> str:
    return f"bench-{uuid4().hex[:12]}"


def write(connection: Connection, messages: Sequence[Message]) -> None:
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


def ours(place: Place, batch: int, messages: int) -> Clock:
    """DualProcessor: rows and output messages, each message once. Each member has a writer of its own."""
    name, kafka = new_name(), place.servers.kafka
    with ExitStack() as opened:
        runners = [
            opened.enter_context(dualwrite.connect(place.engine, kafka=kafka, transactional_id=f"{name}-{number}"))
            for number in range(place.members)
        ]
        return process(place, runners, batch, messages)


def ours_on_a_pool(place: Place, batch: int, messages: int) -> Clock:
    """DualProcessor: the same, on one pool."""
    with dualwrite.create_pool(place.engine, kafka=place.servers.kafka, prefix=new_name()) as pool:
        return process(place, [pool] * place.members, batch, messages)


def process(place: Place, runners: Sequence[Any], batch: int, messages: int) -> Clock:
    """Process the messages with one DualProcessor for each of the runners."""
    target, settings = place.new_target(), {**place.servers.kafka, "group.id": new_name()}

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

        return handle

    clock, options = Clock(messages, stop), ProcessorOptions(batch=batch)
    processors = [
        DualProcessor(runner, settings, [place.source], handle_batch=handler(), options=options) for runner in runners
    ]
    together([processor.run for processor in processors], stop)
    return clock


def consumed(place: Place, batch: int, done: threading.Event, group: str, handle: Callable[..., None]) -> None:
    """Consume batches with a consumer of our own until done."""
    more = {"isolation.level": "read_committed", "enable.auto.commit": False, "auto.offset.reset": "earliest"}
    with closing(Consumer({**place.servers.kafka, "group.id": group, **more})) as consumer:
        consumer.subscribe([place.source])
        while not done.is_set():
            messages = consumer.consume(batch, 1.0)
            for message in messages:
                if (error := message.error()) is not None:
                    raise KafkaException(error)
            if messages:
                handle(consumer, messages)


def database(place: Place, batch: int, messages: int) -> Clock:
    """Rows, then the offsets at Kafka: after a crash in between, the batch is processed again. No output messages."""
    done, group = threading.Event(), new_name()
    clock = Clock(messages, done.set)

    def handle(consumer: Consumer, some: list[Message]) -> None:
        with place.engine.begin() as connection:
            clock.start()  # where DualProcessor's starts
            write(connection, some)
        consumer.commit(asynchronous=False)
        clock.count(some)

    together([functools.partial(consumed, place, batch, done, group, handle)] * place.members, done.set)
    return clock


def kafka_only(place: Place, batch: int, messages: int) -> Clock:
    """Output messages and offsets in one Kafka transaction (KIP-447). No database."""
    target, done, group = place.new_target(), threading.Event(), new_name()
    clock = Clock(messages, done.set)

    def handle(producer: Producer, consumer: Consumer, some: list[Message]) -> None:
        producer.begin_transaction()
        clock.start()
        for message in some:
            producer.produce(target, message.value())
        offsets = consumer.position(consumer.assignment())
        producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), TIMEOUT)
        producer.commit_transaction(TIMEOUT)
        clock.count(some)

    members = []
    for number in range(place.members):
        producer = Producer({**place.servers.kafka, "transactional.id": f"{group}-{number}", "linger.ms": 0})
        producer.init_transactions(TIMEOUT)
        members.append(functools.partial(consumed, place, batch, done, group, functools.partial(handle, producer)))
    together(members, done.set)
    return clock


ALTERNATIVES: Final[dict[str, Callable[[Place, int, int], Clock]]] = {
    OURS: ours,
    POOL: ours_on_a_pool,
    DATABASE: database,
    KAFKA: kafka_only,
}


def fill(kafka: Mapping[str, Any], topic: str, messages: int) -> None:
    """Produce the messages that are read, a record for each: the partition is its writer, the offset its number."""
    settings = {"linger.ms": 50, "queue.buffering.max.messages": 1_000_000, "enable.idempotence": True}
    producer = Producer({**kafka, **settings})
    for number in range(messages):
        partition = number % PARTITIONS
        producer.produce(topic, record(partition, number // PARTITIONS), partition=partition)
        if not number % 1000:
            producer.poll(0)
    if producer.flush(TIMEOUT):
        sys.exit("the messages could not be produced")


def verify(name: str, clock: Clock, rows: Iterable[tuple[int, str]], outputs: Iterable[bytes]) -> None:
    """Check that a row and an output message are there for each message, from the first of each partition on.

    There may be more than were counted, because each member commits another batch before it stops. Only "database, then
    offsets" may have written a row twice, after a rebalance.

    Raises:
        VerificationError: A row or an output message is lost, doubled, or altered.
    """
    texts = []
    for number, content in rows:
        texts.append(content.encode())
        if place_of(texts[-1])[1] != number:
            raise VerificationError(f"{name}: the row of {content!r} has the number {number}")
    found = {} if name == KAFKA else {"rows": list(set(texts)) if name == DATABASE else texts}
    if name != DATABASE:
        found["output messages"] = list(outputs)
    processed = Counter(place_of(content)[0] for content in next(iter(found.values())))
    if processed.total() < clock.messages or any(processed[each] < offset for each, offset in clock.after.items()):
        raise VerificationError(f"{name}: {dict(processed)} by partition, but {clock.after} were counted")
    for what, contents in found.items():
        check_records(name, what, processed, contents)


def measure(place: Place, name: str, batch: int, messages: int) -> float:
    """Measure and verify an alternative once; returns messages per second."""
    clock = ALTERNATIVES[name](place, batch, messages)
    with place.engine.begin() as connection:
        rows = connection.execute(select(results.c.number, results.c.text)).all()
        connection.execute(results.delete())
    outputs = () if name == DATABASE else committed(place.servers.kafka, place.target)
    verify(name, clock, rows, (message.value() or b"" for message in outputs))
    return clock.rate


def report(place: Place, batch: int, messages: int, rounds: int) -> str:
    """Measure every alternative in each round; medians, and ratios of the rounds."""
    few = min(messages, WARM_UP_BATCHES * batch)
    found, load = in_rounds(
        f"batches of {batch:,}",
        list(ALTERNATIVES),
        rounds,
        lambda name, counts: measure(place, name, batch, messages if counts else few),
    )
    members = "1 member" if place.members == 1 else f"{place.members} members"
    title = f"\n### Batches of {batch:,}: {messages:,} messages, {members}"
    columns: list[FigureColumn[float]] = [FigureColumn("messages/s", lambda rate: rate, 1, 0)]
    shown = compared("alternative", columns, found, DATABASE, base_heading=DATABASE)
    return f"{title}\n\n{shown}\n\n{load} Rows and messages were compared each time."


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--messages", type=count, default=1_000_000, help="messages per measurement; fewer for small batches")
    add("--all", action="store_true", help="use as many messages with small batches")
    add("--batches", type=counts, default=[1, 100, 1000], help="sizes of the batches, comma-separated")
    add("--members", type=counts, default=[1], help="members of the consumer group, comma-separated")
    add("--rounds", type=count, default=3, help="number of rounds; each measures every alternative in turn")
    add_servers(parser)
    chosen = parser.parse_args()
    with ExitStack() as opened:
        found = opened.enter_context(servers(chosen.kafka, url=chosen.url, warm_up=chosen.broker_warm_up, config=JOINING))
        print(heading(surroundings(found.cluster, found.url)), flush=True)
        engine = create_engine(found.url)
        opened.callback(engine.dispose)
        results.create(engine)
        opened.callback(results.drop, engine)
        source = found.make_topic(new_name(), PARTITIONS)
        # an alternative is counted when its members continue with the next batch, so each needs one more
        fill(found.kafka, source, chosen.messages + max(chosen.members) * max(chosen.batches))
        for members in chosen.members:
            place = Place(found, engine, source, members)
            for batch in chosen.batches:
                most = chosen.messages if chosen.all else MAX_MESSAGES.get(batch, chosen.messages)
                print(report(place, batch, min(chosen.messages, most), chosen.rounds), flush=True)


if __name__ == "__main__":
    run_verified(main)
