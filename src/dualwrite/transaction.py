"""The transaction object of the user's code, `tx.db`, `tx.session`, `tx.send`, and what its writer and its pool do with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, Protocol, Self, TypeVar, cast

from dualwrite import process
from dualwrite.errors import ConcurrentUseError, InvalidMessageError, UsageError, WriterClosedError
from dualwrite.failpoints import hit
from dualwrite.kafka.base import GivenMessage, GroupMetadata, Headers, Message, TransactionalProducer, progress_of
from dualwrite.kafka.messages import Columns, checked
from dualwrite.observability import tracing
from dualwrite.observability.outages import BEGIN, Side
from dualwrite.observability.tracing import UnitTrace
from dualwrite.state import ConsumedOffset, Delivery, PreparedTxnState
from dualwrite.stores.base import StoreTransaction
from dualwrite.stores.positions import Move, Positions
from dualwrite.stores.store_transaction import RunAloneError

if TYPE_CHECKING:
    from sqlalchemy.orm import Session
    from typing_extensions import TypeVar as TypeVarWithDefault  # in typing from Python 3.13 on

    H = TypeVarWithDefault("H", default=Any)
else:
    H = TypeVar("H")


_MAX_DELAY_SECONDS: Final = 10 * 365 * 86_400
_MAX_CANCEL_ID: Final = 255

Outcome = Literal["published", "journaled"]
"""How a transaction was committed: its messages are Kafka's, or they are in the journal and will be published."""


