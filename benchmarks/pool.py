"""Compares the pool with a plain commit per request, commit-then-produce, an outbox and a writer each. See README.md."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

from agents import Agent, AgentError
from callers import Callers
from cases import rotated
from delay import what_is_added
from dualwrite import DualWriteError
from figures import Figures
from measurement import Bench, Plan
from network import Network
from options import add_servers, count, counts, positive, round_trips, some_of
from orders import WORK
from pool_cases import (
    ALTERNATIVES,
    DECIDED,
    HANDLES,
    KINDS,
    PLAIN,
    POOL,
    POOLS,
    TITLES,
    Point,
    PoolCase,
    kinds_here,
    obstacle,
    pool_size,
)
from pool_figures import Clocked, Measured, Results, summary
from pool_report import network_note, picture, report
from progress import show_progress
from records import VerificationError
from relay import RelaySettings
from services import services
from surroundings import surroundings

PICTURE: Final = Path(__file__).parents[1] / "docs" / "images" / "pool.svg"
_WARM_UP_SECONDS: Final = 1.0
_FAILED: Final = 1
_INTERRUPTED: Final = 130
_TWO_PHASE: Final = {None: "if the cluster supports it", True: "required", False: "not used"}
_QUICK: Final[dict[str, Any]] = {"seconds": 0.5, "rounds": 1, "callers": [2, 8], "broker_warm_up": 0.0}


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--rtt", type=round_trips, default=[0.0], help="round trips to database and Kafka, in milliseconds, comma-separated"
    )
    parser.add_argument("--callers", type=counts, default=[1, 8, 32, 128], help="numbers of callers, comma-separated")
    parser.add_argument("--seconds", type=positive, default=5.0, help="duration of one measurement")
    parser.add_argument("--rounds", type=count, default=3, help="number of rounds; each measures every alternative in turn")
    parser.add_argument("--handles", type=some_of(HANDLES), default=list(HANDLES), help="what callers write with")
    parser.add_argument(
        "--callers-kind", type=some_of(KINDS), default=kinds_here(), help="what callers are (uvloop: if it is installed)"
    )
    parser.add_argument(
        "--alternatives", type=some_of(ALTERNATIVES), default=list(ALTERNATIVES), help="what to measure, comma-separated"
    )
    parser.add_argument(
        "--two-phase",
        action=argparse.BooleanOptionalAction,
        help="two_phase of dualwrite.create_pool; by default if the cluster supports it; without it there is no pool-decided",
    )
    parser.add_argument(
        "--plain-connections",
        type=counts,
        help="numbers of connections for plain commits, comma-separated; the best of a round counts (default: one per caller)",
    )
    parser.add_argument("--pool-size", type=count, help="a fixed number of the pool's writers (default: what the pool chooses)")
    parser.add_argument(
        "--most-writers",
        type=count,
        default=32,
        help="measure a writer per caller up to this many callers; pool.transaction() has at most as many",
    )
    parser.add_argument("--no-phases", dest="phases", action="store_false", help="skip the phases of the pool's groups")
    parser.add_argument("--quick", action="store_true", help="short and without the warm-up round, to see the output")
    add_servers(parser)
    parser.add_argument(
        "--svg",
        type=Path,
        nargs="?",
        const=PICTURE,
        metavar="FILE",
        help=f"draw the rates; without FILE: {PICTURE.name} in docs",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to this file")
    chosen = parser.parse_args(given)
    if chosen.quick:
        parser.set_defaults(**_QUICK)
        chosen = parser.parse_args(given)
    missing = sorted(set(chosen.callers_kind) - set(kinds_here()))
    if missing:
        parser.error(f"{', '.join(missing)} is not installed")
    if chosen.two_phase is False:
        chosen.alternatives = [name for name in chosen.alternatives if name != DECIDED]
        if not chosen.alternatives:
            parser.error(f"{DECIDED} needs two-phase commit")
    if any(chosen.rtt) and chosen.kafka is not None:
        parser.error("--rtt needs a broker of our own, which tells its clients the proxy's address: omit --kafka")
    if chosen.svg is not None and PLAIN not in chosen.alternatives:
        parser.error(f"--svg draws rates relative to {PLAIN}: add it to --alternatives")
    return chosen


def cases(options: argparse.Namespace) -> Iterator[tuple[Point, list[str]]]:
    """Every point, with the alternatives that can be measured there."""
    for point in _points(options):
        yield (
            point,
            [name for name in options.alternatives if not obstacle(point, name, most_writers=options.most_writers)],
        )


def _points(options: argparse.Namespace) -> Iterator[Point]:
    for round_trip, kind, handle, callers in itertools.product(
        options.rtt, options.callers_kind, options.handles, options.callers
    ):
        yield Point(kind, handle, callers, round_trip)


def warm_ups(points: Sequence[tuple[Point, list[str]]]) -> list[tuple[Point, str]]:
    """Every alternative with each handle and kind of callers, at the largest number of callers with which it is measured."""
    largest: dict[tuple[str, str, str], Point] = {}
    for point, names in sorted(points, key=lambda each: each[0].callers):
        largest |= {(point.kind, point.handle, name): point for name in names}
    return [(point, name) for (_, _, name), point in largest.items()]


def connections_of(point: Point, name: str, chosen: Sequence[int] | None) -> list[int]:
    """With how many connections an alternative is measured at a point; `chosen` is for plain commits."""
    if name != PLAIN or chosen is None:
        return [point.callers]
    return sorted({min(number, point.callers) for number in chosen})


class Schedule:
    """Runs measurements, and reports how many remain and how long they will take.

    Args:
        bench: The servers and the callers.
        options: The command line's arguments.
        network: The network that some points have.
    """

    def __init__(self, bench: Bench, options: argparse.Namespace, network: Network | None = None) -> None:
        self._bench = bench
        self._options = options
        self._network = network
        self._points = list(cases(options))
        self._done = 0
        self._began = time.monotonic()

    @property
    def _total(self) -> int:
        rounds: int = self._options.rounds
        cases = sum(len(self._cases(point, name)) for point, names in self._points for name in names)
        return rounds * cases + len(self._clocked_points)

    @property
    def _clocked_points(self) -> list[Point]:
        return [point for point, names in self._points if POOL in names] if self._options.phases else []

    def warm_up(self) -> None:
        """Measure every alternative once with each handle and kind of callers; the figures are discarded."""
        for point, name in warm_ups(self._points):
            show_progress(f"warm-up: {point}, {TITLES[name]}")
            self._bench.measure(self._cases(point, name)[-1], min(self._options.seconds, _WARM_UP_SECONDS))
        self._began = time.monotonic()

    def rounds(self) -> list[Measured]:
        """Run all rounds; at each point the alternatives are measured in turn, each round starting with a different one."""
        found = []
        for number in range(1, self._options.rounds + 1):
            for place, (point, names) in enumerate(self._points):
                for name in rotated(names, number - 1 + place):
                    what = f"round {number}/{self._options.rounds}, {point}"
                    each = [self._measured(what, number, case) for case in self._cases(point, name)]
                    found.append(max(each, key=lambda one: one.figures.rate))
        return found

    def _measured(self, what: str, number: int, case: PoolCase) -> Measured:
        before = self._network.passed() if self._network and case.round_trip else None
        figures = self._measure(what, case)
        late = self._network.passed().since(before).lateness if self._network and before else None
        writers = self._bench.writers[0].call("pool_size") if case.alternative in POOLS else None
        connections = case.connections if case.alternative == PLAIN else None
        return Measured(number, case.point, figures, connections, writers, late)

    def phases(self) -> list[Clocked]:
        """Measure the pool again at every point, with clocks."""
        found = []
        for point in self._clocked_points:
            case = PoolCase.of(point, POOL, pool_size=self._options.pool_size, has_clocks=True)
            figures = self._measure(f"with clocks, {point}", case)
            (callers,) = self._bench.writers
            found.append(Clocked(point, callers.call("phases"), figures, os.cpu_count() or 1))
        return found

    def _cases(self, point: Point, name: str) -> list[PoolCase]:
        """The case of an alternative; several for plain commits, if several numbers of connections were given."""
        size = pool_size(point, name, self._options.pool_size, most_writers=self._options.most_writers)
        return [
            PoolCase.of(point, name, pool_size=size, connections=number)
            for number in connections_of(point, name, self._options.plain_connections)
        ]

    def _measure(self, what: str, case: PoolCase) -> Figures:
        figures = self._bench.measure(case, self._options.seconds)
        self._done += 1
        left = (time.monotonic() - self._began) / self._done * (self._total - self._done) / 60
        show_progress(
            f"{self._done}/{self._total}, {what}, {TITLES[case.alternative]}: {figures.rate:,.0f}/s; "
            f"about {left:.0f} minutes left"
        )
        return figures


def _left_out(options: argparse.Namespace) -> Iterator[str]:
    places: dict[str, list[str]] = {}
    for point in _points(options):
        for name in options.alternatives:
            reason = obstacle(point, name, most_writers=options.most_writers)
            if reason is not None:
                places.setdefault(f"{TITLES[name]} ({reason})", []).append(str(point))
    for what, points in places.items():
        yield f"Not measured: {what}: {'; '.join(points)}."


def _connections(results: Results, options: argparse.Namespace) -> Iterator[str]:
    if options.plain_connections is None:
        yield "Plain commits, commit-then-produce and the outbox had a connection to PostgreSQL for each caller."
        return
    yield (
        f"Plain commits were measured with {', '.join(map(str, options.plain_connections))} connections to PostgreSQL, but not "
        "more than callers; the best of a round counts. Commit-then-produce and the outbox had a connection for each caller."
    )
    for point in results.points:
        if found := results.connections(point):
            yield f"Connections of the best plain commits, round by round, {point}: {', '.join(map(str, found))}."


def main() -> int:
    """Measure, verify, print."""
    options = arguments()
    plan = Plan(
        partitions=options.partitions,
        producer=options.producer,
        relay=RelaySettings(options.poll_interval, options.batch),
        keep_topics=options.kafka is None,
        two_phase=options.two_phase,
    )
    try:
        added, proxy = what_is_added(options.rtt) if any(options.rtt) else ([], "")
        show_progress("starting the servers")
        with services(
            options.url,
            options.kafka,
            dict(options.kafka_config),
            warm_up=options.broker_warm_up,
            has_network=any(options.rtt),
        ) as servers:
            around = surroundings(servers, options, {"two-phase commit": _TWO_PHASE[options.two_phase]})
            with Bench(servers, plan, WORK, [partial(Agent, Callers)]) as bench:
                schedule = Schedule(bench, options, servers.network)
                if not options.quick:
                    schedule.warm_up()
                results, clocked = Results(schedule.rounds()), schedule.phases()
    except (VerificationError, AgentError, DualWriteError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED
    notes = [*([network_note(proxy, added)] if added else []), *_connections(results, options), *_left_out(options)]
    print(report(results, clocked, around, notes=notes))
    if options.json is not None:
        content = {
            "surroundings": around,
            "network": {"proxy": proxy, "pings": [asdict(each) for each in added]} if added else None,
            "points": summary(results),
            "rounds": [asdict(each) for each in results.measured],
            "phases": [{**asdict(each), "binds": each.binds} for each in clocked],
        }
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    if options.svg is not None:
        options.svg.parent.mkdir(parents=True, exist_ok=True)
        options.svg.write_text(picture(results, around))
    return 0


if __name__ == "__main__":
    sys.exit(main())
