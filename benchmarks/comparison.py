"""Measures alternatives in turn, round by round, and reports medians and ratios: for pool.py and recipe.py."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from alternatives import OUTBOX, PLAIN, POOLS, TITLES, Case
from dualwrite import DualWriteError
from figures import NONE, Spread, median, table, with_range
from measurement import Bench, Figures
from records import VerificationError
from servers import servers
from surroundings import heading, in_turns, show_progress, surroundings

_WARM_UP_SECONDS: Final = 2.0
_FEW_ROUNDS: Final = 2
_FAILED: Final = 1
_INTERRUPTED: Final = 130
_MILLI: Final = 1e3
_MICRO: Final = 1e6
_PERCENT: Final = 100
_EXPLAINED: Final = """\
Medians of {rounds} rounds. An order is an insert of 200 bytes (recipe.py: and an update) and a message of 200 bytes. "of plain"
and "of outbox" are the rate relative to theirs in the same round. e2e is from the call's start until a read_committed consumer
next to the broker has the message. WAL and CPU are those of an order:"""
_PLACE: Final = ("RTT ms", "callers are", "handle", "callers", "alternative")

Points = Sequence[list[Case]]
"""For each point, the alternatives that are measured there."""

Rounds = Sequence[Sequence[Figures]]
"""The figures of each round."""


def compare(
    points: Points, options: argparse.Namespace, *, warm_up: bool = True, shown: Callable[[Rounds], list[str]] | None = None
) -> int:
    """Measure, verify, print; returns the exit code.

    Args:
        points: What to measure.
        options: The command line's.
        warm_up: Whether each alternative is measured once more before, where it has most callers.
        shown: Makes what is printed of the rounds; by default the table with all figures.
    """
    every = [case for point in points for case in point]
    has_network = any(case.round_trip for case in every)
    try:
        with servers(options.kafka, url=options.url, warm_up=options.broker_warm_up, has_network=has_network) as found:
            around = surroundings(found.cluster, found.url, producer=options.producer)
            with Bench(found, options.producer, max(case.processes for case in every)) as bench:
                for case in _largest(every) if warm_up else ():
                    show_progress(f"warm-up: {case}")
                    bench.measure(case, min(options.seconds, _WARM_UP_SECONDS))
                rounds = list(_rounds(bench, points, options.rounds, options.seconds))
    except (VerificationError, DualWriteError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED
    print("\n\n".join([heading(around), *_report(rounds, shown or _with_all_figures)]))
    if options.json is not None:
        _write(options.json, around, rounds)
    return 0


def _largest(cases: Iterable[Case]) -> list[Case]:
    """Each alternative with each handle and kind of callers, where it has most callers."""
    found = {(case.kind, case.handle, case.alternative): case for case in sorted(cases, key=lambda case: case.callers)}
    return list(found.values())


def _rounds(bench: Bench, points: Points, number: int, seconds: float) -> Iterable[list[Figures]]:
    """All rounds; each starts with another alternative at each point."""
    total = number * sum(map(len, points))
    done, began = 0, time.monotonic()
    for one in range(number):
        found = []
        for place, point in enumerate(points):
            for case in in_turns(point, one + place):
                found.append(figures := bench.measure(case, seconds))
                done += 1
                left = (time.monotonic() - began) / done * (total - done) / 60
                what = f"{done}/{total}, round {one + 1}, {figures.case}: {figures.rate:,.0f}/s"
                show_progress(f"{what}; about {left:.0f} minutes left")
        yield found


def _report(rounds: list[list[Figures]], shown: Callable[[Rounds], list[str]]) -> list[str]:
    verified = sum(each.verified for found in rounds for each in found)
    parts = [*shown(rounds), f"Verified: {verified:,} messages against their rows, one by one."]
    return [*parts, *(["WARNING: fewer than 3 rounds: don't quote these figures."] if len(rounds) <= _FEW_ROUNDS else [])]


def _with_all_figures(rounds: Rounds) -> list[str]:
    return [_EXPLAINED.format(rounds=len(rounds)), rates(rounds)]


def rates(rounds: Rounds) -> str:
    """The table of rates, latencies and costs."""
    points = dict.fromkeys(each.case.point for each in rounds[0])
    measured = {(each.case.point, each.case.alternative) for each in rounds[0]}
    places = [place for place in itertools.product(points, TITLES) if place in measured]
    head = [
        *(*_PLACE, "tx/s", "of plain", "of outbox", "call p50 ms", "of plain's", "p99", "of plain's", "e2e p50 ms", "p99"),
        *("writers", "units a group", "WAL bytes", "client CPU µs", "machine busy %", "stolen %", "proxy late µs"),
    ]
    return table(head, [_cells(rounds, *place) for place in places], names=len(_PLACE))


def _cells(rounds: Sequence[Sequence[Figures]], point: tuple[float, str, str, int], name: str) -> list[str]:
    def each(alternative: str, what: Callable[[Figures], float | None]) -> list[float | None]:
        found = [next((f for f in one if (f.case.point, f.case.alternative) == (point, alternative)), None) for one in rounds]
        return [None if figures is None else what(figures) for figures in found]

    def of(what: Callable[[Figures], float | None], digits: int, unit: float = 1.0) -> str:
        return median(Spread.of(each(name, what)), digits, unit)

    def ratio(alternative: str, what: Callable[[Figures], float | None]) -> Spread | None:
        return Spread.of_ratios(each(name, what), each(alternative, what))

    round_trip, kind, handle, callers = point
    return [
        *(f"{round_trip * _MILLI:g}", kind, handle, str(callers), TITLES[name]),
        of(lambda figures: figures.rate, 0),
        *(with_range(ratio(alternative, lambda figures: figures.rate), 2) for alternative in (PLAIN, OUTBOX)),
        of(lambda figures: figures.call.p50, 1, _MILLI),
        median(ratio(PLAIN, lambda figures: figures.call.p50), 2),
        of(lambda figures: figures.call.p99, 1, _MILLI),
        median(ratio(PLAIN, lambda figures: figures.call.p99), 2),
        of(lambda figures: figures.visible.p50, 1, _MILLI),
        of(lambda figures: figures.visible.p99, 1, _MILLI),
        of(lambda figures: figures.writers, 0),
        of(lambda figures: 1 / figures.transactions, 1) if name in POOLS else NONE,
        of(lambda figures: figures.log, 0),
        of(lambda figures: figures.client, 0, _MICRO),
        of(lambda figures: figures.load.busy, 0, _PERCENT),
        of(lambda figures: figures.load.stolen, 1, _PERCENT),
        of(lambda figures: figures.late, 0, _MICRO),
    ]


def _write(file: Path, around: dict[str, Any], rounds: list[list[Figures]]) -> None:
    """Every figure as JSON."""
    found = [{"round": number, "rate": one.rate, **asdict(one)} for number, each in enumerate(rounds, 1) for one in each]
    content = {"surroundings": around, "rounds": found}
    file.write_text(json.dumps(content, indent=2) + "\n")