class Transaction(Generic[H]):
    """One business transaction: writes through `db` and messages sent by `send` become visible together, or not at all.

    `Transaction[Connection]` is one whose `db` is a SQLAlchemy Connection; without a parameter `db` may be anything.

    `DualWriter.transaction()`, the units of a pool, and the handlers of a processor get one. It can't be used after its block,
    or its unit, has ended.
    """

    __slots__ = ("__weakref__", "_opened")

    def __init__(self, opened: OpenTransaction) -> None:
        self._opened = opened

    @property
    def db(self) -> H:
        """The handle for writing to the database: a SQLAlchemy Connection for SQL. It can't end the transaction.

        Raises:
            WriterClosedError: The block has ended.
        """
        handle: H = self._opened.db
        return handle

    @property
    def session(self) -> Session:
        """A SQLAlchemy ORM Session on the same database transaction as `db`.

        Raises:
            WriterClosedError: The block has ended.
            UsageError: The database is not a SQL database.
        """
        session: Session = self._opened.session
        return session

    @property
    def transactional_id(self) -> str:
        """The transactional id of the writer, for logs."""
        return self._opened.transactional_id

    @property
    def state(self) -> PreparedTxnState | None:
        """The prepared state of Kafka's side: None before the prepare, if no message was sent, and in a unit of a group."""
        return self._opened.state

    @property
    def outcome(self) -> Outcome | None:
        """After the block, or the unit's call: "published", or "journaled" if Kafka was down and the messages are sent later.

        None before, and if the transaction was rolled back or its outcome is unknown. Only with `when_kafka_is_down="journal"`
        can it be "journaled".
        """
        return self._opened.outcome

    def send(
        self,
        topic: str,
        value: bytes | str | None,
        *,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
        timestamp: int | None = None,
        not_before: datetime | None = None,
        delay: float | None = None,
        cancel_id: str | None = None,
    ) -> None:
        """Send one message as part of the transaction. It is sent immediately; consumers see it after the commit.

        In a unit of a pool it is checked now and sent after the unit: if the topic is missing, the unit fails then.

        Args:
            topic: The topic.
            value: Bytes, text (encoded as UTF-8), or None for a tombstone.
            key: Bytes, text or None; it determines the partition.
            headers: A mapping, or a sequence of pairs.
            partition: The partition, instead of the one determined by the key.
            timestamp: Milliseconds since 1970, instead of the current time; 0 only with the native producer.
            not_before: When it is published, at the earliest (aware); usually within half a second after that. Only with
                `acknowledge="journaled"`, as the following two: the message waits in the database.
            delay: The same, in seconds from now.
            cancel_id: Names a message that waits, so that `cancel` can cancel it: at most 255 characters. Only one message of
                the prefix may wait under an id.

        Raises:
            InvalidMessageError: An argument has the wrong type or is out of range; nothing was sent.
            UnknownTopicError: The topic does not exist.
            MessageTooLargeError: The message is larger than the producer accepts.
            DeliveryError: An earlier message of this transaction has failed, or the queue stayed full.
            WriterClosedError: The block has ended.
        """
        message: GivenMessage = (topic, value, key, headers, partition, timestamp)
        if not_before is not None or delay is not None or cancel_id is not None:
            if tracing.tracer is not None:
                (message,) = self._opened.traced((message,))
            self._opened.send_later(later_message(message, not_before, delay, cancel_id))
            return
        self._opened.send_messages((message,) if tracing.tracer is None else self._opened.traced((message,)))

    def send_many(
        self,
        topic: str,
        values: Iterable[bytes | str | None],
        *,
        keys: Iterable[bytes | str | None] | None = None,
        partition: int | None = None,
        timestamp: int | None = None,
    ) -> None:
        """Send many messages as part of the transaction. With the native producer this costs less than calling `send` for each.

        Args:
            topic: The topic.
            values: The value of each message; see `send`.
            keys: The key of each message; as many as there are values.
            partition: The partition for all messages.
            timestamp: The timestamp of all messages; by default the time of the call.

        Raises: as for `send`, and InvalidMessageError if the numbers of keys and values differ, or either is a single text.
            After an error some messages may have been sent.
        """
        messages = Columns(topic, values, keys=keys, partition=partition, timestamp=timestamp)
        self._opened.send_messages(messages if tracing.tracer is None else self._opened.traced(messages))

    def cancel(self, cancel_id: str) -> bool:
        """Cancel a message that waits for its time, as part of the transaction.

        Args:
            cancel_id: As it was given to `send`.

        Returns:
            Whether there was one. If not, it was published, or cancelled, before, or is not committed yet.

        Raises:
            UsageError: Not with `acknowledge="journaled"`; or in a session that was joined, where `WriterPool.cancel` does it.
        """
        return self._opened.cancel(cancel_id)

    def send_offsets(self, consumer: Any, offsets: Mapping[tuple[str, int], int] | None = None) -> None:
        """Commit a consumer's positions in the transaction (KIP-447), so that consume, write and produce are one unit.

        Args:
            consumer: A confluent-kafka Consumer with `enable.auto.commit` set to false.
            offsets: The next offset to read in each partition; by default, the one after what the consumer has returned so far.

        Raises:
            UsageError: Called in a unit of a group: positions belong to a whole transaction.
        """
        self._opened.send_offsets(consumer, offsets)


class LaterMessage(NamedTuple):
    """A message that waits until `due_ms` since 1970; `cancel_id` names it, if it may be cancelled."""

    message: Message
    due_ms: int
    cancel_id: str | None


def later_message(
    message: GivenMessage, not_before: datetime | None, delay: float | None, cancel_id: str | None
) -> LaterMessage:
    """A message that waits, checked.

    Raises:
        InvalidMessageError: It is not valid, or the time is not: not exactly one of both, without a time zone, or negative.
    """
    if (not_before is None) == (delay is None):
        raise InvalidMessageError("A message waits until `not_before`, or for a `delay`: give one of both.", field="not_before")
    if not_before is not None and not_before.tzinfo is None:
        raise InvalidMessageError("not_before has no time zone.", field="not_before", next_step="use datetime.now(UTC) + …")
    if delay is not None and not 0 <= delay <= _MAX_DELAY_SECONDS:
        raise InvalidMessageError(f"delay must be from 0 to {_MAX_DELAY_SECONDS} seconds, not {delay}.", field="delay")
    if cancel_id is not None and not 0 < len(cancel_id) <= _MAX_CANCEL_ID:
        raise InvalidMessageError(f"cancel_id must have 1 to {_MAX_CANCEL_ID} characters.", field="cancel_id")
    due = time.time() + delay if not_before is None and delay is not None else cast("datetime", not_before).timestamp()
    return LaterMessage(checked(message), round(due * 1000), cancel_id)


