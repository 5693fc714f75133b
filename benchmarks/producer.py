"""Compares the native producer with confluent-kafka: one-message transactions, bulk, memory. One run; see README.md."""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Final, Protocol
from uuid import uuid4

import psutil
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from brokers import WARM_UP_SECONDS, own_broker
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.native.producer import NativeProducer

VALUE: Final = b"x" * 200
TIMEOUT: Final = 60.0
WARM_UP: Final = 30
CONFLUENT: Final = "confluent-kafka"
PLAIN: Final = "native, plain"
TWO_PHASE: Final = "native, 2PC"
MANY: Final = "native, 2PC, send_many"
PRODUCERS: Final = (CONFLUENT, PLAIN, TWO_PHASE)


class Client(Protocol):
    """A producer, as this benchmark uses it."""

    def transaction(self, topic: str, messages: int) -> None:
        """Commit one transaction."""

    def close(self) -> None:
        """Release everything."""


class Confluent:
    """confluent-kafka, configured for the task: no linger for single messages, a queue large enough for bulk."""

    def __init__(self, servers: str, transactional_id: str, *, bulk: bool) -> None:
        settings: dict[str, object] = {"bootstrap.servers": servers, "transactional.id": transactional_id}
        settings |= {"queue.buffering.max.messages": 1_000_000} if bulk else {"linger.ms": 0}
        self._producer = Producer(settings)
        self._producer.init_transactions(TIMEOUT)

    def transaction(self, topic: str, messages: int) -> None:
        """Commit one transaction."""
        producer = self._producer
        producer.begin_transaction()
        for number in range(messages):
            producer.produce(topic, VALUE)
            if not number % 1000:
                producer.poll(0)
        producer.commit_transaction(TIMEOUT)

    def close(self) -> None:
        """Release everything."""
        del self._producer
        gc.collect()


class Native:
    """dualwrite's own producer, used directly."""

    def __init__(self, servers: str, transactional_id: str, *, two_phase: bool, many: bool) -> None:
        self._many = many
        self._producer = NativeProducer(KafkaConfig.of(servers), transactional_id, two_phase=two_phase)
        self._producer.init_transactions(timeout=TIMEOUT)

    def transaction(self, topic: str, messages: int) -> None:
        """Commit one transaction."""
        producer = self._producer
        producer.begin_transaction()
        if self._many:
            producer.send_many(topic, repeat(VALUE, messages))
        else:
            for _ in range(messages):
                producer.send(topic, VALUE)
        producer.prepare_transaction(timeout=TIMEOUT)
        producer.commit_transaction(timeout=TIMEOUT)

    def close(self) -> None:
        """Release everything."""
        self._producer.close()


