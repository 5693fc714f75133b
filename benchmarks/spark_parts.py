"""Breaks down this sink's time: its data source with timers around its parts. Spark's Python workers import this file."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from dualwrite.jobs import driver as committing
from dualwrite.jobs.decision import JobDecision
from dualwrite.kafka.librdkafka.producer import LibrdkafkaProducer
from dualwrite.kafka.native.producer import NativeProducer
from dualwrite.spark.frame import MessageEncoder
from dualwrite.spark.loading import StagingWriter
from dualwrite.spark.source import BatchWriter, DualWriteDataSource

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql.types import StructType

NAME: Final = "dualwrite-clocked"
PLACE: Final = "DUALWRITE_BENCHMARK_CLOCKS"
"""The environment variable with the folder to which the workers write their times."""

WAITING: Final = "waiting for Spark's rows"
SENDING: Final = "messages: made, handed to the producer"
COPYING: Final = "rows: made, COPY into staging"
PREPARING: Final = "Kafka: prepare"
DECIDING: Final = "database transaction (rows moved)"
COMPLETING: Final = "Kafka: transactions completed"
CLEARING: Final = "staging cleared"
_TASK: Final = "task"
_COMMIT: Final = "commit"


class ClockedDataSource(DualWriteDataSource):
    """The data source, with timers."""

    @classmethod
    def name(cls) -> str:
        """The name for `format`."""
        return NAME

    def writer(self, schema: StructType, overwrite: bool) -> ClockedWriter:  # type: ignore[override]
        """As in the data source."""
        return ClockedWriter(super().writer(schema, overwrite))


class ClockedWriter(DataSourceArrowWriter):
    """The data source's writer, with timers around what its tasks and its commit do."""

    def __init__(self, inner: BatchWriter) -> None:
        self._inner = inner

    def write(self, iterator: Iterator[RecordBatch]) -> WriterCommitMessage:
        """Run one task attempt."""
        with _clocked(_TASK) as clock:
            return self._inner.write(clock.iterated(WAITING, iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Commit, after all tasks have finished."""
        with _clocked(_COMMIT):
            self._inner.commit(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Abort, after a failure."""
        self._inner.abort(messages)


class _Clock:
    def __init__(self) -> None:
        self.times: defaultdict[str, float] = defaultdict(float)

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.times[part] += time.perf_counter() - began

        return measured

    def iterated(self, part: str, batches: Iterator[Any]) -> Iterator[Any]:
        following = self.timed(part, lambda: next(batches, None))
        while (batch := following()) is not None:
            yield batch


_PLACES: Final[Sequence[tuple[Any, str, str]]] = (
    (MessageEncoder, "send", SENDING),
    (StagingWriter, "add", COPYING),
    (StagingWriter, "finish", COPYING),
    (NativeProducer, "prepare_transaction", PREPARING),
    (LibrdkafkaProducer, "prepare_transaction", PREPARING),
    (JobDecision, "commit", DECIDING),
    (committing, "complete", COMPLETING),
    (committing, "delete_staged", CLEARING),
)


@contextmanager
def _clocked(kind: str) -> Iterator[_Clock]:
    """Time the parts while the block runs; the times are written to a file."""
    clock = _Clock()
    with ExitStack() as stack:
        for owner, name, part in _PLACES:
            original = getattr(owner, name)
            setattr(owner, name, clock.timed(part, original))
            stack.callback(setattr, owner, name, original)
        began = time.time()
        yield clock
        ended = time.time()
    content = {"kind": kind, "began": began, "ended": ended, "parts": clock.times}
    (Path(os.environ[PLACE]) / f"{uuid.uuid4()}.json").write_text(json.dumps(content))


# --- the result ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """How long one part took, in seconds, and its share of the whole write's wall time.

    For a phase with several threads or tasks, the parts are averages over the tasks. Sending and COPY can run at the same time,
    so their sum can exceed the phase.
    """

    phase: str
    name: str
    seconds: float
    share: float


def collected(place: Path, began: float, ended: float) -> list[Part]:
    """The parts, from the workers' files, which are deleted.

    Args:
        place: The folder.
        began: When the write began, by the machine's clock.
        ended: When it ended.
    """
    files = list(place.glob("*.json"))
    records = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    tasks = [record for record in records if record["kind"] == _TASK]
    (commit,) = (record for record in records if record["kind"] == _COMMIT)
    first, last = min(task["began"] for task in tasks), max(task["ended"] for task in tasks)
    whole = ended - began
    busy = sum(task["ended"] - task["began"] for task in tasks)
    per_task = (last - first) / busy  # from seconds of tasks to seconds of the phase
    found = [("Spark, before the tasks", "", first - began), ("tasks", "", last - first)]
    found += _in_tasks(tasks, per_task, last - first)
    found += [("Spark, before commit", "", commit["began"] - last), ("commit", "", commit["ended"] - commit["began"])]
    found += [("commit", name, commit["parts"].get(name, 0.0)) for name in (DECIDING, COMPLETING, CLEARING)]
    found += [("Spark, after commit", "", ended - commit["ended"]), ("whole", "", whole)]
    return [Part(phase, name, seconds, seconds / whole) for phase, name, seconds in found]


def _in_tasks(tasks: Iterable[dict[str, Any]], per_task: float, phase: float) -> Iterator[tuple[str, str, float]]:
    known = 0.0
    for name in (WAITING, SENDING, COPYING, PREPARING):
        seconds = sum(task["parts"].get(name, 0.0) for task in tasks) * per_task
        known += seconds
        yield _TASK + "s", name, seconds
    if phase > known:  # otherwise parts have overlapped, and the rest is unknown
        yield _TASK + "s", "the rest: open, claim, start, wait", phase - known
