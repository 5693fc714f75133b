"""The report and the picture of the pool's benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pool_tables
from chart import Chart, Panel
from figures import Spread
from pool_cases import ALTERNATIVES, CORE, PLAIN, PSYCOPG, TITLES
from pool_figures import Clocked, Results
from surroundings import line, warnings

_HANDLES: Final = {CORE: "SQLAlchemy Core", PSYCOPG: "psycopg"}
_RATES: Final = """\
{origin}. A unit is one order of 200 bytes inserted and one message of 200 bytes. "of plain" is the rate relative to one
commit per request through the same handle, of the same round. For threads, these plain commits run on psycopg's Connections or
SQLAlchemy's Engine; for tasks, on psycopg's AsyncConnections or SQLAlchemy's AsyncEngine. The pool's units always run on
synchronous connections in threads, so tasks are also compared with the plain commits of as many threads ("of threads' plain").
e2e is from the request's start until a read_committed consumer has its message:"""
_PHASES: Final = """\
Where the time of the pool's groups goes, in a separate measurement: means per group. The shares of the time in which a group
was running its SQL, the writers had a group, the client used a processor, and the machine's processors were busy:"""


def report(results: Results, clocked: Sequence[Clocked], around: Mapping[str, Any], *, notes: Sequence[str]) -> str:
    """The complete report as text; `notes` list what was not measured."""
    stolen, most_stolen, load = results.conditions()
    conditions = (
        f"During the measurements: load average up to {load:.1f}; a hypervisor took {stolen:.1%} of the processors' time "
        f"in the median, {most_stolen:.1%} at most."
    )
    parts = [
        line(around),
        conditions,
        f"{_RATES.format(origin=results.origin)}\n\n{pool_tables.rates(results)}",
        f"Cost of one unit:\n\n{pool_tables.costs(results)}",
    ]
    if clocked:
        parts.append(f"{_PHASES}\n\n{pool_tables.phases(clocked)}")
    parts += [f"Verified: {results.verified:,} messages against their rows, one by one.", *notes]
    if results.are_few:
        parts.append("WARNING: fewer than 3 rounds: don't quote these figures.")
    return "\n\n".join([*parts, *warnings(around)])


def picture(results: Results, around: Mapping[str, Any]) -> str:
    """The rates relative to a plain commit, as SVG."""
    names = [name for name in ALTERNATIVES if name != PLAIN and any(results.of_plain(point, name) for point in results.points)]
    places = dict.fromkeys((point.kind, point.handle) for point in results.points)
    panels = [Panel(f"{kind}, {_HANDLES[handle]}", _groups(results, kind, handle, names)) for kind, handle in places]
    postgres = around["postgresql"]
    return Chart(
        title="Orders per second, relative to a plain database commit per request",
        subtitle=f"One insert and one message of 200 bytes; PostgreSQL {postgres['server_version']}, "
        f"fsync {postgres['fsync']}; {around['machine']}. {results.origin}",
        axis="By number of callers",
        series={name: TITLES[name] for name in names},
        baseline="one commit per request through the same handle (tasks: asynchronous), no message",
        panels=panels,
    ).svg()


def _groups(results: Results, kind: str, handle: str, names: Sequence[str]) -> dict[str, dict[str, Spread]]:
    groups = {}
    for point in (point for point in results.points if (point.kind, point.handle) == (kind, handle)):
        bars = {name: results.of_plain(point, name) for name in names}
        groups[str(point.callers)] = {name: bar for name, bar in bars.items() if bar is not None}
    return groups
