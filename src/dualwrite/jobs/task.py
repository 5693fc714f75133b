"""One attempt of one task: its messages into a Kafka transaction of its own, its rows into staging, both left to the decision.

The order, and why: the claim is made under the open run, so that a zombie can't begin; what an earlier holder of the id left
is settled before anything is sent; the staged rows are committed on the condition that the claim still holds, so that who
fences the attempt sees all rows that it will ever have; the Kafka transaction is prepared last.
"""

from __future__ import annotations

import itertools
import logging
import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Generic, Protocol, Self, TypeVar

from sqlalchemy import Connection

from dualwrite.errors import BatchRefusedError, DualWriteError, JobClosedError
from dualwrite.failpoints import hit
from dualwrite.jobs.base import AttemptId, JobRun, Prepared, TaskOutcome
from dualwrite.jobs.clock import database_clock
from dualwrite.jobs.completing import cleanup
from dualwrite.jobs.context import OpenSite
from dualwrite.jobs.frame.staged_rows import StagedRows
from dualwrite.jobs.lease import Opening
from dualwrite.jobs.ledger import JobLedger
from dualwrite.kafka.base import TransactionalProducer
from dualwrite.recipe.ownership import Ownership
from dualwrite.recovery.clusters import check_cluster
from dualwrite.recovery.recoverer import describe_owner
from dualwrite.stores.base import Claim

log = logging.getLogger(__name__)

Batch = TypeVar("Batch")
BatchIn_contra = TypeVar("BatchIn_contra", contravariant=True)

BEAT: Final = 5.0
"""Seconds between two signs of life, at most."""


class Loader(Protocol[BatchIn_contra]):
    """Loads rows into staging, in the caller's transaction. Until it has finished, the connection is its own."""

    def add(self, batch: BatchIn_contra, /) -> None:
        """Load the rows of one batch."""

    def finish(self) -> int:
        """All rows are loaded; how many there were."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None: ...


class Sink(Protocol[BatchIn_contra]):
    """What a job writes, and how; batches are whatever sink and caller agree on."""

    @property
    def staging_table(self) -> str:
        """The name of the staging table, as `quoted_name` writes it."""

    def send(self, batch: BatchIn_contra, producer: TransactionalProducer, /) -> int:
        """Send a batch's messages; how many there were."""

    def loader(self, connection: Connection, claim: Claim, /) -> Loader[BatchIn_contra]:
        """What loads a task's rows into staging, under the claim's id and fence."""