@dataclass(frozen=True)
class Place:
    """Where a measurement happens.

    Args:
        servers: Kafka.
        poll: The maximum number of seconds that one poll waits when messages are counted.
    """

    servers: str
    poll: float

    def client(self, name: str, *, bulk: bool = False) -> Client:
        """A producer with its own transactional id."""
        transactional_id = f"bench-{uuid4().hex[:12]}"
        if name == CONFLUENT:
            return Confluent(self.servers, transactional_id, bulk=bulk)
        return Native(self.servers, transactional_id, two_phase=name != PLAIN, many=name == MANY)

    def topic(self, partitions: int) -> str:
        """Create a new topic."""
        name = f"bench-{uuid4().hex[:12]}"
        admin = AdminClient({"bootstrap.servers": self.servers})
        admin.create_topics([NewTopic(name, partitions)])[name].result(TIMEOUT)
        return name

    def committed(self, topic: str) -> int:
        """How many messages a read_committed consumer sees."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.servers,
                "group.id": topic,
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
            }
        )
        try:
            waiting = set(consumer.list_topics(topic, timeout=TIMEOUT).topics[topic].partitions)
            consumer.assign([TopicPartition(topic, partition, 0) for partition in waiting])
            seen = 0
            while waiting:
                for message in consumer.consume(10_000, timeout=self.poll):
                    if message.error() is None:
                        seen += 1
                    else:
                        waiting.discard(message.partition())
            return seen
        finally:
            consumer.close()


@contextmanager
def clients(place: Place, name: str, count: int) -> Iterator[list[Client]]:
    """Several producers, each with its own transactional id; closed at the end."""
    with ExitStack() as opened:
        made = []
        for _ in range(count):
            client = place.client(name)
            opened.callback(client.close)
            made.append(client)
        yield made


@dataclass(frozen=True)
class Latencies:
    """One measurement of transactions: seconds for each transaction, and for all together."""

    each: list[float]
    elapsed: float

    @property
    def rate(self) -> float:
        """Transactions per second."""
        return len(self.each) / self.elapsed

    def at(self, share: float) -> float:
        """A quantile, in milliseconds."""
        return sorted(self.each)[min(int(len(self.each) * share), len(self.each) - 1)] * 1000


def in_turn(place: Place, name: str, ids: int, seconds: float) -> Latencies:
    """One caller that uses the ids in turn."""
    topic = place.topic(1)
    with clients(place, name, ids) as made:
        for number in range(max(WARM_UP, ids)):
            made[number % ids].transaction(topic, 1)
        each: list[float] = []
        began = last = time.perf_counter()
        while last - began < seconds:
            made[len(each) % ids].transaction(topic, 1)
            now = time.perf_counter()
            each.append(now - last)
            last = now
    verify(place, topic, len(each) + max(WARM_UP, ids))
    return Latencies(each, last - began)


def at_once(place: Place, name: str, ids: int, seconds: float) -> Latencies:
    """One thread per id."""
    topic = place.topic(ids)
    with clients(place, name, ids) as made:
        for client in made:
            client.transaction(topic, 1)
        lists: list[list[float]] = [[] for _ in made]
        stop = time.perf_counter() + seconds

        def work(client: Client, each: list[float]) -> None:
            while (began := time.perf_counter()) < stop:
                client.transaction(topic, 1)
                each.append(time.perf_counter() - began)

        threads = [threading.Thread(target=work, args=pair) for pair in zip(made, lists, strict=True)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        elapsed = time.perf_counter() - began
    each = [latency for some in lists for latency in some]
    verify(place, topic, len(each) + ids)
    return Latencies(each, elapsed)


def bulk(place: Place, name: str, messages: int, transactions: int) -> float:
    """Messages per second in large transactions."""
    topic = place.topic(3)
    client = place.client(name, bulk=True)
    try:
        client.transaction(topic, 1000)
        began = time.perf_counter()
        for _ in range(transactions):
            client.transaction(topic, messages)
        elapsed = time.perf_counter() - began
    finally:
        client.close()
    verify(place, topic, messages * transactions + 1000)
    return messages * transactions / elapsed


def memory(place: Place, name: str, messages: int, transactions: int) -> list[float]:
    """Resident megabytes of this process after each transaction."""
    topic = place.topic(3)
    client = place.client(name, bulk=True)
    process = psutil.Process()
    try:
        found = []
        for _ in range(transactions):
            client.transaction(topic, messages)
            found.append(process.memory_info().rss / 2**20)
        return found
    finally:
        client.close()


def verify(place: Place, topic: str, expected: int) -> None:
    """Exit unless every message was committed exactly once."""
    seen = place.committed(topic)
    if seen != expected:
        sys.exit(f"{topic}: {seen} committed messages instead of {expected}")


def table(title: str, measure: Callable[[str], Latencies], rounds: int) -> None:
    """Measure every producer in each round and print medians; ratios are medians of the rounds' ratios."""
    found: dict[str, list[Latencies]] = {name: [] for name in PRODUCERS}
    for _ in range(rounds):
        for name in PRODUCERS:
            found[name].append(measure(name))
    print(f"\n### {title}\n")
    print("| producer | tx/s | p50 ms | p99 ms | tx/s ÷ confluent | p50 ÷ confluent |\n|---|---|---|---|---|---|")
    for name, runs in found.items():
        rate, middle, high = (
            statistics.median(of) for of in zip(*((r.rate, r.at(0.5), r.at(0.99)) for r in runs), strict=True)
        )
        pairs = list(zip(runs, found[CONFLUENT], strict=True))
        rates = statistics.median(ours.rate / theirs.rate for ours, theirs in pairs)
        middles = statistics.median(ours.at(0.5) / theirs.at(0.5) for ours, theirs in pairs)
        print(f"| {name} | {rate:,.0f} | {middle:.2f} | {high:.2f} | {rates:.2f} | {middles:.2f} |")


