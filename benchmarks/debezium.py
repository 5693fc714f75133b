"""Compares `dualwrite.Relay` with Debezium, whose exactly-once source support is switched on. See README.md.

Both publish the same rows of one table in Debezium's layout. Rate: a transaction commits many rows; the time from its commit
until a `read_committed` consumer has their messages and that of a row committed right afterwards. Delay: rows are committed one
by one at a steady rate; the time from each commit until the consumer has its message. Kills: `kill -9` within a backlog, then a
restart at once.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple
from uuid import uuid4

from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition
from sqlalchemy import Engine, create_engine, text

from connect_worker import CONNECTOR, DEBEZIUM_VERSION, ConnectWorker, connect_jars
from dualwrite.devcluster.locations import DevClusterError
from dualwrite.testing.postgres import PostgresServer
from figures import FigureColumn, Latency, compared, table
from options import add_servers, count, parser_of, positive
from processes import Worker, committed_values
from records import VerificationError, check_records, place_of, record, run_verified
from servers import POSTGRES, Servers, servers
from surroundings import heading, in_rounds, in_turns, show_progress, surroundings

PARTITIONS: Final = 4
TIMEOUT: Final = 180.0
WARM_UP_ROWS: Final = 2_000
NO_JARS: Final = 3
OURS: Final = "dualwrite relay"
FAST: Final = "Debezium, poll.interval.ms=10"
DEFAULT: Final = "Debezium, poll.interval.ms=500 (default)"
POLLS: Final = {FAST: 0.01, DEFAULT: 0.5}
NAMES: Final = (OURS, *POLLS)

_TABLE: Final = "benchmark_events"
_CREATE: Final = (
    f"CREATE TABLE {_TABLE} (id uuid PRIMARY KEY, aggregatetype varchar(255) NOT NULL, aggregateid varchar(255) NOT NULL, "
    "type varchar(255) NOT NULL, payload text, seq bigint GENERATED ALWAYS AS IDENTITY UNIQUE)"
)
_INTO: Final = f"INSERT INTO {_TABLE} (id, aggregatetype, aggregateid, type, payload) "
_FILL: Final = text(
    f"{_INTO}SELECT gen_random_uuid(), :kind, (i % 1000)::text, 'created', rpad(:writer || '.' || i || '.', 200, 'x') "
    "FROM generate_series(0, :rows - 1) AS i"
)
_ONE: Final = text(f"{_INTO}VALUES (gen_random_uuid(), :kind, :key, 'created', :value)")
_DELETE: Final = text(f"DELETE FROM {_TABLE}")
_LOG: Final = text("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")
_ACTIVE: Final = text("SELECT active FROM pg_replication_slots WHERE slot_name = :name")
_DROP_SLOT: Final = text("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = :name")


class Figures(NamedTuple):
    """Of one measurement; `log` is bytes a row."""

    rate: float
    log: float
    delay: Latency


class Reader:
    """A `read_committed` consumer of a whole topic; `seen` are its records with the time (`time.monotonic()`) of arrival."""

    def __init__(self, kafka: Any, topic: str) -> None:
        settings = {**kafka, "group.id": "dualwrite-benchmark", "enable.auto.commit": False, "log_level": 2}
        self._consumer = Consumer({**settings, "isolation.level": "read_committed"})
        self._consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in range(PARTITIONS)])
        self.seen: dict[bytes, float] = {}

    def until(self, number: int, name: str) -> None:
        """Read until there are so many different records."""
        deadline = time.monotonic() + TIMEOUT
        while len(self.seen) < number:
            first = self._consumer.poll(0.05)  # `consume` alone waits for a whole batch, or for its timeout
            now = time.monotonic()
            for message in () if first is None else (first, *self._consumer.consume(10_000, 0)):
                if (error := message.error()) is not None:
                    raise VerificationError(f"the topic can't be read: {error.str()}")
                self.seen.setdefault(message.value() or b"", now)
            if now > deadline:
                raise VerificationError(
                    f"{name}: only {len(self.seen):,} of {number:,} rows were published within {TIMEOUT:.0f} s"
                )

    def close(self) -> None:
        self._consumer.close()


@dataclass(frozen=True)
class Place:
    """The servers, and the process that inserts single rows."""

    servers: Servers
    engine: Engine
    connect: ConnectWorker
    inserter: Worker

    def asked(self, what: Any, **values: Any) -> Any:
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            return connection.scalar(what, values)

    def fill(self, run: Run, writer: int, rows: int) -> None:
        with self.engine.begin() as connection:
            connection.execute(_FILL, {"kind": run.kind, "writer": str(writer), "rows": rows})
            if run.deletes:
                connection.execute(_DELETE)

    def run(self, *statements: str) -> None:
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            for statement in statements:
                connection.execute(text(statement))


@dataclass
class Run:
    """One relay at work, with its own topic.

    Attributes:
        kind: The rows' `aggregatetype`.
        deletes: Whether whoever inserts a row deletes it in the same transaction, as Debezium's documentation advises.
        kill: Kills the relay and starts it again.
    """

    kind: str
    deletes: bool
    reader: Reader
    kill: Callable[[], None]

    @property
    def topic(self) -> str:
        return topic_of(self.kind)


def topic_of(kind: str) -> str:
    return f"outbox.event.{kind}"


@contextmanager
def running(place: Place, name: str) -> Iterator[Run]:
    """Start a relay, and warm it up."""
    kind = f"bench_{uuid4().hex[:12]}"
    place.run(f"TRUNCATE {_TABLE}", f"VACUUM {_TABLE}", "CHECKPOINT")
    place.servers.make_topic(topic_of(kind), PARTITIONS)
    with ExitStack() as opened:
        opened.callback(place.servers.delete_topic, topic_of(kind))
        reader = Reader(place.servers.kafka, topic_of(kind))
        opened.callback(reader.close)
        start = _ours if name == OURS else _debezium
        run = Run(kind, name != OURS, reader, opened.enter_context(start(place, name, kind)))
        place.fill(run, 1, WARM_UP_ROWS)
        reader.until(WARM_UP_ROWS, name)
        yield run


@contextmanager
def _ours(place: Place, name: str, kind: str) -> Iterator[Callable[[], None]]:
    """The command, as Debezium's worker is a process, too. It looks at an empty outbox as often as Debezium does."""
    del name
    url = place.engine.url.render_as_string(hide_password=False)
    where = ("--url", url, "--kafka", place.servers.kafka["bootstrap.servers"], "--table", _TABLE)
    command = [sys.executable, "-m", "dualwrite", "relay", "run", *where, "--layout", "debezium", "--order-by", "seq"]
    command += ["--name", kind, "--longest-poll", str(POLLS[FAST])]
    started: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))  # noqa: S603  (our own arguments)

    def kill_and_start() -> None:
        started[-1].kill()
        started[-1].wait()
        start()

    start()
    try:
        yield kill_and_start
    finally:
        started[-1].terminate()
        started[-1].wait()


