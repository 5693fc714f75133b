"""Compares the native producer with confluent-kafka: transactions of one message and of many. See README.md."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final
from uuid import uuid4

from confluent_kafka import Producer

from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.native.native_producer import NativeProducer
from figures import FigureColumn, compared, percentile
from options import add_servers, count, parser_of, positive
from processes import committed_values
from records import SIZE, VerificationError, check_records, records, run_verified
from servers import Servers, servers
from surroundings import heading, in_rounds, surroundings

TIMEOUT: Final = 60.0
WARM_UP: Final = 30
CONFLUENT: Final = "confluent-kafka"
CONFLUENT_BATCH: Final = "confluent-kafka, produce_batch"
PLAIN: Final = "native, plain"
TWO_PHASE: Final = "native, 2PC"
MANY: Final = "native, 2PC, send_many"
PRODUCERS: Final = (CONFLUENT, PLAIN, TWO_PHASE)
_WARM_UP_SECONDS: Final = 1.0
_POLL_EVERY: Final = 1000
_FIRST_TIMESTAMP: Final = 1_700_000_000_000


@dataclass(frozen=True)
class Kind:
    """What messages have beside a value, and the producers that can send them."""

    title: str
    header: bool
    rising: bool
    names: tuple[str, ...] = (CONFLUENT, TWO_PHASE)

    def of(self, number: int) -> dict[str, Any]:
        """The header `traceparent`, another one each time, and the timestamp, a millisecond later each time."""
        found: dict[str, Any] = {"timestamp": _FIRST_TIMESTAMP + number} if self.rising else {}
        return found | ({"headers": [("traceparent", b"00-%032x-%016x-01" % (number, number))]} if self.header else {})


VALUE: Final = Kind("value only", header=False, rising=False, names=(*PRODUCERS, MANY, CONFLUENT_BATCH))
KINDS: Final = (
    VALUE,
    Kind("a timestamp each, rising", header=False, rising=True),
    Kind("a header each", header=True, rising=False),
    Kind("a header and a rising timestamp each", header=True, rising=True),
)
"""`produce_batch` of confluent-kafka 2.16 takes neither headers nor timestamps, `send_many` one timestamp for all."""


class Confluent:
    """confluent-kafka, configured for the task: no linger for single messages, a queue large enough for bulk."""

    def __init__(self, kafka: str, name: str, kind: Kind, *, bulk: bool) -> None:
        settings: dict[str, object] = {"bootstrap.servers": kafka, "transactional.id": f"bench-{uuid4().hex[:12]}"}
        settings |= {"queue.buffering.max.messages": 1_000_000} if bulk else {"linger.ms": 0}
        self._kind, self._batch = kind, name == CONFLUENT_BATCH
        self._producer = Producer(settings)
        self._producer.init_transactions(TIMEOUT)

    def transaction(self, topic: str, values: Iterable[bytes]) -> None:
        producer, kind, produce = self._producer, self._kind, self._producer.produce
        producer.begin_transaction()
        remaining, first = iter(values), 0
        while some := list(islice(remaining, _POLL_EVERY)):
            if self._batch:
                if producer.produce_batch(topic, [{"value": value} for value in some]) != len(some):
                    raise VerificationError("produce_batch did not take every message")
            elif kind is VALUE:
                for value in some:
                    produce(topic, value)
            else:
                for number, value in enumerate(some, first):
                    produce(topic, value, **kind.of(number))
            first += len(some)
            producer.poll(0)
        producer.commit_transaction(TIMEOUT)

    def close(self) -> None:
        del self._producer
        gc.collect()


class Native:
    """dualwrite's own producer, used directly."""

    def __init__(self, kafka: str, name: str, kind: Kind, *, bulk: bool) -> None:
        del bulk
        self._kind, self._many = kind, name == MANY
        self._producer = NativeProducer(KafkaConfig.of(kafka), f"bench-{uuid4().hex[:12]}", two_phase=name != PLAIN)
        self._producer.init_transactions(timeout=TIMEOUT)

    def transaction(self, topic: str, values: Iterable[bytes]) -> None:
        producer, kind, send = self._producer, self._kind, self._producer.send
        producer.begin_transaction()
        if self._many:
            producer.send_many(topic, values)
        elif kind is VALUE:
            for value in values:
                send(topic, value)
        else:
            for number, value in enumerate(values):
                send(topic, value, **kind.of(number))
        producer.prepare_transaction(timeout=TIMEOUT)
        producer.commit_transaction(timeout=TIMEOUT)

    def close(self) -> None:
        self._producer.close()


