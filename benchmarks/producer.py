"""Compares the native producer with confluent-kafka: one-message transactions, bulk, memory. One run; see README.md."""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Protocol
from uuid import uuid4

import psutil
from confluent_kafka import Producer

from brokers import WARM_UP_SECONDS, describe, describe_own, own_broker
from cases import rotated
from committed import committed
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.librdkafka.admin import create_topic
from dualwrite.kafka.native.producer import NativeProducer
from figures import Spread, percentile
from options import count, part, positive, seconds
from progress import show_progress
from records import SIZE, VerificationError, check_records, records
from surroundings import line, without_database
from tables import with_range

TIMEOUT: Final = 60.0
WARM_UP: Final = 30
WARM_UP_SECONDS_OF_A_MEASUREMENT: Final = 1.0
CONFLUENT: Final = "confluent-kafka"
CONFLUENT_BATCH: Final = "confluent-kafka, produce_batch"
PLAIN: Final = "native, plain"
TWO_PHASE: Final = "native, 2PC"
MANY: Final = "native, 2PC, send_many"
PRODUCERS: Final = (CONFLUENT, PLAIN, TWO_PHASE)
_POLL_EVERY: Final = 1000
_FIRST_TIMESTAMP: Final = 1_700_000_000_000


@dataclass(frozen=True)
class Kind:
    """What messages have beside a value.

    Args:
        title: For the table.
        header: Whether each has a header `traceparent`, another one each time.
        rising: Whether each has a timestamp, a millisecond after the one before.
        names: The producers that can send them.
    """

    title: str
    header: bool
    rising: bool
    names: tuple[str, ...]

    def headers(self, number: int) -> list[tuple[str, str | bytes | None]] | None:
        """The headers of the message with this number."""
        return [("traceparent", b"00-%032x-%016x-01" % (number, number))] if self.header else None

    def timestamp(self, number: int) -> int | None:
        """The timestamp of the message with this number."""
        return _FIRST_TIMESTAMP + number if self.rising else None


VALUE: Final = Kind("value only", header=False, rising=False, names=(CONFLUENT, *PRODUCERS[1:], MANY, CONFLUENT_BATCH))
KINDS: Final = (
    VALUE,
    Kind("a timestamp each, rising", header=False, rising=True, names=(CONFLUENT, TWO_PHASE)),
    Kind("a header each", header=True, rising=False, names=(CONFLUENT, TWO_PHASE)),
    Kind("a header and a rising timestamp each", header=True, rising=True, names=(CONFLUENT, TWO_PHASE)),
)
"""`produce_batch` of confluent-kafka 2.16 takes neither headers nor timestamps, `send_many` one timestamp for all."""


class Client(Protocol):
    """A producer, as this benchmark uses it."""

    def transaction(self, topic: str, values: Iterable[bytes]) -> None:
        """Commit one transaction."""

    def abort(self, topic: str, value: bytes) -> None:
        """Send a message and abort the transaction."""

    def close(self) -> None:
        """Release everything."""


class Confluent:
    """confluent-kafka, configured for the task: no linger for single messages, a queue large enough for bulk."""

    def __init__(self, servers: str, transactional_id: str, kind: Kind = VALUE, *, bulk: bool, batch: bool = False) -> None:
        settings: dict[str, object] = {"bootstrap.servers": servers, "transactional.id": transactional_id}
        settings |= {"queue.buffering.max.messages": 1_000_000} if bulk else {"linger.ms": 0}
        self._kind, self._batch = kind, batch
        self._producer = Producer(settings)
        self._producer.init_transactions(TIMEOUT)

    def transaction(self, topic: str, values: Iterable[bytes]) -> None:
        """Commit one transaction."""
        producer = self._producer
        producer.begin_transaction()
        remaining, first = iter(values), 0
        while some := list(islice(remaining, _POLL_EVERY)):
            if self._batch:
                self._produce_batch(topic, some)
            else:
                self._produce(topic, some, first)
            first += len(some)
            producer.poll(0)
        producer.commit_transaction(TIMEOUT)

    def abort(self, topic: str, value: bytes) -> None:
        """Send a message and abort the transaction."""
        self._producer.begin_transaction()
        self._producer.produce(topic, value)
        self._producer.flush(TIMEOUT)
        self._producer.abort_transaction(TIMEOUT)

    def _produce(self, topic: str, values: list[bytes], first: int) -> None:
        kind, produce = self._kind, self._producer.produce
        if not (kind.header or kind.rising):
            for value in values:
                produce(topic, value)
            return
        for number, value in enumerate(values, first):
            more: dict[str, Any] = {"timestamp": kind.timestamp(number)} if kind.rising else {}
            produce(topic, value, headers=kind.headers(number), **more)

    def _produce_batch(self, topic: str, values: list[bytes]) -> None:
        if self._producer.produce_batch(topic, [{"value": value} for value in values]) != len(values):
            raise VerificationError("produce_batch did not take every message")

    def close(self) -> None:
        """Release everything."""
        del self._producer
        gc.collect()


