"""The exception classes. Each error says what failed, for which id, the likely cause, and the next step.

Errors have their facts as attributes and a class attribute `retriable`, and can be pickled, since they cross process
boundaries (Spark, multiprocessing).
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Final, ParamSpec, TypeVar

_T = TypeVar("_T")
_P = ParamSpec("_P")
_NEEDS_NO_QUOTES: Final = re.compile(r"[\w@%+=:,./-][\w@%+=:,./~-]*", re.ASCII)


class DualWriteError(Exception):
    """Base class of every error that dualwrite raises deliberately.

    `str(error)` has what failed, the cause and the next step on lines of their own, f"{error}" has them on one line.

    Attributes: `retriable` (whether the same call may succeed if it is repeated), and `lane` (the id of the lane that
    the error is about, if it is not lane 0).

    Args:
        what: One sentence that says what failed.
        transactional_id: The transactional id concerned, if any.
        cause: The likely cause, if known.
        next_step: What the reader can do now.
        facts: Further facts; each becomes an attribute of the error. The class declares the possible ones; reading one that
            this error does not have raises AttributeError.
    """

    lane: str

    retriable: ClassVar[bool] = False

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

    if not TYPE_CHECKING:  # each class declares its own, so that a type checker finds unknown names

        def __getattr__(self, name: str) -> Any:
            facts = self.__dict__.get("facts", {})
            if name in facts:
                return facts[name]
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __str__(self) -> str:
        return "\n".join(self._parts)

    def __format__(self, format_spec: str) -> str:
        """On one line, as a part of another text, or of a log record."""
        return format(" ".join(" ".join(self._parts).split("\n")), format_spec)

    @property
    def _parts(self) -> list[str]:
        about = "" if self.transactional_id is None else f" [transactional id {self.transactional_id!r}]"
        further = (("Cause", self.cause), ("Next step", self.next_step))
        return [f"{self.what}{about}", *(f"{name}: {text}" for name, text in further if text)]

    def __reduce__(self) -> tuple[Any, ...]:
        known = {"transactional_id": self.transactional_id, "cause": self.cause, "next_step": self.next_step}
        return _rebuild, (type(self), self.what, {**known, **self.facts})


def _rebuild(kind: type[DualWriteError], what: str, facts: dict[str, Any]) -> DualWriteError:
    return kind(what, **facts)


# --- how dualwrite was called: settings, ids, and calls at a time when they are not allowed -----------------------------------


class ConfigurationError(DualWriteError, ValueError):
    """A setting is missing, unknown, or contradicts another; nothing was opened."""


class MissingDependencyError(ConfigurationError):
    """An optional package is not installed; the message gives the pip command."""


class InvalidTransactionalIdError(ConfigurationError):
    """A transactional id is empty, too long, or contains a reserved character (`#`, `~`) or a control character."""


class UsageError(DualWriteError, RuntimeError):
    """A method was called at a time when it is not allowed; the call changed nothing."""


class InvalidTransitionError(UsageError):
    """A producer's method was called in a state that does not allow it. Attributes: `state`, `allowed` (method names)."""

    state: str
    allowed: tuple[str, ...]


class NestedTransactionError(UsageError):
    """`transaction()` was called inside another transaction of the same writer, or a pool was called from one of its units."""


class ConcurrentUseError(UsageError):
    """A second thread used a writer while the first was using it. A writer can be used by one thread at a time.

    Also raised if the thread that looks after idle writers has been using the writer for two minutes.
    """


class WriterClosedError(UsageError):
    """The writer is closed or was never opened, or the transaction has ended."""


class TransactionControlError(UsageError):
    """The user's block tried to end or replace the transaction that the writer owns (commit, rollback, close, BEGIN)."""

    call: str


# --- messages that Kafka does not accept, and keys or values that could not be serialized or deserialized ---------------------


class InvalidMessageError(DualWriteError, TypeError):
    """A topic, key, value, header, partition or timestamp has a type or value that Kafka does not accept; nothing was sent."""


