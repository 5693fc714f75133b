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
from dualwrite import DualWriteError
from figures import Figures
from measurement import Bench, Plan
from options import add_servers, count, counts, positive, some_of
from orders import WORK
from pool_cases import (
    ALTERNATIVES,
    DECIDED,
    HANDLES,
    KINDS,
    PLAIN,
    POOL,
    TITLES,
    Point,
    PoolCase,
    kinds_here,
    obstacle,
)
from pool_figures import Clocked, Measured, Results, summary
from pool_report import picture, report
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
    parser.add_argument("--pool-size", type=count, default=2, help="the number of the pool's writers")
    parser.add_argument("--most-writers", type=count, default=32, help="measure a writer per caller up to this many callers")
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
    for kind, handle, callers in itertools.product(options.callers_kind, options.handles, options.callers):
        yield Point(kind, handle, callers)


class Schedule:
    """Runs measurements, and reports how many remain and how long they will take.

    Args:
        bench: The servers and the callers.
        options: The command line's arguments.
    """

    def __init__(self, bench: Bench, options: argparse.Namespace) -> None:
        self._bench = bench
        self._options = options
        self._points = list(cases(options))
        self._done = 0
        self._began = time.monotonic()

    @property
    def _total(self) -> int:
        rounds: int = self._options.rounds
        return rounds * sum(len(names) for _, names in self._points) + len(self._clocked_points)

    @property
    def _clocked_points(self) -> list[Point]:
        return [point for point, names in self._points if POOL in names] if self._options.phases else []

    def warm_up(self) -> None:
        """Measure every alternative once with each handle and kind of callers; the figures are discarded."""
        for point, names in self._points:
            if point.callers != max(self._options.callers):
                continue
            for name in names:
                show_progress(f"warm-up: {point}, {TITLES[name]}")
                self._bench.measure(self._case(point, name), min(self._options.seconds, _WARM_UP_SECONDS))
        self._began = time.monotonic()

    def rounds(self) -> list[Measured]:
        """Run all rounds; at each point the alternatives are measured in turn, each round starting with a different one."""
        found = []
        for number in range(1, self._options.rounds + 1):
            for place, (point, names) in enumerate(self._points):
                for name in rotated(names, number - 1 + place):
                    figures = self._measure(f"round {number}/{self._options.rounds}, {point}", self._case(point, name))
                    found.append(Measured(number, point, figures))
        return found

    def phases(self) -> list[Clocked]:
        """Measure the pool again at every point, with clocks."""
        found = []
        for point in self._clocked_points:
            case = PoolCase.of(point, POOL, pool_size=self._options.pool_size, has_clocks=True)
            figures = self._measure(f"with clocks, {point}", case)
            (callers,) = self._bench.writers
            found.append(Clocked(point, callers.call("phases"), figures, os.cpu_count() or 1))
        return found

    def _case(self, point: Point, name: str) -> PoolCase:
        return PoolCase.of(point, name, pool_size=self._options.pool_size)

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
        show_progress("starting the servers")
        with services(options.url, options.kafka, dict(options.kafka_config), warm_up=options.broker_warm_up) as servers:
            around = surroundings(servers, options, {"two-phase commit": _TWO_PHASE[options.two_phase]})
            with Bench(servers, plan, WORK, [partial(Agent, Callers)]) as bench:
                schedule = Schedule(bench, options)
                if not options.quick:
                    schedule.warm_up()
                results, clocked = Results(schedule.rounds()), schedule.phases()
    except (VerificationError, AgentError, DualWriteError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED
    print(report(results, clocked, around, notes=list(_left_out(options))))
    if options.json is not None:
        content = {
            "surroundings": around,
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
