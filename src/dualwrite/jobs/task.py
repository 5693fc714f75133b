"""One attempt of one task: writes its messages in its own Kafka transaction and its rows to staging, for the job's decision.

The order matters: the id is claimed under the open run, so that a zombie can't start; what an earlier owner of the id left is
resolved before anything is sent; the staged rows are committed only if the claim is still valid, so that a process that fences
the attempt sees all the rows that it will ever have; the Kafka transaction is prepared last.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from threading import Event, Thread
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from sqlalchemy import Connection

from dualwrite.errors import BatchRefusedError, DualWriteError, JobClosedError
from dualwrite.failpoints import hit
from dualwrite.jobs.job_context import OpenSite
from dualwrite.jobs.job_recovery import open_run
from dualwrite.jobs.rules import AttemptId, JobRun, OpeningResult, Prepared, TaskOutcome
from dualwrite.kafka.base import ProducerFactory, TransactionalProducer
from dualwrite.observability import observers
from dualwrite.observability.events import TaskFailed, TaskPrepared
from dualwrite.observability.logs import SubjectLogger
from dualwrite.recipe.ownership import Ownership, Parties
from dualwrite.recovery.recoverer import describe_owner
from dualwrite.stores.base import Claim
from dualwrite.stores.sql.short import database_clock

log = SubjectLogger(__name__)

Batch = TypeVar("Batch")
BatchIn_contra = TypeVar("BatchIn_contra", contravariant=True)


class Loader(Protocol[BatchIn_contra]):
    """Loads rows into staging, in the caller's transaction. Until it has finished, nothing else may use the connection."""

    def add(self, batch: BatchIn_contra, /) -> None:
        """Load the rows of one batch."""

    def finish(self) -> int:
        """Complete the load; return how many rows were loaded."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None: ...


class Sink(Protocol[BatchIn_contra]):
    """Defines what a job writes, and how. The type of batches is up to the sink and the caller."""

    @property
    def staging_table(self) -> str:
        """The name of the staging table, as `quoted_name` writes it."""

    def send(self, batch: BatchIn_contra, producer: TransactionalProducer, /) -> int:
        """Send a batch's messages; return how many there were."""

    def loader(self, connection: Connection, claim: Claim, /) -> Loader[BatchIn_contra]:
        """The loader that writes a task's rows to staging, under the claim's id and fencing token."""

    def move(self, connection: Connection, keys: Sequence[tuple[str, int]], /) -> int:
        """Move the rows staged under these ids and fencing tokens into their table; return how many there were."""


