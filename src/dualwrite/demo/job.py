"""The protocol between a worker and its supervisor: one JSON object per line, over the worker's standard input and output."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final, Self

from dualwrite.errors import DualWriteError
from dualwrite.settings import ProducerName

RELEASE: Final = "release"
"""The line, after the job, that lets a worker write its last flight and end. End of input means: stop now, cleanly."""


class Event(StrEnum):
    """The kind of a report."""

    OPENING = "opening"
    """The worker has started and begins to open its writer or its pool, which runs recovery. No fields."""

    OPEN = "open"
    """Fields: `done`; `seconds` to open; `outcomes` of recovery, by name; `unacknowledged`, the number of lost transactions."""

    DONE = "done"
    """Fields: `done` so far; and since the last report: `took`, the microseconds of each flight, and `commits`, the number of
    transactions that they needed."""

    HOLDING = "holding"
    """One flight is left, to be written after the release. No fields."""

    ERROR = "error"
    """Field: `text`. The worker ends."""

    CLOSED = "closed"
    """All flights are written, and the writer or the pool is closed. No fields."""


@dataclass(frozen=True, slots=True)
class Job:
    """One worker's job.

    Args:
        run: The run's name.
        worker: The worker's number, from 0.
        workers: How many workers there are.
        departures: How many departures they write together.
        url: The database.
        kafka: The Kafka settings, named as in librdkafka.
        topic: The topic to publish to.
        producer: `producer` of `dualwrite.connect`.
        naive: Whether to write without dualwrite.
        pool: Whether to write through a pool.
        report_every: Flights per report.
    """

    run: str
    worker: int
    workers: int
    departures: int
    url: str
    kafka: dict[str, Any]
    topic: str
    producer: ProducerName
    naive: bool
    pool: bool
    report_every: int

    @property
    def transactional_id(self) -> str:
        """The logical transactional id of the worker's DualWriter, the same after a restart."""
        return f"{id_prefix(self.run)}-{self.worker}"

    def to_json(self) -> str:
        """As one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str | bytes) -> Self:
        """Read what `to_json` wrote."""
        return cls(**json.loads(line))


def id_prefix(run: str) -> str:
    """The prefix of all logical transactional ids of a run, and of its workers' pools."""
    return f"demo-{run}"


class DemoError(DualWriteError):
    """The demo can't continue: a worker does not start, or there is no progress. Attributes: `log_file`, if there is one."""


class StalePositionError(DualWriteError):
    """A worker's position in the database has changed since the worker read it; nothing was written."""
