"""The report and the picture of the pool's benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import pool_tables
from chart import Chart, Panel
from delay import Added, added_table
from figures import Spread
from pool_cases import ALTERNATIVES, CORE, PLAIN, PSYCOPG, TITLES, Point, milliseconds
from pool_figures import Clocked, Results
from surroundings import line, warnings

_HANDLES: Final = {CORE: "SQLAlchemy Core", PSYCOPG: "psycopg"}
_RATES: Final = """\
{origin}. A unit is one order of 200 bytes inserted and one message of 200 bytes. "of plain" is the rate relative to one
commit per request through the same handle, of the same round. For threads, these plain commits run on psycopg's Connections or
SQLAlchemy's Engine; for tasks, on psycopg's AsyncConnections or SQLAlchemy's AsyncEngine. The pool's units always run on
synchronous connections in threads, so tasks are also compared with the plain commits of as many threads ("of threads' plain").
e2e is from the request's start until a read_committed consumer next to the broker has its message. "writers" is the number that
the pool had at the end:"""
_NETWORK: Final = """\
RTT is the round trip between callers or relay, and PostgreSQL or Kafka: a proxy delays each direction by half of it; at 0 there
is no proxy. The proxy: {proxy}. Before the measurements, pings through it took:

{pings}

"proxy late" is by how much the proxy forwarded later than asked, in one direction, in the mean of a measurement."""
_PHASES: Final = """\
Where the time of the pool's groups goes, in a separate measurement: means per group. The shares of the time in which a group
was running its SQL, the writers had a group, the client used a processor, and the machine's processors were busy:"""


def network_note(proxy: str, added: Sequence[Added]) -> str:
    """What the network is.

    Args:
        proxy: The proxy's description.
        added: What it adds.
    """
    return _NETWORK.format(proxy=proxy, pings=added_table(added))


def report(results: Results, clocked: Sequence[Clocked], around: Mapping[str, Any], *, notes: Sequence[str]) -> str:
    """The complete report as text; `notes` say what was not measured, and what the network is."""
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
    places = dict.fromkeys(replace(point, callers=0) for point in results.points)
    panels = [Panel(_title(place), _groups(results, place, names)) for place in places]
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


def _title(place: Point) -> str:
    distance = f", round trip {milliseconds(place.round_trip)} ms" if place.round_trip else ""
    return f"{place.kind}, {_HANDLES[place.handle]}{distance}"


def _groups(results: Results, place: Point, names: Sequence[str]) -> dict[str, dict[str, Spread]]:
    groups = {}
    for point in (point for point in results.points if replace(point, callers=0) == place):
        bars = {name: results.of_plain(point, name) for name in names}
        groups[str(point.callers)] = {name: bar for name, bar in bars.items() if bar is not None}
    return groups
