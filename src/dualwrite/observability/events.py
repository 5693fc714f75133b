"""What observers are told: one class for each event, with the durations of the steps in seconds.

Events are made only while there is an observer, and one object goes to all observers: don't change it. Durations are measured
with `time.perf_counter`. An event has no time of its own; the observer is called when it happens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(slots=True, eq=False)
class Event:
    """The base class of all events."""


class Steps(NamedTuple):
    """How long each step of the recipe has taken, in seconds; 0 for a step that the transaction did not have.

    Args:
        block: From BEGIN to the end of the block, or of the group's last unit: the user's code.
        delivery: Until all messages were acknowledged, and Kafka's side was prepared.
        record: Writing the prepared state into the row. On PostgreSQL it may go out together with COMMIT, which then has its
            duration.
        database_commit: The database's COMMIT.
        kafka_commit: Kafka's commit (EndTxn).
    """

    block: float = 0.0
    delivery: float = 0.0
    record: float = 0.0
    database_commit: float = 0.0
    kafka_commit: float = 0.0


# --- transactions -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class TransactionEvent(Event):
    """The base class of the events of a transaction of a writer, which may be that of a pool's group.

    Args:
        transactional_id: The logical transactional id.
        lane: The id of the lane that has the transaction.
        number: The transaction's number, which no other one in this process has.
    """

    transactional_id: str
    lane: str
    number: int


@dataclass(slots=True, eq=False)
class TransactionBegun(TransactionEvent):
    """A transaction has begun."""


@dataclass(slots=True, eq=False)
class MessagesDelivered(TransactionEvent):
    """Kafka's side is prepared: all messages were acknowledged.

    Args:
        messages: The number of messages; 0 also if they go into the journal.
        seconds: The duration of the delivery.
    """

    messages: int
    seconds: float


@dataclass(slots=True, eq=False)
class StateRecorded(TransactionEvent):
    """The prepared state is in the database transaction.

    Args:
        seconds: The duration of the step.
    """

    seconds: float


@dataclass(slots=True, eq=False)
class DatabaseCommitted(TransactionEvent):
    """The database has committed: from now on the outcome is decided.

    Args:
        seconds: The duration of COMMIT.
    """

    seconds: float


@dataclass(slots=True, eq=False)
class TransactionCommitted(TransactionEvent):
    """Both sides are committed.

    Args:
        outcome: "published", or "journaled" if the messages are in the journal.
        messages: The number of messages.
        seconds: The duration of the whole transaction.
        steps: The durations of its steps.
        was_in_doubt: Whether its outcome was unknown for a moment, and the writer has found out that it committed.
    """

    outcome: Literal["published", "journaled"]
    messages: int
    seconds: float
    steps: Steps
    was_in_doubt: bool


@dataclass(slots=True, eq=False)
class TransactionRolledBack(TransactionEvent):
    """Neither side has committed.

    Args:
        error: Why; what the block has raised, or the error of a step.
        seconds: The duration of the transaction.
    """

    error: BaseException
    seconds: float


@dataclass(slots=True, eq=False)
class TransactionInDoubt(TransactionEvent):
    """The outcome is unknown; the writer, or recovery, will resolve it.

    Args:
        error: Why.
        seconds: The duration of the transaction so far.
    """

    error: BaseException
    seconds: float


@dataclass(slots=True, eq=False)
class TransactionLost(TransactionEvent):
    """The database has committed, Kafka's side was aborted, and the messages could not be published again.

    Args:
        error: A LostTransactionError or an UnverifiedTransactionError.
        seconds: The duration of the transaction.
    """

    error: BaseException
    seconds: float


# --- pools ------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class GroupFormed(Event):
    """A group of a pool is complete, and about to commit.

    Args:
        transactional_id: The writer's.
        number: The number of its transaction.
        units: The number of units in it.
    """

    transactional_id: str
    number: int
    units: int


@dataclass(slots=True, eq=False)
class UnitEnded(Event):
    """The caller of a unit of a pool gets the outcome.

    Args:
        prefix: The pool's prefix.
        unit: The name of the unit's function.
        waited: Seconds until the unit began to run.
        seconds: Seconds from the call to the outcome, `waited` included.
        error: What the caller gets; None if the unit has committed.
    """

    prefix: str
    unit: str
    waited: float
    seconds: float
    error: BaseException | None


@dataclass(slots=True, eq=False)
class LeaseTaken(Event):
    """A pool or a relay has leased an id.

    Args:
        prefix: The prefix.
        transactional_id: The id.
    """

    prefix: str
    transactional_id: str


@dataclass(slots=True, eq=False)
class LeaseLost(Event):
    """Another process has leased an id that a pool or a relay of this process has had.

    Args:
        prefix: The prefix.
        transactional_id: The id.
    """

    prefix: str
    transactional_id: str


# --- recovery ---------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class TransactionRecovered(Event):
    """Recovery, or a writer that has opened, has resolved what an earlier transaction has left.

    Args:
        transactional_id: The id of the lane.
        generation: The generation of the lane's producer.
        outcome: The value of a `dualwrite.Outcome`, such as "COMMITTED", "ABORTED" or "LOST".
    """

    transactional_id: str
    generation: int
    outcome: str


@dataclass(slots=True, eq=False)
class MessagesPublishedAgain(Event):
    """The messages of a lost transaction were published again.

    Args:
        transactional_id: The id of the lane.
        messages: The number of messages.
    """

    transactional_id: str
    messages: int


@dataclass(slots=True, eq=False)
class TransactionsForgotten(Event):
    """The database has gone back to before transactions that it had committed. Their messages are visible, their rows are gone.

    Args:
        transactional_id: The id of the lane.
        transactions: How many there are at least.
        messages: How many messages they have, as far as that is known.
    """

    transactional_id: str
    transactions: int
    messages: int


# --- the journal ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class JournalOpened(Event):
    """Messages of a prefix go into the journal.

    Args:
        prefix: The prefix of its pools.
    """

    prefix: str


@dataclass(slots=True, eq=False)
class JournalClosed(Event):
    """The journal of a prefix is empty, and messages go to Kafka again.

    Args:
        prefix: The prefix of its pools.
    """

    prefix: str


# --- consuming and relaying ---------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class BatchProcessed(Event):
    """A processor has committed a batch of messages.

    Args:
        group_id: The consumer group.
        messages: The number of messages in each topic.
        seconds: The duration, from the first attempt to the commit.
    """

    group_id: str
    messages: dict[str, int]
    seconds: float


@dataclass(slots=True, eq=False)
class BatchFailed(Event):
    """An attempt to process a batch has failed; it is tried again, its messages one by one, or the processor stops.

    Args:
        group_id: The consumer group.
        messages: The number of messages of the batch.
        error: What the attempt has raised.
    """

    group_id: str
    messages: int
    error: BaseException


@dataclass(slots=True, eq=False)
class DeadLettered(Event):
    """A processor has sent a message that can't be processed to its dead-letter topic; a relay has put a row aside.

    Args:
        source: The consumer group, or the relay's name.
        topic: The message's topic.
        error: Why.
    """

    source: str
    topic: str
    error: BaseException | None


@dataclass(slots=True, eq=False)
class RowsRelayed(Event):
    """A relay has published rows of an outbox, or entries of a journal, in one transaction.

    Args:
        transactional_id: The id of its shard.
        rows: The number of rows.
        seconds: The duration of the transaction.
    """

    transactional_id: str
    rows: int
    seconds: float


# --- Spark --------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class TaskPrepared(Event):
    """A task of a job has prepared its part, on an executor.

    Args:
        job: The job's name.
        transactional_id: The task's id.
        messages: The number of messages.
        seconds: The duration of the task.
    """

    job: str
    transactional_id: str
    messages: int
    seconds: float


@dataclass(slots=True, eq=False)
class TaskFailed(Event):
    """An attempt of a task has failed, on an executor; the engine may try it again. One that is killed can't tell.

    Args:
        job: The job's name.
        transactional_id: The task's id.
        error: Why: a JobClosedError or FencedError if it has outlived its run, or another attempt has its id.
        seconds: The duration of the attempt.
    """

    job: str
    transactional_id: str
    error: BaseException
    seconds: float


@dataclass(slots=True, eq=False)
class JobAborted(Event):
    """The driver has aborted a run of a job, or of a micro-batch.

    Args:
        prefix: The prefix of its tasks.
        job: The job's name.
    """

    prefix: str
    job: str


@dataclass(slots=True, eq=False)
class JobCommitted(Event):
    """The driver has committed a job, or a micro-batch of a query.

    Args:
        job: The job's name.
        tasks: The number of tasks.
        seconds: The duration of the commit.
    """

    job: str
    tasks: int
    seconds: float


# --- outages ------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class OutageBegan(Event):
    """Kafka or a database does not answer.

    Args:
        side: Which, in words: "Kafka at …", "The database …".
        reason: What was not answered.
    """

    side: str
    reason: str


@dataclass(slots=True, eq=False)
class OutageEnded(Event):
    """Kafka or a database answers again.

    Args:
        side: As in OutageBegan.
        seconds: The duration of the outage.
    """

    side: str
    seconds: float
