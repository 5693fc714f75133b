"""Compares a pool with a journal with one without, and both with a plain commit; also while Kafka is down. See README.md.

It starts a broker of its own and kills it. Then it fills another journal, and measures how long that takes to publish.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

from sqlalchemy import Engine, TextClause, create_engine, text

import dualwrite
from dualwrite import JournalLimits, PoolOptions, SqlStateStore, Transaction, WriterPool
from dualwrite.devcluster import DevCluster
from dualwrite.relay.journal_drain import JournalDrain
from dualwrite.transactional_id import drainer_id
from figures import NONE, Spread, table, with_range
from options import WARM_UP_SECONDS, count, parser_of, positive, seconds
from processes import committed_values
from records import VerificationError, check_records, record, run_verified
from servers import Servers, servers, warm_up_broker
from surroundings import Load, heading, in_rounds, show_progress, surroundings

PLAIN: Final = "plain commit"
WITHOUT: Final = "pool"
WITH: Final = "pool with a journal"
DOWN: Final = "pool with a journal, Kafka down"
PLAIN_DOWN: Final = "plain commit, Kafka down"

_PARTITIONS: Final = 4
_LIMIT: Final = 120.0
_CONNECTIONS: Final = 32
"""More than the pools use."""
_WARM_UP: Final = 1.0
_UNLIMITED: Final = JournalLimits(entries=100_000_000, size=100_000_000_000)

_TABLE: Final = text("CREATE TABLE benchmark_links (writer integer, number integer)")
_DROP: Final = text("DROP TABLE IF EXISTS benchmark_links")
_INSERT: Final = text("INSERT INTO benchmark_links VALUES (:writer, :number)")
_WRITTEN: Final = text("SELECT writer, count(*), count(DISTINCT number), max(number) FROM benchmark_links GROUP BY writer")
_CLEAN: Final = text("TRUNCATE benchmark_links")
_FILL: Final = text(
    "INSERT INTO dualwrite_journal (prefix, topic, message_key, message_value, sent_at_ms, has_own_time, size) "
    "SELECT :prefix, :topic, convert_to((i % 1000)::text, 'UTF8'), "
    "convert_to(rpad('0.' || i || '.', 200, 'x'), 'UTF8'), CAST(extract(epoch FROM now()) * 1000 AS bigint), false, 203 "
    "FROM generate_series(0, :entries - 1) AS i"
)

Write = Callable[[int, int], object]
"""Commits the unit with this number, from 0, of a caller."""


@dataclass(frozen=True)
class Place:
    """The servers, and what units are written with."""

    servers: Servers
    broker: DevCluster
    engine: Engine
    callers: int
    topic: str

    def pool(self, prefix: str, options: PoolOptions, chosen: Any) -> WriterPool[Any]:
        kafka, size = self.servers.kafka, chosen.pool_size
        return dualwrite.create_pool(self.engine, prefix=prefix, kafka=kafka, options=options, size=size)

    def plain(self, caller: int, number: int) -> None:
        with self.engine.begin() as connection:
            connection.execute(_INSERT, {"writer": caller, "number": number})

    def unit(self, tx: Transaction[Any], caller: int, number: int) -> Transaction[Any]:
        tx.db.execute(_INSERT, {"writer": caller, "number": number})
        tx.send(self.topic, record(caller, number), key=str(caller))
        return tx

    def through(self, pool: WriterPool[Any]) -> Write:
        return lambda caller, number: pool.run(self.unit, caller, number)


class Callers:
    """Threads that commit units, one after the other; each counts its own from 0 over all measurements with this object."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.first = 0
        self.sent: dict[int, int] = {}

    def run(self, write: Write, duration: float, *, sends: bool = True) -> float:
        """Units per second."""
        place = self._place
        run(place.engine, _CLEAN)
        numbers = dict.fromkeys(range(self.first, self.first + place.callers), 0)  # new callers: each begins at 0
        self.first += place.callers
        began = time.perf_counter()

        def call(caller: int) -> None:
            while time.perf_counter() < began + duration:
                write(caller, numbers[caller])
                numbers[caller] += 1

        with ThreadPoolExecutor(place.callers) as threads:
            list(threads.map(call, numbers))
        took = time.perf_counter() - began
        with place.engine.connect() as connection:
            rows = {row[0]: tuple(row[1:]) for row in connection.execute(_WRITTEN)}
        if rows != {caller: (done, done, done - 1) for caller, done in numbers.items() if done}:
            raise VerificationError("the rows are not those that were written")
        if sends:
            self.sent |= numbers
        return sum(numbers.values()) / took


def measure(callers: Callers, writes: Mapping[str, Write], chosen: Any) -> tuple[dict[str, list[float]], Load]:
    """Measure all in each round, after a short one that is not counted: the rates by round."""

    def rate(name: str, counts: bool) -> float:
        duration = chosen.seconds if counts else min(_WARM_UP, chosen.seconds)
        return callers.run(writes[name], duration, sends=name not in (PLAIN, PLAIN_DOWN))

    return in_rounds("units", list(writes), chosen.rounds, rate)


def wait_until_open(place: Place, callers: Callers, pool: WriterPool[Any]) -> None:
    """Commit units until they go through the journal."""
    caller = callers.first
    callers.first += 1
    callers.sent[caller] = 0
    outcome = None
    while outcome != "journaled":
        outcome = pool.run(place.unit, caller, callers.sent[caller]).outcome
        callers.sent[caller] += 1


