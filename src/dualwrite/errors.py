"""The one exception tree: what failed, for which id, the likely cause, the next step.

Every error carries its facts as attributes, says whether trying the same again makes sense (`retriable`), and survives
pickling, since errors cross process borders (Spark, multiprocessing).
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any, ClassVar, Final

_NEEDS_NO_QUOTES: Final = re.compile(r"[\w@%+=:,./-][\w@%+=:,./~-]*", re.ASCII)


def shell_word(text: str) -> str:
    """A text as a shell takes it for one word, for commands in a next step."""
    return text if _NEEDS_NO_QUOTES.fullmatch(text) else shlex.quote(text)


class DualWriteError(Exception):
    """Root of every error that dualwrite raises on purpose.

    Args:
        what: One sentence: what failed.
        transactional_id: The id it failed for, when there is one.
        cause: The likely cause, as far as it is known.
        next_step: What the reader can do now.
        facts: Further facts; each becomes an attribute of the error. Its class declares those that it may have; one that it
            does not have is an AttributeError.
    """

    lane: str
    """The id of the lane that the error is about, where it is not the first one of its id."""

    retriable: ClassVar[bool] = False
    """Whether the same call, made again, may succeed without anybody changing anything."""

    def __init__(
        self,
        what: str,
        *,
        transactional_id: str | None = None,
        cause: str | None = None,
        next_step: str | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.transactional_id = transactional_id
        self.cause = cause
        self.next_step = next_step
        self.facts = facts

    if not TYPE_CHECKING:  # each class declares its own, so that a type checker finds a name that is none

        def __getattr__(self, name: str) -> Any:
            facts = self.__dict__.get("facts", {})
            if name in facts:
                return facts[name]
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __str__(self) -> str:
        text = self.what
        if self.transactional_id is not None:
            text += f" [transactional id {self.transactional_id!r}]"
        if self.cause:
            text += f" Cause: {self.cause}"
        if self.next_step:
            text += f" Next step: {self.next_step}"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        known = {"transactional_id": self.transactional_id, "cause": self.cause, "next_step": self.next_step}
        return _rebuild, (type(self), self.what, {**known, **self.facts})


def _rebuild(kind: type[DualWriteError], what: str, facts: dict[str, Any]) -> DualWriteError:
    return kind(what, **facts)


# --- how dualwrite was called -----------------------------------------------------------------------------------------


class ConfigurationError(DualWriteError, ValueError):
    """A setting is missing, unknown, or contradicts another; nothing was opened."""


class MissingDependencyError(ConfigurationError):
    """An optional package is not installed; the message gives the pip command."""


class InvalidTransactionalIdError(ConfigurationError):
    """A transactional id is empty, too long, or holds a character that dualwrite keeps for itself."""


class InvalidMessageError(DualWriteError, TypeError):
    """A topic, key, value, header, partition or timestamp has a type or value that Kafka can't take; nothing was sent."""


class UsageError(DualWriteError, RuntimeError):
    """A call at a moment at which it has no meaning; nothing was changed by it."""


class InvalidTransitionError(UsageError):
    """A producer's method was called in a state that does not allow it. Attributes: `state`, `allowed` (method names)."""

    state: str
    allowed: tuple[str, ...]


class NestedTransactionError(UsageError):
    """`transaction()` inside another `transaction()` of the same writer."""


class ConcurrentUseError(UsageError):
    """A second thread used a writer while the first was inside it. One writer serves one thread at a time."""


class WriterClosedError(UsageError):
    """The writer, or the transaction that the handle belonged to, has ended."""


class TransactionControlError(UsageError):
    """The user's block tried to end or replace the transaction that the writer owns (commit, rollback, close, BEGIN)."""

    call: str


# --- who holds the id -------------------------------------------------------------------------------------------------


class FencedError(DualWriteError):
    """Somebody else has claimed the transactional id since; this holder's transaction was rolled back on both sides.

    Attributes: `fence` (ours), `current_fence` and `current_owner` where they are known.
    """

    fence: int
    current_fence: int | None
    current_owner: str | None


class ClaimTimeoutError(DualWriteError):
    """The row of the id stayed locked for longer than the claim may wait.

    Attributes: `timeout` (seconds), `blocker` (what holds the lock, where the database tells; PostgreSQL: its backend pid).
    """

    timeout: float
    blocker: str | None
    blocker_pid: int | None

    retriable = True


class PrefixLeasedError(DualWriteError):
    """Another job holds the prefix of transactional ids; nothing was written.

    Attributes: `prefix`, `job_id`, `batch_id` and `owner` of the holder.
    """

    prefix: str
    job_id: str
    batch_id: int
    owner: str


class JobClosedError(DualWriteError):
    """The run that a task belongs to has ended, or was replaced by a newer one; nothing of the task is kept.

    Attributes: `prefix`, `job_id`, `batch_id`.
    """

    prefix: str
    job_id: str
    batch_id: int


class BatchRefusedError(DualWriteError):
    """A batch can't be committed, and surely was not; its messages are aborted. Attributes: `prefix`, `job_id`, `batch_id`."""

    prefix: str
    job_id: str
    batch_id: int


class JobPlanChangedError(DualWriteError):
    """A job of this id was cut in another way before: another number of partitions, or of rows in a transaction.

    Nothing was written by the attempt that found it. Attributes: `job_id`, `before` and `now` (a JobPlan's texts).
    """

    job_id: str
    before: str
    now: str


