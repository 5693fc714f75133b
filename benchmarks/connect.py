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
from typing import Any, Final

from sqlalchemy import create_engine, text

import dualwrite
from delay import Counts, Network
from dualwrite.testing.postgres import PostgresServer
from figures import NONE, table
from options import count, parser_of, round_trips, seconds
from servers import POSTGRES, servers
from surroundings import show_progress

_MILLI: Final = 1e3
_STATEMENT: Final = re.compile(r"LOG: {2}(?:statement|execute [^:]*): (.*)")
_LENGTH: Final = 110

Opening = Callable[[Any, Any, str], Any]
"""Opens a writer or a pool, given an engine, Kafka's settings, and an id or a prefix."""


@dataclass(frozen=True)
class Line:
    """What was opened some times with a round trip in seconds, and the statements that it executed when opened once more.

    `opened` has the seconds, and what has passed to the database and to Kafka meanwhile.
    """

    what: str
    round_trip: float
    opened: Sequence[tuple[float, Counts, Counts]]
    statements: Counter[str]

    @property
    def duration(self) -> float:
        return statistics.median(duration for duration, _, _ in self.opened)


def openings(lanes: int, pool_size: int | None) -> dict[str, Opening]:
    """What is opened, by its title."""
    size: dict[str, Any] = {} if pool_size is None else {"size": pool_size}

    def connect(engine: Any, kafka: Any, name: str) -> Any:
        return dualwrite.connect(engine, kafka=kafka, transactional_id=name, lanes=lanes)

    def create_pool(engine: Any, kafka: Any, name: str) -> Any:
        return dualwrite.create_pool(engine, kafka=kafka, prefix=name, **size)

    return {f"connect(lanes={lanes})": connect, f"create_pool({'' if pool_size is None else f'size={pool_size}'})": create_pool}


@contextmanager
def statements_of(server: PostgresServer) -> Iterator[Counter[str]]:
    """Count the statements of connections that begin in the block, by the server's log."""
    engine, found = create_engine(server.url), Counter[str]()
    with engine.connect() as connection, connection.execution_options(isolation_level="AUTOCOMMIT"):
        before = len(server.log())
        connection.execute(text("ALTER ROLE CURRENT_USER SET log_statement = 'all'"))
        try:
            yield found
        finally:
            connection.execute(text("ALTER ROLE CURRENT_USER RESET log_statement"))
    engine.dispose()
    found.update(_STATEMENT.findall(server.log()[before:]))


def opened(network: Network, opening: Opening, name: str) -> tuple[float, Counts, Counts]:
    """Open and close once, with an engine that has no connection yet; see `Line.opened`."""
    engine = create_engine(network.url)
    before, began = network.passed(), time.perf_counter()
    made = opening(engine, network.kafka, name)
    duration, after = time.perf_counter() - began, network.passed()
    made.close()
    engine.dispose()
    return duration, after[0].since(before[0]), after[1].since(before[1])


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
                with statements_of(server) as statements:
                    opened(network, opening, names[0])
                yield Line(f"{title}, {kind}", round_trip, found, statements)


def report(found: Sequence[Line]) -> str:
    """The lines as a Markdown table. What the distance adds, divided by the round trip, are the round trips waited for."""
    nearby = {each.what: each.duration for each in found if not each.round_trip}
    head = ["what", "RTT ms", "ms", "min … max", "round trips waited for", "statements"]
    head += ["database: connections", "exchanges", "Kafka: connections", "exchanges"]
    cells = []
    for each in found:
        every = [duration * _MILLI for duration, _, _ in each.opened]
        is_far = each.round_trip and each.what in nearby
        waited = f"{(each.duration - nearby[each.what]) / each.round_trip:.1f}" if is_far else NONE
        passed = [*_medians([one for _, one, _ in each.opened]), *_medians([one for *_, one in each.opened])]
        durations = (f"{each.duration * _MILLI:.1f}", f"{min(every):.1f} … {max(every):.1f}")
        cells.append([each.what, f"{each.round_trip * _MILLI:g}", *durations, waited, str(each.statements.total()), *passed])
    return table(head, cells)


def _medians(sides: Sequence[Counts]) -> list[str]:
    return [f"{statistics.median(getattr(each, what) for each in sides):.0f}" for what in ("connections", "exchanges")]


def statements_report(line: Line) -> str:
    """Every statement of a line, with how often it was executed."""
    each = (f"{number:4}  {' '.join(what.split())[:_LENGTH]}" for what, number in line.statements.most_common())
    return "\n".join([f"{line.what}:", *each])


@contextmanager
def network_between(warm_up: float) -> Iterator[tuple[Network, PostgresServer]]:
    """Servers of our own, with a network in between, without a delay at first."""
    with (
        PostgresServer(settings=POSTGRES) as server,
        servers(None, url=server.url, warm_up=warm_up, has_network=True) as found,
    ):
        assert found.network is not None
        yield found.network, server


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rtt", type=round_trips, default=[0.0, 0.001], help="round trips, in milliseconds, comma-separated")
    parser.add_argument("--rounds", type=count, default=5, help="how often everything is opened")
    parser.add_argument("--lanes", type=count, default=3, help="lanes of connect")
    parser.add_argument("--pool-size", type=count, help="size of create_pool; by default what the pool chooses")
    parser.add_argument("--broker-warm-up", type=seconds, default=5.0, help="seconds for which the broker is warmed up")
    parser.add_argument("--statements", action="store_true", help="print the statements, too")
    options = parser.parse_args()
    with network_between(options.broker_warm_up) as (network, server):
        found = list(lines(network, server, options))
        print(f"Medians of {options.rounds}; the proxy: {network.proxy.description}.\n\n{report(found)}")
        if options.statements:
            print("", *map(statements_report, {each.what: each for each in found}.values()), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