class SerializationError(InvalidMessageError):
    """A serializer could not make bytes of a key or a value; nothing was sent. Its `__cause__` says why.

    Attributes: `topic`, `field` ("key" or "value").
    """

    topic: str
    field: str


class DeserializationError(DualWriteError):
    """A deserializer could not read a key or a value. Its `__cause__` says why. Attributes: `topic`, `field`."""

    topic: str
    field: str


class SchemaRegistryUnavailableError(DualWriteError):
    """A serializer or deserializer could not reach its schema registry. Attributes: `topic`, `field`."""

    topic: str
    field: str

    retriable = True


# --- Kafka's side -------------------------------------------------------------------------------------------------------------


class BrokerError(DualWriteError):
    """An error on Kafka's side.

    Attributes: `code` and `name` of Kafka's error, if it returned one; `throttled`, the seconds for which a quota of Kafka has
    held the call back, if that is why it took too long.
    """

    code: int
    name: str
    throttled: float


class BrokerUnavailableError(BrokerError):
    """No broker, or no transaction coordinator, answered within the time limit; or there is no token to log in with.

    Or Kafka was too slow to publish lost messages again, which the next transaction waits for.
    """

    servers: str

    retriable = True


class BrokerAuthorizationError(BrokerError):
    """Kafka answers, and refuses this client: it is no outage, and stays so until somebody changes something.

    A login, a certificate or `security.protocol` is wrong, the broker's certificate is not trusted, or an ACL is missing. The
    message names the setting to change, or the ACL to grant.
    """


class UnsupportedBrokerError(BrokerAuthorizationError):
    """The broker lacks requests that a transaction needs: it is too old, or has no transactions. Attributes: `lacks`."""

    lacks: tuple[str, ...]


class UnknownTopicError(BrokerError):
    """The topic does not exist, and the broker does not create topics automatically."""


class UnknownGroupError(BrokerError):
    """There is no consumer group of this name, or the principal may not see it."""


class MessageTooLargeError(BrokerError):
    """A message is larger than the producer or the broker accepts. Attributes: `size` (bytes), and `limit` if known."""

    size: int
    limit: int


class UnknownTransactionStateError(BrokerError):
    """The coordinator returned a transaction state that this release does not know; nothing was done. Attributes: `state`."""

    state: str


class TransactionChangedError(BrokerError):
    """The transaction that was to be ended has ended, or another has begun, or its id was claimed; nothing was done."""


class MessagesCommittedError(BrokerError):
    """The log shows that the transaction was committed, and not aborted: its messages must not be published again.

    Attributes: `topic`, `partition`, `offset` (that of the COMMIT marker).
    """

    topic: str
    partition: int
    offset: int


class MessagesChangedError(BrokerError):
    """The aborted messages of a transaction are not the ones any more that were found in the log before.

    What was read until then must not be committed. Attributes: `topic`, `partition`.
    """

    topic: str
    partition: int

    retriable = True


class RepairRefusedError(BrokerError):
    """An operator's repair could contradict what a coordinator or a database has decided, or may decide; nothing was done."""


class DeliveryError(BrokerError):
    """A message of the transaction could not be written to its partition; both sides were rolled back."""

    retriable = True


class MessageRefusedError(DeliveryError):
    """The broker rejected a message and would reject it on every attempt; both sides were rolled back.

    Examples: a message without a key in a compacted topic, a timestamp that the topic does not accept.
    """

    retriable = False


class HostClockError(DeliveryError):
    """Kafka refused the timestamp that a message got from this host's clock; both sides were rolled back.

    Nothing is wrong with the message: relays, processors and journals wait until the clock is right. Attributes: `ahead`, the
    seconds by which this host's clock is ahead of the broker's (negative: behind it), or None if that is not known.
    """

    ahead: float | None