class Place:
    """The cluster, and new topics and producers on it."""

    def __init__(self, found: Servers) -> None:
        self._found = found

    def client(self, opened: ExitStack, name: str, kind: Kind = VALUE, *, bulk: bool = False) -> Any:
        """A producer with its own transactional id, closed with `opened`."""
        made = Confluent if name in (CONFLUENT, CONFLUENT_BATCH) else Native
        client = made(self._found.kafka["bootstrap.servers"], name, kind, bulk=bulk)
        opened.callback(client.close)
        return client

    def topic(self, partitions: int) -> str:
        return self._found.make_topic(f"bench-{uuid4().hex[:12]}", partitions)

    def check(self, name: str, topic: str, written: int) -> None:
        """Check that these records are what a `read_committed` consumer gets."""
        check_records(name, "messages", {0: written}, committed_values(self._found.kafka, topic))


@dataclass(frozen=True)
class Latencies:
    """One measurement of transactions: seconds for each transaction, and for all together."""

    each: list[float]
    elapsed: float

    @property
    def rate(self) -> float:
        return len(self.each) / self.elapsed


def in_turn(place: Place, name: str, ids: int, duration: float) -> Latencies:
    """One caller that uses the ids in turn."""
    topic, values = place.topic(1), records(0)
    each: list[float] = []
    first = max(WARM_UP, ids)
    with ExitStack() as opened:
        made = [place.client(opened, name) for _ in range(ids)]
        for number in range(first):
            made[number % ids].transaction(topic, [next(values)])
        began = last = time.perf_counter()
        while last - began < duration:
            made[len(each) % ids].transaction(topic, [next(values)])
            now = time.perf_counter()
            each.append(now - last)
            last = now
    place.check(name, topic, first + len(each))
    return Latencies(each, last - began)


def bulk(place: Place, name: str, messages: int, transactions: int, kind: Kind) -> float:
    """Messages per second in large transactions."""
    topic, values = place.topic(3), records(0)
    with ExitStack() as opened:
        client = place.client(opened, name, kind, bulk=True)
        client.transaction(topic, islice(values, 1000))
        prepared = [list(islice(values, messages)) for _ in range(transactions)]  # to make them is no part of the measurement
        began = time.perf_counter()
        for some in prepared:
            client.transaction(topic, some)
        elapsed = time.perf_counter() - began
    place.check(name, topic, 1000 + messages * transactions)
    return messages * transactions / elapsed


# --- tables -------------------------------------------------------------------------------------------------------------------


def latency_table(title: str, measure: Callable[[str, float], Latencies], duration: float, rounds: int) -> None:
    """Print medians of transactions; ratios are those of the rounds."""
    short = min(duration, _WARM_UP_SECONDS)
    found, _ = in_rounds(title, PRODUCERS, rounds, lambda name, counts: measure(name, duration if counts else short))
    columns: list[FigureColumn[Latencies]] = [
        FigureColumn("tx/s", lambda run: run.rate, 1, 0),
        FigureColumn("p50 ms", lambda run: percentile(run.each, 0.5), 1e3, 2),
        FigureColumn("p99 ms", lambda run: percentile(run.each, 0.99), 1e3, 2),
    ]
    print(f"\n### {title}\n\n{compared('producer', columns, found, CONFLUENT, base_heading='confluent')}", flush=True)


def bulk_table(place: Place, kind: Kind, messages: int, transactions: int, rounds: int) -> None:
    """The same for messages per second."""
    title = f"{transactions} transactions of {messages:,} of {SIZE} bytes: {kind.title}"

    def measure(name: str, counts: bool) -> float:
        return bulk(place, name, messages, transactions if counts else 1, kind)

    found, _ = in_rounds(title, kind.names, rounds, measure)
    columns: list[FigureColumn[float]] = [FigureColumn("messages/s", lambda rate: rate, 1, 0)]
    print(f"\n### {title}\n\n{compared('producer', columns, found, CONFLUENT, base_heading='confluent')}", flush=True)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--seconds", type=positive, default=3.0, help="duration of one measurement of single messages")
    add("--rounds", type=count, default=5, help="number of rounds; each measures every producer in turn")
    add("--ids", type=count, default=8, help="transactional ids in measurements with several ids")
    add("--bulk", type=count, default=100_000, help="messages per large transaction")
    add("--bulk-transactions", type=count, default=5, help="large transactions per measurement")
    add_servers(parser, is_writer=False)
    return parser.parse_args(given)


def main() -> None:
    chosen = arguments()
    with servers(chosen.kafka, has_database=False, warm_up=chosen.broker_warm_up) as found:
        print(heading(surroundings(found.cluster)), flush=True)
        place, ids = Place(found), chosen.ids
        measures: dict[str, Callable[[str, float], Latencies]] = {
            "One message, one id": lambda name, duration: in_turn(place, name, 1, duration),
            f"One message, {ids} ids in turn, one caller": lambda name, duration: in_turn(place, name, ids, duration),
        }
        for title, measure in measures.items():
            latency_table(title, measure, chosen.seconds, chosen.rounds)
        for kind in KINDS:
            bulk_table(place, kind, chosen.bulk, chosen.bulk_transactions, chosen.rounds)


if __name__ == "__main__":
    run_verified(main)