class Native:
    """dualwrite's own producer, used directly."""

    def __init__(self, servers: str, transactional_id: str, kind: Kind = VALUE, *, two_phase: bool, many: bool) -> None:
        self._kind, self._many = kind, many
        self._producer = NativeProducer(KafkaConfig.of(servers), transactional_id, two_phase=two_phase)
        self._producer.init_transactions(timeout=TIMEOUT)

    def transaction(self, topic: str, values: Iterable[bytes]) -> None:
        """Commit one transaction."""
        producer, kind = self._producer, self._kind
        producer.begin_transaction()
        if self._many:
            producer.send_many(topic, values)
        elif kind.header or kind.rising:
            for number, value in enumerate(values):
                producer.send(topic, value, headers=kind.headers(number), timestamp=kind.timestamp(number))
        else:
            for value in values:
                producer.send(topic, value)
        producer.prepare_transaction(timeout=TIMEOUT)
        producer.commit_transaction(timeout=TIMEOUT)

    def abort(self, topic: str, value: bytes) -> None:
        """Send a message and abort the transaction."""
        self._producer.begin_transaction()
        self._producer.send(topic, value)
        self._producer.prepare_transaction(timeout=TIMEOUT)
        self._producer.abort_transaction(timeout=TIMEOUT)

    def close(self) -> None:
        """Release everything."""
        self._producer.close()


@dataclass(frozen=True)
class Place:
    """Where a measurement happens.

    Args:
        servers: Kafka.
    """

    servers: str

    def client(self, name: str, *, bulk: bool = False, kind: Kind = VALUE) -> Client:
        """A producer with its own transactional id."""
        transactional_id = f"bench-{uuid4().hex[:12]}"
        if name in (CONFLUENT, CONFLUENT_BATCH):
            return Confluent(self.servers, transactional_id, kind, bulk=bulk, batch=name == CONFLUENT_BATCH)
        return Native(self.servers, transactional_id, kind, two_phase=name != PLAIN, many=name == MANY)

    def topic(self, partitions: int) -> str:
        """Create a new topic."""
        name = f"bench-{uuid4().hex[:12]}"
        create_topic({"bootstrap.servers": self.servers}, name, partitions, timeout=TIMEOUT)
        return name

    def values(self, topic: str) -> Iterator[bytes]:
        """What a `read_committed` consumer gets."""
        return (message.value() or b"" for message in committed({"bootstrap.servers": self.servers}, topic))


@contextmanager
def clients(place: Place, name: str, number: int) -> Iterator[list[Client]]:
    """Several producers, each with its own transactional id; closed at the end."""
    with ExitStack() as opened:
        made = []
        for _ in range(number):
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
        return (percentile(self.each, share) or 0.0) * 1000


def in_turn(place: Place, name: str, ids: int, duration: float) -> Latencies:
    """One caller that uses the ids in turn."""
    topic, values = place.topic(1), records(0)
    with clients(place, name, ids) as made:
        for number in range(max(WARM_UP, ids)):
            made[number % ids].transaction(topic, [next(values)])
        each: list[float] = []
        began = last = time.perf_counter()
        while last - began < duration:
            made[len(each) % ids].transaction(topic, [next(values)])
            now = time.perf_counter()
            each.append(now - last)
            last = now
    check_records(name, "messages", {0: max(WARM_UP, ids) + len(each)}, place.values(topic))
    return Latencies(each, last - began)