def wait_until_closed(store: SqlStateStore, prefix: str) -> tuple[int, float]:
    """How many messages the outage has left in the journal, and after how many seconds its pool has published them."""
    (gate,) = store.journal.gates(prefix, counts=True)
    entries = gate.entries or 0
    began = time.perf_counter()
    while store.journal.gates(prefix, counts=False)[0].is_open:
        if time.perf_counter() - began > _LIMIT + entries / 1000:
            raise VerificationError(f"the journal is not empty after {time.perf_counter() - began:.0f} s")
        time.sleep(0.02)
    return entries, time.perf_counter() - began


def drain(place: Place, store: SqlStateStore, entries: int) -> float:
    """Publish a journal that nobody writes into; the seconds, with opening the writer and closing the gate."""
    prefix, topic = f"drain-{uuid4().hex[:12]}", place.servers.make_topic(f"{place.topic}-drain", _PARTITIONS)
    store.journal.prepare(prefix)
    store.journal.open(prefix, "benchmark", _UNLIMITED)
    show_progress(f"filling a journal with {entries:,} messages")
    with place.engine.begin() as connection:
        connection.execute(_FILL, {"prefix": prefix, "topic": topic, "entries": entries})
    show_progress("publishing them")
    began = time.perf_counter()
    with dualwrite.connect(store, kafka=place.servers.kafka, transactional_id=drainer_id(prefix), lanes=1) as writer:
        work = JournalDrain(writer, prefix, "benchmark")
        while not work.turn().is_last:
            pass
    took = time.perf_counter() - began
    check_records("draining", "messages", {0: entries}, committed_values(place.servers.kafka, topic))
    return took


def report(place: Place, chosen: Any) -> str:
    callers = Callers(place)
    prefix = f"bench-{uuid4().hex[:12]}"
    with ExitStack() as pools, SqlStateStore(place.engine) as store:
        without = pools.enter_context(place.pool(f"{prefix}-without", PoolOptions(timeout=_LIMIT), chosen))
        options = PoolOptions(timeout=_LIMIT, when_kafka_is_down="journal", journal=_UNLIMITED)
        journaled = pools.enter_context(place.pool(prefix, options, chosen))
        writes = {PLAIN: place.plain, WITHOUT: place.through(without), WITH: place.through(journaled)}
        found, load = measure(callers, writes, chosen)
        place.broker.kill(1)
        wait_until_open(place, callers, journaled)
        down, load_down = measure(callers, {PLAIN_DOWN: place.plain, DOWN: place.through(journaled)}, chosen)
        place.broker.start(1)
        outage = wait_until_closed(store, prefix)
        pools.close()
        warm_up_broker(place.servers.kafka["bootstrap.servers"], chosen.broker_warm_up)
        alone = (chosen.drain, drain(place, store, chosen.drain))
    check_records("units", "messages", callers.sent, committed_values(place.servers.kafka, place.topic))
    return as_text(found | down, (load, load_down), outage, alone, chosen)


def as_text(
    found: Mapping[str, list[float]], loads: Sequence[Load], outage: tuple[int, float], alone: tuple[int, float], chosen: Any
) -> str:
    lines = []
    for name, plain, without in ((WITHOUT, PLAIN, WITHOUT), (WITH, PLAIN, WITHOUT), (DOWN, PLAIN_DOWN, None)):
        ratios = [with_range(Spread.of_ratios(found[name], found[plain]), 2)]
        ratios.append(NONE if without is None else with_range(Spread.of_ratios(found[name], found[without]), 3))
        lines.append([name, f"{statistics.median(found[name]):,.0f}", *ratios])
    head = ["units of one INSERT and one message", "units/s", "÷ plain commit", "÷ pool"]
    drained = [
        [name, f"{entries:,}", f"{seconds:.1f}", f"{entries / seconds:,.0f}"]
        for name, (entries, seconds) in (("by its pool, once the broker has started", outage), ("alone, a warm broker", alone))
    ]
    plain = " and ".join(f"{statistics.median(found[name]):,.0f}" for name in (PLAIN, PLAIN_DOWN))
    return (
        f"\n### {chosen.callers} callers, {chosen.pool_size} writers\n\n{table(head, lines)}\n\n"
        f"Plain commits: {plain} per second, with Kafka up and down.\n\n"
        f"{table(['publishing a journal', 'messages', 'seconds', 'messages/s'], drained)}\n\n"
        f"With Kafka up and down: {' '.join(map(str, loads))} Every row and message was compared."
    )


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--callers", type=count, default=32, help="threads that commit units")
    add("--pool-size", type=count, default=4, help="the number of a pool's writers")
    add("--seconds", type=positive, default=5.0, help="duration of one measurement")
    add("--rounds", type=count, default=5, help="number of rounds; each measures every alternative in turn")
    add("--drain", type=count, default=100_000, metavar="MESSAGES", help="how many messages of 200 bytes to publish alone")
    add("--url", help="an existing PostgreSQL database; by default a server is started")
    add("--broker-warm-up", type=seconds, default=WARM_UP_SECONDS, help="seconds for which the broker is warmed up")
    chosen = parser.parse_args()
    with ExitStack() as opened:
        found = opened.enter_context(servers(None, url=chosen.url, warm_up=chosen.broker_warm_up))
        assert found.broker is not None
        print(heading(surroundings(found.cluster, found.url)), flush=True)
        engine = create_engine(found.url, pool_size=chosen.callers + _CONNECTIONS)
        opened.callback(engine.dispose)
        for statement in (_DROP, _TABLE):
            run(engine, statement)
        opened.callback(run, engine, _DROP)
        topic = found.make_topic(f"bench-{uuid4().hex[:12]}", _PARTITIONS)
        print(report(Place(found, found.broker, engine, chosen.callers, topic), chosen), flush=True)


def run(engine: Engine, statement: TextClause) -> None:
    with engine.begin() as connection:
        connection.execute(statement)


if __name__ == "__main__":
    run_verified(main)