class TaskAttempt(Generic[Batch]):
    """Runs one attempt of one task.

    Args:
        site: The database and Kafka.
        run: The run that the task belongs to.
        sink: What to write.
        partition: Number of the partition.
        attempt: The engine's number of the attempt; if another attempt uses it, the next free number is used.
    """

    def __init__(self, site: OpenSite, run: JobRun, sink: Sink[Batch], *, partition: int, attempt: int) -> None:
        self._site = site
        self._run = run
        self._sink = sink
        self._id = AttemptId(run.prefix, partition, attempt)
        self._task = uuid.uuid4().hex

    def write(self, batches: Iterable[Batch]) -> TaskOutcome:
        """Write all batches, then prepare. If there are no batches, nothing is opened, claimed or sent.

        Raises:
            JobClosedError: The run was closed or replaced.
            PrefixLeasedError: Another job holds the prefix.
            FencedError: Another attempt has claimed the id.
            ClusterMismatchError: The id was used on another Kafka cluster.
            DualWriteError: As for the steps of the recipe.
        """
        began = time.monotonic()
        try:
            return self._write(batches, began)
        except BaseException as error:
            if observers.installed:
                observers.notify(TaskFailed(self._run.name, str(self._id), error, time.monotonic() - began))
            raise

    def _write(self, batches: Iterable[Batch], began: float) -> TaskOutcome:
        remaining = iter(batches)
        with self._heartbeats_before_claim():
            first = next(remaining, None)
            if first is None:
                return self._outcome()
            owner, table = describe_owner("task"), self._sink.staging_table
            opening = open_run(self._site, self._run, owner=owner, staging_table=table, ids=[str(self._id)])
            if opening is OpeningResult.ALREADY_COMMITTED:
                return self._outcome(already_committed=True)  # does not read the remaining rows: computing them may take hours
            producers = self._site.producers(str(self._id))  # contacts Kafka before anything is claimed
            self._id, claim = self._site.ledger.claim(
                self._run, self._id, self._task, owner, timeout=self._site.site.timeouts.claim
            )
        hit("job_after_claim")
        rows, prepared = self._write_all(itertools.chain((first,), remaining), producers, claim)
        log.info("%d rows staged, %s prepared", rows, prepared.state, transactional_id=self._id)
        if observers.installed:
            messages = 0 if prepared.delivery is None else prepared.delivery.messages
            observers.notify(TaskPrepared(self._run.name, str(self._id), messages, time.monotonic() - began))
        return self._outcome(rows=rows, prepared=prepared)

    def _outcome(self, *, rows: int = 0, prepared: Prepared | None = None, already_committed: bool = False) -> TaskOutcome:
        return TaskOutcome(self._run, self._id.partition, self._id.attempt, rows, prepared, already_committed)

    def _write_all(self, batches: Iterator[Batch], producers: ProducerFactory, claim: Claim) -> tuple[int, Prepared]:
        site, timeouts, short = self._site, self._site.site.timeouts, self._site.store.short_transactions
        ownership = Ownership(Parties(site.store, site.coordinator, producers, timeouts), str(self._id))
        is_closed = Event()
        with self._heartbeats(is_closed):
            ownership.adopt(claim)
            ownership.resolve()
            ownership.start()
            hit("job_after_start")
            try:
                return self._send_and_stage(ownership, batches, is_closed)
            except short.driver_errors as error:
                raise short.errors.translated(error, "staging a task's rows", str(self._id)) from error
            finally:
                ownership.drop_producer()  # leaves the transaction open

    def _send_and_stage(self, ownership: Ownership, batches: Iterator[Batch], is_closed: Event) -> tuple[int, Prepared]:
        producer, claim, short = ownership.producer, ownership.claim, self._site.store.short_transactions
        began_at = short.query(database_clock, "reading the database's clock", str(self._id))
        producer.begin_transaction()
        try:
            with short.begin_long() as connection:
                with self._sink.loader(connection, claim) as loader:
                    sent = 0
                    for batch in batches:
                        self._check_open(is_closed)
                        sent += self._sink.send(batch, producer)
                        loader.add(batch)
                        hit("job_after_batch")
                    rows = loader.finish()
                hit("job_before_staged")
                self._site.ledger.check_fence(connection, claim)
                hit("job_after_fence")
            hit("job_after_staged")
            state = producer.prepare_transaction(timeout=self._site.site.timeouts.for_delivery)
            hit("job_after_prepare")
        except BaseException:
            self._abort(producer)
            raise
        if state is None or sent != rows:
            raise BatchRefusedError(
                f"The task sent {sent} messages and staged {rows} rows; the numbers must be equal.",
                transactional_id=str(self._id),
                next_step="this is a bug in dualwrite or in the given sink; please report it",
            )
        return rows, Prepared(
            transactional_id=str(self._id),
            fence=claim.fence,
            owner=claim.owner,
            generation=ownership.generation,
            state=state,
            delivery=producer.delivery,
            began_at=began_at,
            timeout=producer.transaction_timeout,
        )

    def _abort(self, producer: TransactionalProducer) -> None:
        """Abort our own transaction, so that consumers don't have to wait until another process resolves it."""
        if producer.must_be_replaced:
            return
        try:
            producer.abort_transaction(timeout=self._site.site.timeouts.kafka)
        except DualWriteError as error:
            log.warning("the transaction could not be aborted and is left to recovery: %s", error, transactional_id=self._id)

    def _check_open(self, is_closed: Event) -> None:
        if is_closed.is_set():
            raise JobClosedError(
                f"The task was stopped: its run of {self._run.name} was closed, or its id was claimed by another run.",
                cause="the task outlived its run, or the job runs twice at once",
                next_step="nothing of this task is kept; make sure that the job runs only once at a time",
                **self._run.facts,
            )

    # --- heartbeats: without them, the run of a batch write is presumed dead ----------------------------------------------

    def _heartbeats(self, is_closed: Event) -> AbstractContextManager[None]:
        """Send heartbeats while the block runs; the event is set once the run is closed, or the attempt has lost its id."""

        def beat() -> bool:
            if not self._site.ledger.beat(self._run, str(self._id)):
                is_closed.set()
            return not is_closed.is_set()

        return _repeated(beat, str(self._id), self._site.site.heartbeat_interval)

    def _heartbeats_before_claim(self) -> AbstractContextManager[None]:
        """Like `_heartbeats`, before the id is claimed; the run may be open already because of other tasks."""
        seen: datetime | None = None

        def beat() -> bool:
            nonlocal seen
            seen = self._site.ledger.beat_before_claim(self._run, seen)
            return True

        return _repeated(beat, str(self._id), self._site.site.heartbeat_interval)


@contextmanager
def _repeated(beat: Callable[[], bool], name: str, interval: float) -> Iterator[None]:
    """Call `beat` every `interval` seconds in a thread while the block runs, until it returns False."""
    stop = Event()

    def run() -> None:
        while not stop.wait(interval):
            try:
                if not beat():
                    return
            except DualWriteError as error:
                log.warning("a heartbeat could not be sent: %s", error, transactional_id=name)

    thread = Thread(target=run, name=f"dualwrite-{name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