def at_once(place: Place, name: str, ids: int, duration: float) -> Latencies:
    """One thread per id; each makes at least one transaction."""
    topic = place.topic(ids)
    with clients(place, name, ids) as made:
        for number, client in enumerate(made):
            client.transaction(topic, islice(records(number), 1))
        stop = time.perf_counter() + duration

        def work(number: int) -> list[float]:
            client, values = made[number], records(number, 1)
            each = []
            while (began := time.perf_counter()) < stop or not each:
                client.transaction(topic, [next(values)])
                each.append(time.perf_counter() - began)
            return each

        with ThreadPoolExecutor(ids) as threads:
            began = time.perf_counter()
            lists = [running.result() for running in [threads.submit(work, number) for number in range(ids)]]
            elapsed = time.perf_counter() - began
    written = {number: 1 + len(each) for number, each in enumerate(lists)}
    check_records(name, "messages", written, place.values(topic))
    return Latencies([latency for each in lists for latency in each], elapsed)


def bulk(place: Place, name: str, messages: int, transactions: int, kind: Kind = VALUE) -> float:
    """Messages per second in large transactions."""
    topic, values = place.topic(3), records(0)
    client = place.client(name, bulk=True, kind=kind)
    try:
        client.transaction(topic, islice(values, 1000))
        prepared = [list(islice(values, messages)) for _ in range(transactions)]  # to make them is no part of the measurement
        began = time.perf_counter()
        for some in prepared:
            client.transaction(topic, some)
        elapsed = time.perf_counter() - began
    finally:
        client.close()
    check_records(name, "messages", {0: 1000 + messages * transactions}, place.values(topic))
    return messages * transactions / elapsed


def memory(place: Place, name: str, messages: int, transactions: int) -> list[float]:
    """Resident megabytes of this process after each transaction."""
    topic, values = place.topic(3), records(0)
    client = place.client(name, bulk=True)
    process = psutil.Process()
    found = []
    try:
        for _ in range(transactions):
            client.transaction(topic, islice(values, messages))
            found.append(process.memory_info().rss / 2**20)
    finally:
        client.close()
    check_records(name, "messages", {0: messages * transactions}, place.values(topic))
    return found


def table(title: str, measure: Callable[[str, float], Latencies], duration: float, rounds: int) -> None:
    """Measure every producer in each round and print medians; ratios are those of the rounds. A first round is discarded."""
    found: dict[str, list[Latencies]] = {name: [] for name in PRODUCERS}
    for number in range(rounds + 1):
        for name in rotated(PRODUCERS, number):
            show_progress(f"{title}, {f'round {number}' if number else 'warm-up'}: {name}")
            measured = measure(name, duration if number else min(duration, WARM_UP_SECONDS_OF_A_MEASUREMENT))
            if number:
                found[name].append(measured)
    print(f"\n### {title}\n")
    print("| producer | tx/s | p50 ms | p99 ms | tx/s ÷ confluent | p50 ÷ confluent |\n|---|---|---|---|---|---|")
    for name, runs in found.items():
        rate, middle, high = (
            statistics.median(of) for of in zip(*((r.rate, r.at(0.5), r.at(0.99)) for r in runs), strict=True)
        )
        rates = Spread.of_ratios((r.rate for r in runs), (r.rate for r in found[CONFLUENT]))
        middles = Spread.of_ratios((r.at(0.5) for r in runs), (r.at(0.5) for r in found[CONFLUENT]))
        print(
            f"| {name} | {rate:,.0f} | {middle:.2f} | {high:.2f} | {with_range(rates, 2)} | {with_range(middles, 2)} |",
            flush=True,
        )


def bulk_table(place: Place, kind: Kind, messages: int, transactions: int, rounds: int) -> None:
    """As `table`, for messages per second."""
    found: dict[str, list[float]] = {name: [] for name in kind.names}
    for number in range(rounds + 1):
        for name in rotated(kind.names, number):
            show_progress(f"bulk, {kind.title}, {f'round {number}' if number else 'warm-up'}: {name}")
            rate = bulk(place, name, messages, transactions if number else 1, kind)
            if number:
                found[name].append(rate)
    print(f"\n### {transactions} transactions of {messages:,} of {SIZE} bytes: {kind.title}\n")
    print("| producer | messages/s | ÷ confluent |\n|---|---|---|")
    for name, rates in found.items():
        ratio = Spread.of_ratios(rates, found[CONFLUENT])
        print(f"| {name} | {statistics.median(rates):,.0f} | {with_range(ratio, 2)} |", flush=True)


