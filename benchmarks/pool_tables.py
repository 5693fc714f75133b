"""The tables of the pool's benchmark, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from figures import Rounds
from phases import PHASES, WAITING
from pool_cases import POOLS, TITLES, Point, milliseconds
from pool_figures import FIGURES, Clocked, Results
from tables import NONE, median, range_of, table, with_range

_MILLI: Final = 1e3
_MICRO: Final = 1e6
_PERCENT: Final = 100
_NAMES: Final = 5


def rates(results: Results) -> str:
    """Rates, the ratios to plain commits, latencies, and the pools' writers and groups."""
    head = [
        *_PLACE,
        "tx/s",
        "of plain",
        "min … max",
        "of threads' plain",
        "call p50 ms",
        "of plain's",
        "p99",
        "of plain's",
        "e2e p50 ms",
        "p99",
        "writers",
        "units a group",
        "proxy late µs",
    ]
    lines = []
    for point, name, rounds in _all(results):
        ratio, late = results.of_plain(point, name), results.late(point, name)
        lines.append(
            [
                *_place(point, name),
                _median(rounds, "rate", 1, 0),
                median(ratio, 2),
                range_of(ratio, 2),
                with_range(results.of_threads_plain(point, name), 2),
                *(
                    text
                    for percentile in ("p50", "p99")
                    for text in (
                        _median(rounds, f"call {percentile}", _MILLI, 1),
                        median(results.call_of_plain(point, name, percentile), 2),
                    )
                ),
                *(_median(rounds, what, _MILLI, 1) for what in ("visible p50", "visible p99")),
                median(results.writers(point, name), 0),
                _median(rounds, "units a group", 1, 1) if name in POOLS else NONE,
                NONE if late is None else f"{late.median * _MICRO:.0f}",
            ]
        )
    return table(head, lines, names=_NAMES)


def costs(results: Results) -> str:
    """What one unit costs, and how busy the machine was."""
    parts = ("client", "relay", "PostgreSQL", "broker", "together")
    head = [
        *_PLACE,
        "WAL bytes",
        "of outbox",
        "database transactions",
        "CPU µs: client",
        *parts[1:],
        "machine busy %",
        "stolen %",
    ]
    lines = [
        [
            *_place(point, name),
            _median(rounds, "log", 1, 0),
            median(results.log_of_outbox(point, name), 2),
            _median(rounds, "database transactions", 1, 2),
            *(_median(rounds, part, _MICRO, 0) for part in parts),
            _median(rounds, "busy", _PERCENT, 0),
            _median(rounds, "stolen", _PERCENT, 1),
        ]
        for point, name, rounds in _all(results)
    ]
    return table(head, lines, names=_NAMES)


def phases(clocked: Sequence[Clocked]) -> str:
    """Where the time of the pool's groups goes, and what limits them."""
    head = [
        *_PLACE[:-1],
        "units a group",
        "a unit waits µs",
        *(f"{name} µs" for name in (WAITING, *PHASES)),
        "SQL running %",
        "writers %",
        "client %",
        "machine %",
        "what binds",
    ]
    lines = [
        [
            *_place(each.point, "")[:-1],
            f"{each.phases.units:.1f}",
            f"{each.phases.queued * _MICRO:,.0f}",
            *(f"{each.phases.mean[name] * _MICRO:,.0f}" for name in (WAITING, *PHASES)),
            *(
                f"{share * _PERCENT:.0f}"
                for share in (
                    each.phases.in_turn,
                    each.phases.occupied,
                    each.client_processors,
                    each.figures.conditions.busy,
                )
            ),
            each.binds,
        ]
        for each in clocked
    ]
    return table(head, lines, names=len(_PLACE) - 1)


_PLACE: Final = ("RTT ms", "callers are", "handle", "callers", "alternative")


def _all(results: Results) -> list[tuple[Point, str, Rounds]]:
    found = ((point, name, results.at(point, name)) for point in results.points for name in results.alternatives(point))
    return [(point, name, rounds) for point, name, rounds in found if rounds is not None]


def _place(point: Point, name: str) -> list[str]:
    return [milliseconds(point.round_trip), point.kind, point.handle, str(point.callers), TITLES.get(name, name)]


def _median(rounds: Rounds, what: str, unit: float, digits: int) -> str:
    spread = rounds.spread(FIGURES[what])
    return NONE if spread is None else f"{spread.median * unit:,.{digits}f}"
