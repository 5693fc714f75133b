"""How long `connect` and `create_pool` take some distance away from database and Kafka, and what they send. See README.md."""

from __future__ import annotations

import argparse
import re
import secrets
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from sqlalchemy import create_engine, text

import dualwrite
from dualwrite.testing.postgres import PostgresServer
from network import Network, Passed
from options import count, round_trips, seconds
from progress import show_progress
from services import POSTGRES, services
from tables import NONE, table

_MILLI: Final = 1e3
_STATEMENT: Final = re.compile(r"LOG: {2}(?:statement|execute [^:]*): (.*)")
_LENGTH: Final = 110


class Closeable(Protocol):
    """A writer or a pool."""

    def close(self) -> None:
        """Close it."""
        ...


Opening = Callable[[Any, Any, str], Closeable]


@dataclass(frozen=True)
class Opened:
    """One opening.

    Args:
        duration: How long it took, in seconds.
        passed: What the proxy has forwarded meanwhile.
    """

    duration: float
    passed: Passed


@dataclass(frozen=True)
class Line:
    """One line of the report.

    Args:
        what: What was opened.
        round_trip: The round trip, in seconds.
        opened: Each time that it was opened.
        statements: What it executed in the database when it was opened once more.
    """

    what: str
    round_trip: float
    opened: Sequence[Opened]
    statements: Counter[str]

    @property
    def duration(self) -> float:
        """The median of the durations."""
        return statistics.median(each.duration for each in self.opened)


def openings(lanes: int, pool_size: int | None) -> dict[str, Opening]:
    """What is opened, by its title."""
    size = {} if pool_size is None else {"size": pool_size}

    def connect(engine: Any, kafka: Any, name: str) -> Closeable:
        return dualwrite.connect(engine, kafka=kafka, transactional_id=name, lanes=lanes)

    def create_pool(engine: Any, kafka: Any, name: str) -> Closeable:
        return dualwrite.create_pool(engine, kafka=kafka, prefix=name, **size)

    return {f"connect(lanes={lanes})": connect, f"create_pool({'' if pool_size is None else f'size={pool_size}'})": create_pool}


@contextmanager
def statements_of(server: PostgresServer, found: Counter[str]) -> Iterator[None]:
    """Count the statements of connections that begin in the block, by the server's log."""
    engine = create_engine(server.url)
    with engine.connect() as connection, connection.execution_options(isolation_level="AUTOCOMMIT"):
        before = len(server.log())
        connection.execute(text("ALTER ROLE CURRENT_USER SET log_statement = 'all'"))
        try:
            yield
        finally:
            connection.execute(text("ALTER ROLE CURRENT_USER RESET log_statement"))
    engine.dispose()
    found.update(_STATEMENT.findall(server.log()[before:]))


def opened(network: Network, opening: Opening, name: str) -> Opened:
    """Open and close once, with an engine that has no connection yet."""
    engine = create_engine(network.url)
    before, began = network.passed(), time.perf_counter()
    made = opening(engine, network.kafka, name)
    duration, after = time.perf_counter() - began, network.passed()
    made.close()
    engine.dispose()
    return Opened(duration, after.since(before))


def lines(network: Network, server: PostgresServer, options: argparse.Namespace) -> Iterator[Line]:
    """Open everything at every round trip: with a new id, and with one that was used before."""
    for title, opening in openings(options.lanes, options.pool_size).items():
        known = f"known-{secrets.token_hex(4)}"
        network.proxy.set_round_trip(0.0)
        for _ in range(2):  # imports, and the JVM's first time
            opened(network, opening, known)
        for kind in ("new id", "known id"):
            for round_trip in options.rtt:
                show_progress(f"{title}, {kind}, {round_trip * _MILLI:g} ms")
                network.proxy.set_round_trip(round_trip)
                names = [known if kind == "known id" else secrets.token_hex(4) for _ in range(options.rounds + 1)]
                found = [opened(network, opening, name) for name in names[1:]]
                statements: Counter[str] = Counter()
                with statements_of(server, statements):
                    opened(network, opening, names[0])
                yield Line(f"{title}, {kind}", round_trip, found, statements)


def report(found: Sequence[Line]) -> str:
    """The lines as a Markdown table."""
    nearby = {each.what: each.duration for each in found if not each.round_trip}
    head = [
        "what",
        "RTT ms",
        "ms",
        "min … max",
        "round trips waited for",
        "statements",
        "database: connections",
        "exchanges",
        "Kafka: connections",
        "exchanges",
    ]
    return table(head, [_cells(each, nearby.get(each.what)) for each in found], names=1)


def _cells(line: Line, nearby: float | None) -> list[str]:
    every = [each.duration * _MILLI for each in line.opened]
    waited = NONE if nearby is None or not line.round_trip else f"{(line.duration - nearby) / line.round_trip:.1f}"
    sides = [[getattr(each.passed, side) for each in line.opened] for side in ("database", "kafka")]
    counts = [
        statistics.median(getattr(each, what) for each in side) for side in sides for what in ("connections", "exchanges")
    ]
    return [
        line.what,
        f"{line.round_trip * _MILLI:g}",
        f"{line.duration * _MILLI:.1f}",
        f"{min(every):.1f} … {max(every):.1f}",
        waited,
        str(line.statements.total()),
        *(f"{number:.0f}" for number in counts),
    ]


def statements_report(line: Line) -> str:
    """Every statement of a line, with how often it was executed."""
    each = (f"{number:4}  {' '.join(what.split())[:_LENGTH]}" for what, number in line.statements.most_common())
    return "\n".join([f"{line.what}:", *each])


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rtt", type=round_trips, default=[0.0, 0.001], help="round trips, in milliseconds, comma-separated")
    parser.add_argument("--rounds", type=count, default=5, help="how often everything is opened")
    parser.add_argument("--lanes", type=count, default=3, help="lanes of connect")
    parser.add_argument("--pool-size", type=count, help="size of create_pool; by default what the pool chooses")
    parser.add_argument("--broker-warm-up", type=seconds, default=5.0, help="seconds for which the broker is warmed up")
    parser.add_argument("--statements", action="store_true", help="print the statements, too")
    options = parser.parse_args()
    show_progress("starting the servers")
    with (
        PostgresServer(settings=POSTGRES) as server,
        services(server.url, None, {}, warm_up=options.broker_warm_up, has_network=True) as servers,
    ):
        assert servers.network is not None
        found = list(lines(servers.network, server, options))
        print(f"Medians of {options.rounds}; the proxy: {servers.network.proxy.description}.\n\n{report(found)}")
        if options.statements:
            last = {each.what: each for each in found}
            print("", *map(statements_report, last.values()), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
