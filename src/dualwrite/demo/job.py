"""What a worker is told by its supervisor, and what it reports: one JSON object a line, over its standard input and output."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final, Self

from dualwrite.settings import ProducerName

RELEASE: Final = "release"
"""The word, after the job, that lets a worker do its last flight and end. End of input means: stop now, and cleanly."""


class Event(StrEnum):
    """What a report is about."""

    OPENING = "opening"
    """The worker has started and begins to open its writer, which recovers. No facts."""

    OPEN = "open"
    """`done`; `seconds` that opening took; `outcomes` of the recovery, by name; `unacknowledged`, the lost ones' number."""

    DONE = "done"
    """`done` so far; `took`, the microseconds of each transaction since the last report."""

    HOLDING = "holding"
    """One flight is left, to be done when released."""

    ERROR = "error"
    """`text`. The worker ends."""

    CLOSED = "closed"
    """Everything is done, the writer is closed."""


@dataclass(frozen=True, slots=True)
class Job:
    """One worker's job.

    Args:
        run: The run's name.
        worker: Which worker, from 0 on.
        workers: How many there are.
        departures: How many departures all of them do together.
        url: The database.
        kafka: Kafka's settings, in librdkafka's names.
        topic: Where to publish.
        producer: `producer` of `dualwrite.connect`.
        naive: Whether to do it without the recipe.
        report_every: Transactions per report.
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
    report_every: int

    @property
    def transactional_id(self) -> str:
        """The worker's logical transactional id: the same over its restarts."""
        return transactional_id(self.run, self.worker)

    def to_json(self) -> str:
        """As one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str | bytes) -> Self:
        """Read what `to_json` wrote."""
        return cls(**json.loads(line))


def transactional_id(run: str, worker: int) -> str:
    """The logical transactional id of a worker."""
    return f"demo-{run}-{worker}"