def bulk_table(place: Place, messages: int, transactions: int, rounds: int) -> None:
    """As `table`, for messages per second."""
    found: dict[str, list[float]] = {name: [] for name in (*PRODUCERS, MANY)}
    for _ in range(rounds):
        for name, rates in found.items():
            rates.append(bulk(place, name, messages, transactions))
    print(f"\n### {transactions} transactions of {messages:,} of {len(VALUE)} bytes\n")
    print("| producer | messages/s | ÷ confluent |\n|---|---|---|")
    for name, rates in found.items():
        ratio = statistics.median(ours / theirs for ours, theirs in zip(rates, found[CONFLUENT], strict=True))
        print(f"| {name} | {statistics.median(rates):,.0f} | {ratio:.2f} |")


def memory_table(place: Place, messages: int) -> None:
    """Resident memory while many messages are sent."""
    print(f"\n### Resident memory while {messages:,} messages are sent\n")
    print("| producer | after 10 % | at the end | growth |\n|---|---|---|---|")
    for name in (CONFLUENT, TWO_PHASE, MANY):
        sizes = memory(place, name, messages // 50, 50)
        print(f"| {name} | {sizes[4]:.0f} MiB | {sizes[-1]:.0f} MiB | {sizes[-1] - sizes[4]:+.1f} MiB |")


def main(given: Sequence[str] | None = None) -> None:
    """Run the benchmark with the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of one measurement of single messages")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds; each measures every producer in turn")
    parser.add_argument("--ids", type=int, default=8, help="transactional ids in measurements with several ids")
    parser.add_argument("--bulk", type=int, default=100_000, help="messages per large transaction")
    parser.add_argument("--bulk-transactions", type=int, default=5, help="large transactions per measurement")
    parser.add_argument("--memory", type=int, default=5_000_000, help="messages of the memory measurement; 0 skips it")
    parser.add_argument("--poll", type=float, default=1.0, help="seconds that one poll waits when messages are verified")
    parser.add_argument("--kafka", metavar="HOST:PORT", help="an existing cluster; by default one broker is started")
    parser.add_argument("--broker-warm-up", type=float, default=WARM_UP_SECONDS, help="seconds; 0: a broker that starts fast")
    chosen = parser.parse_args(given)
    with ExitStack() as opened:
        servers = chosen.kafka or opened.enter_context(own_broker(chosen.broker_warm_up)).bootstrap_servers
        place = Place(servers, chosen.poll)
        measures = {
            "One message, one id": lambda name: in_turn(place, name, 1, chosen.seconds),
            f"One message, {chosen.ids} ids in turn, one caller": lambda name: in_turn(place, name, chosen.ids, chosen.seconds),
            f"One message, {chosen.ids} ids, a thread each": lambda name: at_once(place, name, chosen.ids, chosen.seconds),
        }
        for title, measure in measures.items():
            table(title, measure, chosen.rounds)
        bulk_table(place, chosen.bulk, chosen.bulk_transactions, chosen.rounds)
        if chosen.memory:
            memory_table(place, chosen.memory)


if __name__ == "__main__":
    main()