class TaskAttempt(Generic[Batch]):
    """Runs one attempt of one task.

    Args:
        site: Where to write, opened.
        run: The run that the task belongs to.
        sink: What to write.
        partition: Number of the partition.
        attempt: Number of the attempt, by the engine; where another attempt has it, the next one is taken.
    """

    def __init__(self, site: OpenSite, run: JobRun, sink: Sink[Batch], *, partition: int, attempt: int) -> None:
        self._site = site
        self._run = run
        self._sink = sink
        self._id = AttemptId(run.prefix, partition, attempt)
        self._task = uuid.uuid4().hex

    def write(self, batches: Iterable[Batch]) -> TaskOutcome:
        """Write all batches, and prepare. Without a batch nothing is opened, claimed or sent.

        Raises:
            JobClosedError: The run is over, or was replaced.
            PrefixLeasedError: Another job holds the prefix.
            FencedError: Another attempt has claimed the id.
            ClusterMismatchError: The id was used on another Kafka cluster.
            DualWriteError: As the parts of the recipe.
        """
        remaining = iter(batches)
        first = next(remaining, None)
        if first is None:
            return self._outcome()
        check_cluster(self._site.store, self._site.coordinator, [str(self._id)])
        if self._open() is Opening.ALREADY_COMMITTED:
            return self._outcome(already_committed=True)  # the rows that are left are not read: computing them may take hours
        rows, prepared = self._written(itertools.chain((first,), remaining))
        log.info("%s: %d rows staged, %s prepared", self._id, rows, prepared.state)
        return self._outcome(rows=rows, prepared=prepared)

    def _outcome(self, *, rows: int = 0, prepared: Prepared | None = None, already_committed: bool = False) -> TaskOutcome:
        return TaskOutcome(
            self._run,
            self._id.partition,
            self._id.attempt,
            rows=rows,
            prepared=prepared,
            already_committed=already_committed,
        )

    def _open(self) -> Opening:
        """Open the run, and settle what earlier ones left, if nobody has yet. Opening it fences their tasks: Kafka first."""
        check_cluster(self._site.store, self._site.coordinator, [str(self._id)])
        made = self._site.ledger.open(
            self._run,
            owner=describe_owner("task"),
            staging_table=self._sink.staging_table,
            lease_timeout=self._site.site.lease_timeout,
        )
        hit("job_after_open")
        if made.earlier is not None and made.left:
            cleanup(self._site, made.left, StagedRows(made.earlier.staging_table))
        return made.outcome

    def _written(self, batches: Iterator[Batch]) -> tuple[int, Prepared]:
        site, timeouts, short = self._site, self._site.site.timeouts, self._site.store.short_transactions
        producers = site.producers(str(self._id))  # asks Kafka before anything is claimed
        self._id, claim = site.ledger.claim(self._run, self._id, self._task, describe_owner("task"), timeout=timeouts.claim)
        hit("job_after_claim")
        ownership = Ownership(site.store, site.coordinator, producers, transactional_id=str(self._id), timeouts=timeouts)
        with signs_of_life(site.ledger, self._run, str(self._id), every=min(BEAT, site.site.lease_timeout / 3)) as still_ours:
            ownership.adopt(claim)
            ownership.resolve()
            ownership.start()
            hit("job_after_start")
            try:
                return self._produced_and_staged(ownership, batches, still_ours)
            except short.driver_errors as error:
                raise short.errors.translated(error, "staging a task's rows", str(self._id)) from error
            finally:
                ownership.drop_producer()  # ends no transaction

    def _produced_and_staged(self, ownership: Ownership, batches: Iterator[Batch], still_ours: Pulse) -> tuple[int, Prepared]:
        producer, claim, short = ownership.producer, ownership.claim, self._site.store.short_transactions
        began_at = short.query(database_clock, "reading the database's clock", str(self._id))
        producer.begin_transaction()
        try:
            with short.begin_long() as connection:
                with self._sink.loader(connection, claim) as loader:
                    sent = 0
                    for batch in batches:
                        still_ours.check()
                        sent += self._sink.send(batch, producer)
                        loader.add(batch)
                        hit("job_after_batch")
                    rows = loader.finish()
                hit("job_before_staged")
                self._site.ledger.check_fence(connection, claim)
                hit("job_after_fence")
            hit("job_after_staged")
            state = producer.prepare_transaction(timeout=self._site.site.timeouts.delivery)
            hit("job_after_prepare")
        except BaseException:
            self._give_up(producer)
            raise
        if state is None or sent != rows:
            raise BatchRefusedError(
                f"The task sent {sent} messages and staged {rows} rows; each row is one message.",
                transactional_id=str(self._id),
                next_step="this is a defect of dualwrite, or of the sink that it was given: please report it",
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

    def _give_up(self, producer: TransactionalProducer) -> None:
        """Abort one's own transaction, so that readers need not wait for whoever settles the attempt."""
        if producer.must_be_replaced:
            return
        try:
            producer.abort_transaction(timeout=self._site.site.timeouts.kafka)
        except DualWriteError as error:
            log.warning("%s: the transaction is left to recovery: %s", self._id, error)


class Pulse:
    """Whether the run is still open and the attempt still ours, as far as it was last seen."""

    def __init__(self, run: JobRun) -> None:
        self._run = run
        self._over = threading.Event()

    def stop(self) -> None:
        """It is not."""
        self._over.set()

    def check(self) -> None:
        """Go on only while it is.

        Raises:
            JobClosedError: The run was closed or replaced, or another attempt has the id: nothing of this one is kept.
        """
        if self._over.is_set():
            raise JobClosedError(
                f"The task goes on no longer: its run of {self._run.name} was closed, or its id was claimed again.",
                prefix=self._run.prefix,
                job_id=self._run.job_id,
                batch_id=self._run.batch_id,
            )


@contextmanager
def signs_of_life(ledger: JobLedger, run: JobRun, transactional_id: str, *, every: float) -> Iterator[Pulse]:
    """Give a sign of life every few seconds while the block runs, so that the run is not taken for dead."""
    pulse, stop = Pulse(run), threading.Event()

    def beat() -> None:
        while not stop.wait(every):
            try:
                if not ledger.beat(run, transactional_id):
                    pulse.stop()
                    return
            except DualWriteError as error:
                log.warning("%s: no sign of life could be given: %s", transactional_id, error)

    thread = threading.Thread(target=beat, name=f"dualwrite-{transactional_id}", daemon=True)
    thread.start()
    try:
        yield pulse
    finally:
        stop.set()
        thread.join()