def memory_table(place: Place, messages: int) -> None:
    """Resident memory while many messages are sent."""
    print(f"\n### Resident memory while {messages:,} messages are sent\n")
    print("| producer | after 10 % | at the end | growth |\n|---|---|---|---|")
    for name in (CONFLUENT, TWO_PHASE, MANY):
        show_progress(f"memory: {name}")
        sizes = memory(place, name, messages // 50, 50)
        print(f"| {name} | {sizes[4]:.0f} MiB | {sizes[-1]:.0f} MiB | {sizes[-1] - sizes[4]:+.1f} MiB |", flush=True)


def with_aborts(place: Place, name: str, duration: float, share: float, size: int) -> Latencies:
    """One caller whose transactions of one message are aborted in part, evenly; no aborted message may be visible."""
    topic, values, aborted, padding = place.topic(1), records(0), records(1), b"y" * (size - SIZE)
    each: list[float] = []
    commits = 0
    client = place.client(name)
    try:
        client.transaction(topic, [next(values) + padding])
        began = last = time.perf_counter()
        while last - began < duration:
            if int((len(each) + 1) * share) > int(len(each) * share):
                client.abort(topic, next(aborted) + padding)
            else:
                client.transaction(topic, [next(values) + padding])
                commits += 1
            now = time.perf_counter()
            each.append(now - last)
            last = now
    finally:
        client.close()
    check_records(name, "messages", {0: 1 + commits}, (value.removesuffix(padding) for value in place.values(topic)))
    return Latencies(each, last - began)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seconds", type=positive, default=3.0, help="duration of one measurement of single messages")
    parser.add_argument("--rounds", type=count, default=5, help="number of rounds; each measures every producer in turn")
    parser.add_argument("--ids", type=count, default=8, help="transactional ids in measurements with several ids")
    parser.add_argument("--bulk", type=count, default=100_000, help="messages per large transaction")
    parser.add_argument("--bulk-transactions", type=count, default=5, help="large transactions per measurement")
    parser.add_argument("--memory", type=int, default=5_000_000, help="messages of the memory measurement; 0 skips it")
    parser.add_argument(
        "--aborts", type=part, metavar="SHARE", help="measure only transactions of one message of which a share is aborted"
    )
    parser.add_argument("--size", type=count, default=1000, help=f"bytes of a message with --aborts, at least {SIZE}")
    parser.add_argument("--nodes", type=count, default=1, help="brokers of the cluster that is started")
    parser.add_argument("--kafka", metavar="HOST:PORT", help="an existing cluster; by default one broker is started")
    parser.add_argument("--broker-warm-up", type=seconds, default=WARM_UP_SECONDS, help="seconds; 0: a broker that starts fast")
    chosen = parser.parse_args(given)
    if chosen.size < SIZE:
        parser.error(f"--size must be at least {SIZE}")
    return chosen


def main(given: Sequence[str] | None = None) -> None:
    """Run the benchmark with the command line's options."""
    chosen = arguments(given)
    with ExitStack() as opened:
        if chosen.kafka:
            servers, cluster = chosen.kafka, describe({"bootstrap.servers": chosen.kafka})
        else:
            own = opened.enter_context(own_broker(chosen.broker_warm_up, nodes=chosen.nodes))
            servers, cluster = own.bootstrap_servers, describe_own(own, chosen.broker_warm_up)
        print(line(without_database(cluster, chosen, {})), flush=True)
        place = Place(servers)
        if chosen.aborts is not None:
            title = f"One message of {chosen.size:,} bytes, {chosen.aborts:.0%} aborted"
            table(
                title,
                lambda name, duration: with_aborts(place, name, duration, chosen.aborts, chosen.size),
                chosen.seconds,
                chosen.rounds,
            )
            return
        if chosen.memory > 0:  # first: what the others have freed would hide growth
            memory_table(place, chosen.memory)
        measures: Mapping[str, Callable[[str, float], Latencies]] = {
            "One message, one id": lambda name, duration: in_turn(place, name, 1, duration),
            f"One message, {chosen.ids} ids in turn, one caller": lambda name, duration: in_turn(
                place, name, chosen.ids, duration
            ),
            f"One message, {chosen.ids} ids, a thread each": lambda name, duration: at_once(place, name, chosen.ids, duration),
        }
        for title, measure in measures.items():
            table(title, measure, chosen.seconds, chosen.rounds)
        for kind in KINDS:
            bulk_table(place, kind, chosen.bulk, chosen.bulk_transactions, chosen.rounds)


if __name__ == "__main__":
    try:
        main()
    except VerificationError as error:
        sys.exit(f"VerificationError: {error}")