class ClusterMismatchError(BrokerError):
    """The row of the id, or of another id of its name, names another Kafka cluster. Nothing was claimed, changed or sent.

    Attributes: `stored_cluster_id` (in the row) and `seen_cluster_id` (the `cluster.id` that Kafka returned).
    """

    stored_cluster_id: str
    seen_cluster_id: str


class ProducerFencedError(BrokerError):
    """The broker fenced this producer: another process took over its id or ended its transaction."""


class TransactionTimeoutError(BrokerError):
    """Too little of `transaction.timeout.ms` is left to commit safely; both sides were rolled back before the commit point.

    Attributes: `elapsed`, `timeout` (seconds).
    """

    elapsed: float
    timeout: float

    retriable = True


class TransactionTimeoutRefusedError(BrokerError, ConfigurationError):
    """The broker rejected `transaction.timeout.ms` because it is above the broker's `transaction.max.timeout.ms`."""


class TwoPhaseCommitRefusedError(BrokerAuthorizationError, ConfigurationError):
    """Two-phase commit was required, and the broker, its settings or its ACLs do not allow it (KIP-939)."""


class PrepareError(BrokerError):
    """The broker does not show the transaction as ongoing and ours, so it can't be prepared; both sides were rolled back."""

    retriable = True


# --- the database's side ------------------------------------------------------------------------------------------------------


class StoreError(DualWriteError):
    """An error on the database's side."""


class StoreUnavailableError(StoreError):
    """The database can't be reached or closed the connection, at a time when nothing was in doubt."""

    retriable = True


class StoreLockedError(StoreUnavailableError):
    """Another transaction held a lock for longer than the time limit, at a time when nothing was in doubt."""


class StoreNotWritableError(StoreUnavailableError):
    """The database answers, but takes no writes now: it or the session is read-only, or its disk or memory is full.

    Nothing was in doubt, and the same call may succeed later. The connection is replaced.
    """


class StateTableMissingError(StoreError):
    """The table `kafka_transaction_state` is missing or older than this release; the message names the command to run."""


class StoredStateError(StoreError):
    """A stored row can't be read: its prepared state does not parse. Attributes: `text`."""

    text: str


class StoreCopiedError(StoreError):
    """The database is a copy of the one in which its ids were made, or that database has moved. Nothing was changed.

    The original and the copy use the same ids at Kafka, so each would abort what the other has committed. Attributes:
    `store_id`, `kept` and `found` (the database in which the ids were made, and the database that answers now).
    """

    store_id: str
    kept: str
    found: str


class NotResolvedError(StoreError):
    """The id still has something to recover or to acknowledge, so it can't be forgotten or moved."""


class PositionMovedError(StoreError):
    """A consumer's position is not where it was when its messages were read: another consumer has moved it since.

    The transaction has no effect on either side. Attributes: `group_id`, `topic`, `partition`, and the offsets `expected` and
    `found` (None: none was stored).
    """

    group_id: str
    topic: str
    partition: int
    expected: int | None
    found: int | None


class StoreCommitFailedError(StoreError):
    """The database did not commit: the transaction was rolled back completely and may be retried."""

    retriable = True


class JournalSwitchedError(StoreCommitFailedError):
    """Messages go into the journal instead of to Kafka, or to Kafka again, since the transaction began.

    Both sides are rolled back; retriable. A pool runs the unit again by itself. Attribute: `epoch` of the gate, or None.
    """

    epoch: int | None


class JournalFullError(BrokerUnavailableError):
    """The journal has reached one of its limits: nothing was written. Attribute: `limit`, which one, in words."""

    limit: str


class StoreCommitUnknownError(StoreError):
    """COMMIT was sent and not answered: the database may or may not have committed. The outcome must be read, never guessed."""


# --- who owns a transactional id, the prefix of a job, or a writer of a pool --------------------------------------------------


class FencedError(DualWriteError):
    """Another writer or recoverer has claimed the transactional id; this writer's transaction was rolled back on both sides.

    Attributes: `fence` (this writer's fencing token), and, where they are known, `current_fence` and `current_owner`.
    """

    fence: int
    current_fence: int | None
    current_owner: str | None


