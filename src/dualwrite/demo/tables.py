"""The demo's tables, and what a flight changes in them: plain SQLAlchemy, as in any service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from sqlalchemy import Column, Connection, Engine, Integer, MetaData, String, Table, bindparam, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from dualwrite.demo.errors import StalePositionError
from dualwrite.demo.flights import Flight
from dualwrite.errors import ConfigurationError

Departure = Mapping[str, Any]
"""One departure: the columns of its row except `row`, which are also the fields of its message."""

_INSERT: Final[Mapping[str, Any]] = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}


class Tables:
    """The three tables of one run.

    `departures` has no unique constraint on the flight: a departure recorded twice must be detected, not prevented.

    Args:
        run: The run's name; each run has its own tables.
        dialect: SQLAlchemy's name of the dialect.
    """

    def __init__(self, run: str, dialect: str) -> None:
        if dialect not in _INSERT:
            raise ConfigurationError(f"The demo does not support {dialect}.", next_step=f"use one of {', '.join(_INSERT)}")
        prefix = f"dualwrite_demo_{run}"
        self.metadata = MetaData()
        self.aircraft = Table(
            f"{prefix}_aircraft",
            self.metadata,
            Column("aircraft", String(20), primary_key=True),
            Column("departures", Integer, nullable=False),
            Column("cancelled", Integer, nullable=False),
            Column("delay", Integer, nullable=False),
            Column("last_flight", Integer, nullable=False),
        )
        self.departures = Table(
            f"{prefix}_departures",
            self.metadata,
            Column("row", Integer, primary_key=True, autoincrement=True),
            Column("number", Integer, nullable=False),
            Column("name", String(20), nullable=False),
            Column("aircraft", String(20), nullable=False),
            Column("origin", String(10), nullable=False),
            Column("destination", String(10), nullable=False),
            Column("scheduled", String(20), nullable=False),
            Column("departed", String(10), nullable=False),
            Column("delay", Integer, nullable=False),
            Column("count", Integer, nullable=False),
        )
        self.workers = Table(
            f"{prefix}_workers",
            self.metadata,
            Column("worker", Integer, primary_key=True, autoincrement=False),
            Column("position", Integer, nullable=False),
            Column("done", Integer, nullable=False),
        )
        self._add_to_aircraft = self._upsert(_INSERT[dialect])
        self._insert_departure = insert(self.departures).inline()
        self._advance = (
            update(self.workers)
            .where(self.workers.c.worker == bindparam("of_worker"), self.workers.c.position == bindparam("after"))
            .values(position=bindparam("to"), done=self.workers.c.done + 1)
        )

    def _upsert(self, insert_into: Any) -> Any:
        t = self.aircraft
        row = insert_into(t)
        new = row.excluded
        return row.on_conflict_do_update(
            index_elements=[t.c.aircraft],
            set_={
                "departures": t.c.departures + new.departures,
                "cancelled": t.c.cancelled + new.cancelled,
                "delay": t.c.delay + new.delay,
                "last_flight": new.last_flight,
            },
        ).returning(t.c.departures)

    # --- what a worker does -----------------------------------------------------------------------------------------------

    def record(self, connection: Connection, flight: Flight, worker: int, *, after: int) -> Departure | None:
        """Write one flight and the worker's new position. Returns the departure to publish, or None for a cancelled flight.

        Args:
            connection: A connection in a transaction, which is not ended.
            flight: The flight.
            worker: The worker's number.
            after: The position from which this flight is the next one.

        Raises:
            StalePositionError: The position in the database is a different one.
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

    # --- creating and dropping --------------------------------------------------------------------------------------------

    def create(self, engine: Engine, workers: int) -> None:
        """Create the tables, with every worker at the first flight."""
        self.metadata.create_all(engine)
        with engine.begin() as connection:
            connection.execute(insert(self.workers), [{"worker": n, "position": 0, "done": 0} for n in range(workers)])

    def drop(self, engine: Engine) -> None:
        """Drop the tables."""
        self.metadata.drop_all(engine)