class ChunkChangedError(DualWriteError):
    """A chunk that was committed holds other rows now, or is gone: what feeds the job does not give the same rows again.

    Nothing was written by the attempt that found it. Attributes: `job_id`, `partition`, `chunk`, `committed_rows`, and `rows`
    (None where the chunk is gone).
    """

    job_id: str
    partition: int
    chunk: int
    committed_rows: int
    rows: int | None


# --- the database side ------------------------------------------------------------------------------------------------


class StoreError(DualWriteError):
    """Something on the database's side."""


class StoreUnavailableError(StoreError):
    """The database can't be reached, or ended the connection, at a moment at which nothing was in doubt."""

    retriable = True


class StateTableMissingError(StoreError):
    """The table `kafka_transaction_state` is missing or older than this release; the message names the command."""


class StoredStateError(StoreError):
    """A stored row can't be read: its prepared state does not parse. Attributes: `text`."""

    text: str


class StoreCopiedError(StoreError):
    """The database is a copy of the one in which its ids were made, or that one in another place. Nothing was changed.

    Original and copy have the same ids at Kafka, so that each would abort what the other has committed. Attributes: `store_id`,
    `kept` and `found` (where the ids were made, and what answers now).
    """

    store_id: str
    kept: str
    found: str


class NotSettledError(StoreError):
    """`forget` was asked to drop an id that still has something to recover or to acknowledge."""


class StoreCommitFailedError(StoreError):
    """The database surely did not commit: rolled back, nothing of the transaction is left. May be tried again."""

    retriable = True


class StoreCommitUnknownError(StoreError):
    """COMMIT was sent and the answer never came: the database may have committed or not. Never guess; resolve."""


# --- Kafka's side -----------------------------------------------------------------------------------------------------


class BrokerError(DualWriteError):
    """Something on Kafka's side. Attributes: `code` and `name` of Kafka's error where it gave one."""

    code: int
    name: str


class BrokerUnavailableError(BrokerError):
    """No broker, or no transaction coordinator, answered in time."""

    servers: str

    retriable = True


class BrokerAuthorizationError(BrokerError):
    """The principal lacks an ACL, or authentication failed; the message names what to grant."""


class UnknownTopicError(BrokerError):
    """The topic does not exist, and the broker does not create topics by itself."""


class MessageTooLargeError(BrokerError):
    """A message is larger than the producer or the broker takes. Attributes: `size` (bytes), `limit` where known."""

    size: int
    limit: int


class UnknownTransactionStateError(BrokerError):
    """The coordinator names a transaction state that this release does not know; nothing was done. Attributes: `state`."""

    state: str


class DeliveryError(BrokerError):
    """A message of the transaction could not be written to its partition; both sides were rolled back."""

    retriable = True


class MessageRefusedError(DeliveryError):
    """The broker refuses a message for what it is, and would each time; both sides were rolled back.

    Such as a message without a key in a compacted topic, or with a timestamp that the topic does not take.
    """

    retriable = False


class ClusterMismatchError(BrokerError):
    """This is not the Kafka cluster that the id's row speaks of. Nothing was claimed, changed or sent.

    Attributes: `stored_cluster_id` (the row's) and `seen_cluster_id` (Kafka's `cluster.id` as it was answered).
    """

    stored_cluster_id: str
    seen_cluster_id: str


class ProducerFencedError(BrokerError):
    """The broker fenced this producer: its id was taken over, or its transaction was ended by somebody else."""


class TransactionTimeoutError(BrokerError):
    """Too little of `transaction.timeout.ms` is left to commit safely; both sides were rolled back before the commit point.

    Attributes: `elapsed`, `timeout` (seconds).
    """

    elapsed: float
    timeout: float

    retriable = True


class TransactionTimeoutRefusedError(BrokerError, ConfigurationError):
    """The broker refuses `transaction.timeout.ms`: it is above its `transaction.max.timeout.ms`."""


class TwoPhaseCommitRefusedError(BrokerAuthorizationError, ConfigurationError):
    """Two-phase commit was asked for, and the broker, its settings or its ACLs do not allow it (KIP-939)."""


class PrepareError(BrokerError):
    """The broker does not hold the transaction as ours and ongoing, so it can't be prepared; both sides were rolled back."""

    retriable = True


# --- outcomes of a transaction that need a name -----------------------------------------------------------------------


class InDoubtTransactionError(DualWriteError):
    """This process can't tell whether the transaction committed. Recovery (here or elsewhere) settles it; never redo blindly.

    Attributes: `state` (text of the PreparedTxnState, or ""), `database_committed` (True, or None when unknown).
    """

    state: str
    database_committed: bool | None


class LostTransactionError(DualWriteError):
    """The database committed and Kafka provably aborted (timed out): the messages of the transaction are lost.

    Possible only without broker-side two-phase commit. Attributes: `state`, `generation`.
    """

    state: str
    generation: int
    delivery: Any  # a Delivery, or None; it stands above this file


class UnverifiedTransactionError(DualWriteError):
    """The database committed, and Kafka no longer has evidence of what became of the messages.

    Attributes: `state`, `generation`.
    """

    state: str
    generation: int
    delivery: Any  # a Delivery, or None; it stands above this file


class RecoveryError(DualWriteError):
    """Recovery of at least one id did not finish; the report tells which. Attributes: `report`."""

    report: Any  # a RecoveryReport, which stands above this file

    retriable = True