class ClaimTimeoutError(DualWriteError):
    """The row of the id stayed locked for longer than the claim's time limit.

    Attributes: `timeout` (seconds), `blocker` (what holds the lock, if the database shows it), `blocker_pid` (PostgreSQL: the
    backend's process id).
    """

    timeout: float
    blocker: str | None
    blocker_pid: int | None

    retriable = True


class PoolTimeoutError(DualWriteError):
    """No writer of the pool was free, or the unit did not begin, within the time limit; nothing was done.

    Attributes: `timeout` (seconds), `running` (what each of the pool's writers was doing, as text).
    """

    timeout: float
    running: tuple[str, ...]

    retriable = True


class PrefixLeasedError(DualWriteError):
    """Another job owns the lease on the prefix of transactional ids; nothing was written.

    Attributes: `prefix`, and that job's `job_id`, `batch_id` and `owner`.
    """

    prefix: str
    job_id: str
    batch_id: int
    owner: str


# --- transactions that are in doubt, lost or unverified, and recoveries that did not finish -----------------------------------


class AfterCommitError(DualWriteError):
    """The transaction committed, and a listener of the ORM session's `after_commit` event raised an error.

    Or it was committed on a session of the user's whose connection was lost then, so that the session can't go on with it.
    Don't repeat the transaction. The listener's error is the `__cause__`.
    """


class InDoubtTransactionError(DualWriteError):
    """This process does not know whether the transaction committed on both sides. Recovery, here or elsewhere, resolves it.

    Or it knows that the database committed and Kafka aborted, and has not published the messages again yet.
    Don't repeat the transaction without checking in your data whether it committed. Attributes: `state` (text of the
    PreparedTxnState, or ""), `database_committed` (True, or None if unknown).
    """

    state: str
    database_committed: bool | None


class LostTransactionError(DualWriteError):
    """The database committed, Kafka provably aborted, and the messages of the transaction were not published again.

    The error says why they can't be; or `on_lost` is not "republish", and `dualwrite recover --republish` publishes them.
    Without two-phase commit a prepared transaction can time out; with it, only an operator, or a writer or recovery on another
    copy of the database, can abort one. Attributes: `state`, `generation`, `delivery`.
    """

    state: str
    generation: int
    delivery: Any  # a Delivery, or None; importing it here would be circular


class UnverifiedTransactionError(DualWriteError):
    """The database committed, and Kafka no longer has evidence of the messages' outcome. They are not published again.

    Attributes: `state`, `generation`, `delivery`.
    """

    state: str
    generation: int
    delivery: Any  # a Delivery, or None; importing it here would be circular


class CommittedTransactionsForgottenError(DualWriteError):
    """The database has forgotten transactions that it had committed: their messages are visible, and their rows are gone.

    It has gone back to an earlier state, as after a failover to an asynchronous standby. The writer reports this once, and goes
    on: the transaction that has found it was rolled back on both sides, and can be repeated. `dualwrite status` lists what was
    forgotten until somebody acknowledges it. Attributes: `state` and `generation` of the newest of these transactions,
    `transactions` (how many there are at least), `delivery` (where their messages are).
    """

    state: str
    generation: int
    transactions: int
    delivery: Any  # a Delivery, or None; importing it here would be circular

    retriable = True


class RecoveryError(DualWriteError):
    """Recovery of at least one id did not finish; the report shows which. Attributes: `report`."""

    report: Any  # a RecoveryReport; importing it here would be circular

    retriable = True


# --- messages that could not be processed, and positions from which a consumer can't continue ---------------------------------


class MessageFailedError(DualWriteError):
    """A message could not be processed in any attempt; the position was not moved past it. The `__cause__` says why.

    Attributes: `topic`, `partition`, `offset`, `attempts`.
    """

    topic: str
    partition: int
    offset: int
    attempts: int


