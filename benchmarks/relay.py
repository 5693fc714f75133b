"""Compares a relay that is exactly once with one that is at least once: send, flush, delete. See README.md.

Rate: a transaction commits many rows; the time from its commit until the outbox is empty. Delay: rows are committed one by one
at a steady rate; the time from each commit until a `read_committed` consumer has the message.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from uuid import uuid4

from sqlalchemy import Engine, create_engine, text

from figures import FigureColumn, Latency, compared
from options import add_servers, count, counts, parser_of, positive
from orders import clean, prepare, remove
from processes import Worker, arrivals, committed_values, exactly_once, relay
from records import VerificationError, check_records, place_of, record, run_verified
from servers import Servers, servers
from surroundings import heading, in_rounds, surroundings

PARTITIONS: Final = 4
TIMEOUT: Final = 120.0
WARM_UP_ROWS: Final = 2_000
OURS: Final = "dualwrite.Relay, exactly once"
THEIRS: Final = "polling relay, at least once"
NAMES: Final = (OURS, THEIRS)

_FILL: Final = text(
    "INSERT INTO benchmark_outbox (topic, key, value) SELECT :topic, convert_to((i % 1000)::text, 'UTF8'), "
    "convert_to(rpad(:writer || '.' || i || '.', 200, 'x'), 'UTF8') FROM generate_series(0, :rows - 1) AS i"
)
_ONE: Final = text("INSERT INTO benchmark_outbox (topic, key, value) VALUES (:topic, :key, :value)")
_ANY: Final = text("SELECT EXISTS (SELECT FROM benchmark_outbox)")


class Figures(NamedTuple):
    """Of one measurement."""

    rate: float
    delay: Latency


@dataclass(frozen=True)
class Place:
    """The servers, and the processes of the relay and of the consumer."""

    servers: Servers
    engine: Engine
    relay: Worker
    consumer: Worker

    def start(self, name: str, batch: int) -> None:
        kafka, url = self.servers.kafka, self.servers.url
        if name == OURS:
            self.relay.start(exactly_once, url, kafka, batch, f"bench-{uuid4().hex[:12]}")
        else:
            self.relay.start(relay, url, kafka, batch)

    def new_topic(self) -> str:
        return self.servers.make_topic(f"bench-{uuid4().hex[:12]}", PARTITIONS)

    def fill(self, topic: str, writer: int, rows: int) -> None:
        with self.engine.begin() as connection:
            connection.execute(_FILL, {"topic": topic, "writer": str(writer), "rows": rows})

    def wait_until_empty(self, name: str) -> None:
        deadline = time.monotonic() + TIMEOUT
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            while connection.scalar(_ANY):
                if time.monotonic() > deadline:
                    raise VerificationError(f"{name}: the outbox is not empty after {TIMEOUT:.0f} s")
                time.sleep(0.005)


def rate(place: Place, name: str, batch: int, rows: int) -> float:
    """Rows per second of a backlog; the relay was warmed up by another one."""
    topic = place.new_topic()
    clean(place.engine)
    place.start(name, batch)
    place.fill(topic, 1, WARM_UP_ROWS)
    place.wait_until_empty(name)
    place.fill(topic, 0, rows)
    began = time.perf_counter()
    place.wait_until_empty(name)
    took = time.perf_counter() - began
    place.relay.finish()
    check_records(name, "messages", {0: rows, 1: WARM_UP_ROWS}, committed_values(place.servers.kafka, topic))
    return rows / took


def delay(place: Place, name: str, batch: int, seconds: float, pause: float) -> Latency:
    """How long single rows take from their commit to a consumer."""
    topic = place.new_topic()
    clean(place.engine)
    place.start(name, batch)
    place.consumer.start(arrivals, place.servers.kafka, topic)
    place.fill(topic, 1, WARM_UP_ROWS)
    place.wait_until_empty(name)
    inserted = _insert_steadily(place.engine, topic, seconds, pause)
    place.relay.finish()
    found = {content: at for content, at in place.consumer.finish() if place_of(content)[0] == 0}
    check_records(name, "messages", {0: len(inserted), 1: WARM_UP_ROWS}, committed_values(place.servers.kafka, topic))
    return Latency.of([found[record(0, number)] - at for number, at in enumerate(inserted)])


def _insert_steadily(engine: Engine, topic: str, seconds: float, pause: float) -> list[float]:
    """Insert rows one by one; the time after each commit."""
    inserted: list[float] = []
    end = time.monotonic() + seconds
    with engine.connect() as connection:
        while time.monotonic() < end:
            number = len(inserted)
            connection.execute(_ONE, {"topic": topic, "key": b"%d" % (number % 1000), "value": record(0, number)})
            connection.commit()
            inserted.append(time.monotonic())
            time.sleep(pause)
    return inserted


def report(place: Place, batch: int, chosen: Any) -> str:
    """Measure both in each round; medians, and ratios of the rounds."""

    def measure(name: str, _: bool) -> Figures:
        return Figures(rate(place, name, batch, chosen.rows), delay(place, name, batch, chosen.seconds, chosen.pause))

    found, load = in_rounds(f"batches of {batch:,}", NAMES, chosen.rounds, measure, has_warm_up=False)
    columns: list[FigureColumn[Figures]] = [
        FigureColumn("rows/s", lambda each: each.rate, 1, 0),
        FigureColumn("delay p50 (ms)", lambda each: each.delay.p50, 1e3, 1),
        FigureColumn("delay p99 (ms)", lambda each: each.delay.p99, 1e3, 1),
    ]
    shown = compared("relay", columns, found, THEIRS, base_heading="at least once")
    title = f"\n### Batches of {batch:,}: {chosen.rows:,} rows of 200 bytes"
    return f"{title}\n\n{shown}\n\n{load} Every message was compared."


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--rows", type=count, default=200_000, help="rows of a backlog")
    add("--batches", type=counts, default=[500, 2000], help="the maximum number of rows of a batch, comma-separated")
    add("--seconds", type=positive, default=10.0, help="seconds for which single rows are inserted")
    add("--pause", type=positive, default=0.005, help="seconds between two of them")
    add("--rounds", type=count, default=3, help="number of rounds; each measures both in turn")
    add_servers(parser)
    chosen = parser.parse_args()
    with ExitStack() as opened:
        found = opened.enter_context(servers(chosen.kafka, url=chosen.url, warm_up=chosen.broker_warm_up))
        print(heading(surroundings(found.cluster, found.url)), flush=True)
        engine = create_engine(found.url)
        opened.callback(engine.dispose)
        prepare(engine)
        opened.callback(remove, engine)
        place = Place(found, engine, Worker(), Worker())
        opened.callback(place.relay.close)
        opened.callback(place.consumer.close)
        for batch in chosen.batches:
            print(report(place, batch, chosen), flush=True)


if __name__ == "__main__":
    run_verified(main)