class Later(Protocol):
    """Takes the messages of a transaction that wait for their time."""

    def send(self, later: LaterMessage) -> None:
        """Write one. Raises: StoreError, if another one waits under its `cancel_id`."""
        ...

    def cancel(self, cancel_id: str) -> bool:
        """See `Transaction.cancel`."""
        ...


def opened(tx: Transaction[Any]) -> OpenTransaction:
    """The transaction behind the object that the user's code has."""
    return tx._opened  # noqa: SLF001  (not a property: users would see it)


def no_later(transactional_id: str) -> UsageError:
    """The error for a message for later, where none can wait."""
    return UsageError(
        "No message can wait for its time here: this transaction's messages go to Kafka.",
        transactional_id=transactional_id,
        next_step='use acknowledge="journaled", where they wait in the database; or an outbox with a relay (not_before)',
    )


class OpenTransaction:
    """A transaction as its writer, its pool and its processor see it; the user's code gets a `Transaction` of it.

    Attributes:
        transactional_id: The writer's logical id.
        store_transaction: The database's side.
        producer: Takes its messages; see `divert`.
        state: The prepared state of Kafka's side; None before the prepare, and if no message was sent.
        delivery: Where its messages are; None as for `state`, and if the producer does not say.
        database: Gets the reports of calls to the database, if there is one.
        number: Its number in the events of `dualwrite.observability`; 0 if nobody gets them.
        outcome: See Transaction.
        trace: That of the block or the unit.

    Args:
        is_fenced: Whether the fence must be checked before the first message (rule F2).
        later: Takes messages that wait for their time; None: nobody does.
        divert: Called once the fence is checked, before the first message: the producer to use instead, or None.
    """

    outcome: Outcome | None = None
    delivery: Delivery | None = None
    trace: UnitTrace = tracing.NO_TRACE

    def __init__(
        self,
        transactional_id: str,
        store_transaction: StoreTransaction,
        producer: TransactionalProducer,
        *,
        timeout: float,
        database: Side | None = None,
        divert: Callable[[], TransactionalProducer | None] | None = None,
        is_fenced: bool = True,
        later: Later | None = None,
        number: int = 0,
    ) -> None:
        self.transactional_id = transactional_id
        self.number = number
        self.database = database
        self.store_transaction = store_transaction
        self.producer = producer
        self._divert = divert
        self._timeout = timeout
        self._thread = threading.get_ident()
        self._pid = process.pid
        self._open = True
        self._may_send = not is_fenced
        self._later = later
        self.state: PreparedTxnState | None = None

    @property
    def db(self) -> Any:
        self._check()
        return self.store_transaction.handle

    @property
    def session(self) -> Any:
        self._check()
        return self.store_transaction.session

    def send_messages(self, messages: Iterable[GivenMessage]) -> None:
        """Send messages, after the check of the fence; they are checked by what takes them."""
        self._check()
        if not self._may_send:
            self.check_fence()
        self.producer.send_messages(messages)
        hit("after_send")

    def send_later(self, later: LaterMessage) -> None:
        self._check()
        self._waiting().send(later)

    def cancel(self, cancel_id: str) -> bool:
        self._check()
        return self._waiting().cancel(cancel_id)

    def _waiting(self) -> Later:
        if self._later is None:
            raise no_later(self.transactional_id)
        return self._later

    def traced(self, messages: Iterable[GivenMessage]) -> list[Message]:
        """The messages of one call of the user's code as they are sent: with the headers of their trace."""
        self._check()
        return tracing.traced([checked(message) for message in messages])

    def send_offsets(self, consumer: Any, offsets: Mapping[tuple[str, int], int] | None = None) -> None:
        self._check()
        self.send_positions(*progress_of(consumer, offsets))

    def send_positions(self, positions: Iterable[ConsumedOffset], group: GroupMetadata) -> None:
        """Commit positions of a consumer group in the transaction, after the check of the fence."""
        self.check_fence()
        self.producer.send_offsets_to_transaction(positions, group, timeout=self._timeout)

    def move_positions(self, positions: Positions, group_id: str, moves: Iterable[Move]) -> None:
        """Move the positions of a consumer group in the database, as part of the transaction.

        Args:
            positions: The positions of the writer's store (`writer.store.positions`).
            group_id: The group.
            moves: For each partition, its position when its messages were read, and its position after them.

        Raises:
            PositionMovedError: Another consumer has moved one since. Let the error end the block, which rolls back both sides.
        """
        self._check()
        positions.move(self.store_transaction, group_id, moves)

    def check_fence(self) -> None:
        """Check the fencing token in the database, unless its transaction has done so; before the first message (rule F2)."""
        if not self.store_transaction.is_fence_checked:
            with nullcontext() if self.database is None else self.database.call(BEGIN):
                self.store_transaction.check_fence()
        if self._divert is not None and not self._may_send:
            self.producer = self._divert() or self.producer
        self._may_send = True

    def end(self) -> None:
        """Mark the transaction as ended: any later use raises WriterClosedError. Called by the writer."""
        self._open = False

    # --- units of a group: called by a pool -------------------------------------------------------------------------------

    @contextmanager
    def part(self, *, shares: bool) -> Iterator[None]:
        """A part of the user's work with a fresh handle: of one message of a batch.

        Args:
            shares: Whether other parts share the transaction; see `StoreTransaction.watch`.

        Raises:
            RunAloneError: The part left something behind for the next one: each must have a transaction of its own.
        """
        if shares:
            self.store_transaction.watch(shares=True)
        yield
        if shares and self.store_transaction.refused is not None:
            raise RunAloneError(self.store_transaction.refused)
        self.store_transaction.renew_handle()

    def _check(self) -> None:
        if not self._open:
            raise WriterClosedError("The transaction ended with its block.", transactional_id=self.transactional_id)
        if process.pid != self._pid:  # asked here: this runs for each message
            process.check_not_forked("the transaction", self._pid, self.transactional_id)
        if threading.get_ident() != self._thread:
            raise ConcurrentUseError(
                "The transaction belongs to another thread.",
                transactional_id=self.transactional_id,
                next_step="open one writer per thread, each with its own transactional id",
            )