class MessagesDeletedError(DualWriteError):
    """Retention has deleted messages before they were read. Nothing was changed.

    Attributes: `topic`, `partition`, `position`, `first_offset`.
    """

    topic: str
    partition: int
    position: int
    first_offset: int


class LogTruncatedError(DualWriteError):
    """A partition ends before the position: the brokers have lost messages that were read. Nothing was changed.

    Or it was truncated before the position and has grown again since; a restart does not notice that.

    Attributes: `topic`, `partition`, `position`, and `end_offset`, the end without open transactions.
    """

    topic: str
    partition: int
    position: int
    end_offset: int


class PositionForgottenError(DualWriteError):
    """The position of a partition was removed while the partition was read. Attributes: `topic`, `partition`, `position`."""

    topic: str
    partition: int
    position: int


class TopicReplacedError(DualWriteError):
    """A topic was deleted and created again since it was read: the positions refer to the old topic. Attributes: `topic`."""

    topic: str


# --- jobs: runs that were replaced, batches that can't be committed, and jobs that changed since they ran ---------------------


class JobClosedError(DualWriteError):
    """The run of a task has ended, or was replaced by a newer one; the task's writes were discarded.

    Attributes: `prefix`, `job_id`, `batch_id`.
    """

    prefix: str
    job_id: str
    batch_id: int


class BatchRefusedError(DualWriteError):
    """A batch can't be committed and was not; its messages are aborted. Attributes: `prefix`, `job_id`, `batch_id`."""

    prefix: str
    job_id: str
    batch_id: int


class JobPlanChangedError(DualWriteError):
    """The job ran before with another plan: another number of partitions, or of rows per transaction.

    The attempt that found this wrote nothing. Attributes: `job_id`, `before` and `now` (the text of each JobPlan).
    """

    job_id: str
    before: str
    now: str


class ChunkChangedError(DualWriteError):
    """A committed chunk has other rows now, or no longer exists: the job's input is not deterministic.

    The attempt that found this wrote nothing. Attributes: `job_id`, `partition`, `chunk`, `committed_rows`, and `rows` (None
    if the chunk no longer exists).
    """

    job_id: str
    partition: int
    chunk: int
    committed_rows: int
    rows: int | None


# --- the errors behind an error, and commands in next steps -------------------------------------------------------------------


def told_briefly(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """The function; an error of ours that has a next step leaves it without the frames below, and without the driver's errors.

    What it was raised from is its `__context__` then, with all frames. Other errors show all.
    """

    @functools.wraps(function)
    def door(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except DualWriteError as error:
            if error.next_step is None:
                raise
            raise error.with_traceback(None) from None

    return door


def causes_of(error: BaseException, *, before: BaseException | None = None) -> Iterator[BaseException]:
    """What an error was raised from, or else while handling it; then what is behind that, and so on, as a traceback shows it.

    Args:
        error: The error.
        before: What `sys.exception()` returned before the work began that raised the error. Python makes it the context of
            every error of the work, and it says nothing about them: neither it nor what is behind it is returned.
    """
    seen = {id(error), id(before)}
    while (found := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        if id(found) in seen:
            return
        seen.add(id(found))
        yield found
        error = found


def shell_word(text: str) -> str:
    """Quote a text, if necessary, so that a shell reads it as one word.

    What is not printable is escaped, as bash, ksh and zsh read it, so that the command can be shown, and pasted.
    """
    if _NEEDS_NO_QUOTES.fullmatch(text):
        return text
    return shlex.quote(text) if text.isprintable() else f"$'{''.join(map(_escaped, text))}'"


def _escaped(each: str) -> str:
    if each in "\\'":
        return f"\\{each}"
    return each if each.isprintable() else f"\\U{ord(each):08x}"


if not TYPE_CHECKING:  # a type checker can't evaluate it, and takes all names without an underscore
    __all__ = [name for name, each in tuple(globals().items()) if isinstance(each, type) and issubclass(each, DualWriteError)]