@contextmanager
def _debezium(place: Place, name: str, kind: str) -> Iterator[Callable[[], None]]:
    """A connector, whose slot is there from now on: what was committed before is not published."""
    connect = place.connect

    def wait_until_active() -> None:
        _until(lambda: place.asked(_ACTIVE, name=kind) or connect.check(kind), f"{name} does not follow the database's log")

    def kill_and_start() -> None:
        connect.kill()
        connect.start()

    # without the deletions, which the event router would discard
    place.run(f"CREATE PUBLICATION {kind} FOR TABLE {_TABLE} WITH (publish = 'insert')")
    connect.publish(kind, place.servers.url, _TABLE, POLLS[name])
    try:
        wait_until_active()
        yield kill_and_start
    finally:
        connect.end(kind)
        _until(lambda: not place.asked(_ACTIVE, name=kind), f"{name} does not end")
        place.asked(_DROP_SLOT, name=kind)
        place.run(f"DROP PUBLICATION IF EXISTS {kind}")


def _until(fulfilled: Callable[[], Any], otherwise: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not fulfilled():
        if time.monotonic() > deadline:
            raise VerificationError(otherwise)
        time.sleep(0.05)


def measure(place: Place, name: str, chosen: argparse.Namespace) -> Figures:
    """Rate, log and delay."""
    with running(place, name) as run:
        log = place.asked(_LOG)
        place.fill(run, 0, chosen.rows)
        began = time.monotonic()
        place.fill(run, 3, 1)
        total = WARM_UP_ROWS + chosen.rows + 1
        run.reader.until(total, name)
        rate = chosen.rows / (time.monotonic() - began)
        log = float(place.asked(_LOG) - log) / chosen.rows
        place.inserter.start(insert_steadily, place.servers.url, run.kind, run.deletes, chosen.singles, chosen.pause)
        run.reader.until(total + chosen.singles, name)
        latency = Latency.of([run.reader.seen[record(2, number)] - at for number, at in enumerate(place.inserter.result())])
        written = {0: chosen.rows, 1: WARM_UP_ROWS, 2: chosen.singles, 3: 1}
        check_records(name, "messages", written, committed_values(place.servers.kafka, run.topic))
    return Figures(rate, log, latency)


def insert_steadily(url: str, kind: str, deletes: bool, rows: int, pause: float) -> list[float]:
    """Insert rows one by one; the time after each commit."""
    inserted: list[float] = []
    engine = create_engine(url)
    with engine.connect() as connection:
        for number in range(rows):
            values = {"kind": kind, "key": str(number % 1000), "value": record(2, number).decode()}
            connection.execute(_ONE, values)
            if deletes:
                connection.execute(_DELETE)
            connection.commit()
            inserted.append(time.monotonic())
            time.sleep(pause)
    engine.dispose()
    return inserted


def kill(place: Place, name: str, rows: int) -> list[str]:
    """Kill a relay when it has published a third of a backlog: doubled and missing messages, and the pause."""
    with running(place, name) as run:
        place.fill(run, 0, rows)
        run.reader.until(WARM_UP_ROWS + rows // 3, name)
        run.kill()
        run.reader.until(WARM_UP_ROWS + rows, name)
        numbers = Counter(map(place_of, committed_values(place.servers.kafka, run.topic)))
        times = sorted(run.reader.seen.values())
    pause = max(later - earlier for earlier, later in pairwise(times))
    return [name, f"{numbers.total() - len(numbers):,}", f"{WARM_UP_ROWS + rows - len(numbers):,}", f"{pause:.1f}"]


def report(place: Place, chosen: argparse.Namespace) -> str:
    """Measure all in each round; medians, and ratios of the rounds."""
    found, load = in_rounds(
        f"{chosen.rows:,} rows", NAMES, chosen.rounds, lambda name, _: measure(place, name, chosen), has_warm_up=False
    )
    columns: list[FigureColumn[Figures]] = [
        FigureColumn("rows/s", lambda each: each.rate, 1, 0),
        FigureColumn("WAL (bytes/row)", lambda each: each.log, 1, 0),
        FigureColumn("delay p50 (ms)", lambda each: each.delay.p50, 1e3, 1),
        FigureColumn("delay p99 (ms)", lambda each: each.delay.p99, 1e3, 1),
    ]
    shown = compared("relay", columns, found, FAST, base_heading="Debezium, 10 ms")
    pace = f"{chosen.rows:,} rows of 200 bytes, then single rows every {chosen.pause * 1e3:.0f} ms"
    return f"\n### {pace}\n\n{shown}\n\n{load} Every message was compared."


def report_kills(place: Place, chosen: argparse.Namespace) -> str:
    lines = []
    for number in range(chosen.kills):
        for name in in_turns([OURS, FAST], number):
            show_progress(f"kill {number + 1}/{chosen.kills}, {name}")
            lines.append(kill(place, name, chosen.rows))
    title = f"\n### kill -9 within {chosen.rows:,} rows"
    return f"{title}\n\n{table(['relay', 'doubled', 'missing', 'longest pause (s)'], sorted(lines))}"


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--rows", type=count, default=100_000, help="rows of a backlog")
    add("--singles", type=count, default=1_000, help="single rows")
    add("--pause", type=positive, default=0.01, help="seconds between two of them")
    add("--warm-up-rows", type=count, default=200_000, help="rows that Debezium's JVM is warmed up with")
    add("--rounds", type=count, default=3, help="number of rounds; each measures all in turn")
    add("--kills", type=count, default=3, help="number of kills of each")
    add_servers(parser, is_writer=False)
    chosen = parser.parse_args()
    try:
        jars = connect_jars()
    except DevClusterError as error:
        print(f"Debezium can't be measured. {error}", file=sys.stderr)
        sys.exit(NO_JARS)
    with ExitStack() as opened:
        database = opened.enter_context(PostgresServer(settings={**POSTGRES, "wal_level": "logical"}))
        found = opened.enter_context(servers(chosen.kafka, url=database.url, warm_up=chosen.broker_warm_up))
        around = surroundings(
            found.cluster, found.url, debezium=f"{CONNECTOR} {DEBEZIUM_VERSION}, exactly once, wal_level=logical"
        )
        print(heading(around), flush=True)
        engine = create_engine(found.url)
        opened.callback(engine.dispose)
        with engine.begin() as connection:
            connection.execute(text(_CREATE))
        bootstrap = found.kafka["bootstrap.servers"]
        connect = opened.enter_context(ConnectWorker(jars, bootstrap, f"bench-{uuid4().hex[:12]}"))
        inserter = Worker()
        opened.callback(inserter.close)
        place = Place(found, engine, connect, inserter)
        show_progress("warming up Debezium")
        with running(place, FAST) as run:
            place.fill(run, 0, chosen.warm_up_rows)
            run.reader.until(WARM_UP_ROWS + chosen.warm_up_rows, FAST)
        print(report(place, chosen), flush=True)
        print(report_kills(place, chosen), flush=True)


if __name__ == "__main__":
    run_verified(main)