class UnitTransaction(OpenTransaction):
    """One unit of a group: it writes in the group's transaction, and its messages wait until the unit has succeeded.

    Attributes:
        messages: What the unit has sent so far.

    Args:
        whole: The group's transaction.
    """

    def __init__(self, whole: OpenTransaction) -> None:
        timeout = whole._timeout  # noqa: SLF001  (its own class)
        later = whole._later  # noqa: SLF001  (as above)
        of = whole.transactional_id, whole.store_transaction, whole.producer
        super().__init__(*of, timeout=timeout, number=whole.number, later=later)
        self.messages: list[Message] = []
        self._whole = whole
        self._is_undone = False

    @property
    def outcome(self) -> Outcome | None:  # type: ignore[override]  # a plain attribute of the group's
        return None if self._is_undone else self._whole.outcome

    def send_messages(self, messages: Iterable[GivenMessage]) -> None:
        """The messages are checked now and sent after the unit: if a topic is missing, the unit fails then."""
        self._check()
        self.messages += map(checked, messages)

    def send_offsets(self, consumer: Any, offsets: Mapping[tuple[str, int], int] | None = None) -> None:
        """Not allowed: a consumer's positions belong to a whole transaction, not to one of several units in it."""
        del consumer, offsets
        raise UsageError(
            "A unit of a group can't commit a consumer's positions.",
            transactional_id=self.transactional_id,
            next_step="use a transaction of its own: `with pool.transaction() as tx`, or a DualWriter",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()

    def end_unit(self) -> None:
        """End the unit; see StoreTransaction."""
        self.store_transaction.end_unit()
        self.end()

    def undo_unit(self, error: BaseException) -> None:
        """Undo the unit; see StoreTransaction."""
        self.end()
        self._is_undone = True
        self.store_transaction.undo_unit(error)
