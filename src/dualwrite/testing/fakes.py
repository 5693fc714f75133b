"""Fakes for unit tests without Kafka: the transaction of a unit or a handler, a pool that is joined, the message of a handler.

For example::

    def test_an_order_is_a_row_and_an_event():
        with FakeTransaction(engine) as tx:
            take_order(tx, "lamp")
        assert [message.text for message in tx.sent] == ["lamp"]

A fake is the class of the real transaction, with the same checks; only what is below it is replaced. So it shows what a unit
does, and not what Kafka does with it: no topic is missing, and nothing is too large.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self, cast, overload

from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

from dualwrite.aio.async_transaction import A, AsyncTransaction, send_unsent
from dualwrite.aio.coroutine_threads import BorrowedThread
from dualwrite.deadline import Limit
from dualwrite.errors import StoreCommitFailedError, StoreError
from dualwrite.kafka.base import GivenMessage, GroupMetadata, Headers, Message, SentOffsets, TransactionalProducer
from dualwrite.kafka.messages import checked
from dualwrite.kafka.sending import Sending
from dualwrite.kafka.topic import Topic
from dualwrite.pool.joining import JoinedOpenTransaction, Joining
from dualwrite.recipe.outcomes import raise_after_commit_error
from dualwrite.state import ConsumedOffset
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.sql.async_handles import AsyncConnection
from dualwrite.stores.sql.joining import joined as join_unit
from dualwrite.stores.sql.orm import SessionSource
from dualwrite.stores.sql.raw_connections import users_connection
from dualwrite.stores.store_transaction import UsersTransaction
from dualwrite.testing.fake_database import FakeStoreTransaction, GivenHandle, InlineThread, OnEngine
from dualwrite.testing.sent import SentLater, SentMessage
from dualwrite.transaction import H, LaterMessage, OpenTransaction, Outcome, Transaction

_CREATE_TIME = 1
"""confluent-kafka's TIMESTAMP_CREATE_TIME."""
_WITHOUT_TIME = 0
"""confluent-kafka's TIMESTAMP_NOT_AVAILABLE."""


class FakeTransaction(Transaction[H]):
    """A Transaction that keeps what is sent, for a unit test of what the code does with it.

    As a context manager it ends as a real one: without an error, changes of the ORM session are flushed, `outcome` is set, and
    any later use raises WriterClosedError; after an error, `sent` is empty. It can also be passed to a function without `with`.

    Args:
        db: A SQLAlchemy Engine (for example of SQLite in memory): the block is a transaction on it, which is committed or
            rolled back at the end, and whose `db` and `session` are those of a real transaction. Needs `with`, and none of
            dualwrite's tables. Or anything else, such as a Connection or a stub: it becomes `tx.db` as it is, and the fake
            never commits it or rolls it back.
        session: With an Engine, what sessions are made from; see SqlStateStore. Otherwise, what becomes `tx.session`.
        transactional_id: The writer's id.
        outcome: What `tx.outcome` is after the block.
        savepoints: The savepoints that the transaction is in now; see `forget_since`.
    """

    @overload
    def __init__(
        self: FakeTransaction[Connection],
        db: Engine,
        *,
        session: SessionSource | None = ...,
        transactional_id: str = ...,
        outcome: Outcome = ...,
        savepoints: Callable[[], frozenset[Hashable]] = ...,
    ) -> None: ...

    @overload
    def __init__(
        self,
        db: H = ...,
        *,
        session: Session | None = ...,
        transactional_id: str = ...,
        outcome: Outcome = ...,
        savepoints: Callable[[], frozenset[Hashable]] = ...,
    ) -> None: ...

    def __init__(
        self,
        db: Any = None,
        *,
        session: Any = None,
        transactional_id: str = "fake",
        outcome: Outcome = "published",
        savepoints: Callable[[], frozenset[Hashable]] = frozenset,
    ) -> None:
        self._database: FakeStoreTransaction = (
            OnEngine(db, session, transactional_id) if isinstance(db, Engine) else GivenHandle(db, session)
        )
        self._recorder = _Recorder(savepoints)
        self._outcome_at_end = outcome
        producer = cast("TransactionalProducer", self._recorder)  # it has what is used before the prepare
        super().__init__(OpenTransaction(transactional_id, self._database, producer, timeout=0, later=self._recorder.later))

    @property
    def sent(self) -> list[SentMessage]:
        """The messages that were sent, in order; none after a block that has failed, as consumers see none of them."""
        return self._recorder.sent

    @property
    def sent_later(self) -> list[SentLater]:
        """The messages that wait for their time, without those that were cancelled."""
        return self._recorder.later.sent

    @property
    def sent_offsets(self) -> dict[str, dict[tuple[str, int], int]]:
        """What `send_offsets` has committed: for each group, the next offset of each topic and partition."""
        return self._recorder.sent_offsets

    def forget_since(self, savepoint: Hashable) -> None:
        """Forget the messages that were sent inside this savepoint, which was rolled back."""
        self._recorder.forget_since(savepoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self._database.before_commit()
                self._database.commit()
                self._opened.outcome = self._outcome_at_end
        finally:
            if self._opened.outcome is None:
                self._database.rollback()
                self._recorder.clear()
            self._opened.end()
        if self._database.after_commit_error is not None:
            raise_after_commit_error(self._database.after_commit_error, self._opened.transactional_id)


class FakeAsyncTransaction(AsyncTransaction[A]):
    """An AsyncTransaction that keeps what is sent; see FakeTransaction, whose arguments it has. Use it with `async with`.

    With an Engine, which is a synchronous one as for a pool, `db` and `session` are those of a real AsyncTransaction.
    Everything runs in the event loop's thread, so that a database in memory can be used.
    """

    @overload
    def __init__(
        self: FakeAsyncTransaction[AsyncConnection],
        db: Engine,
        *,
        session: SessionSource | None = ...,
        transactional_id: str = ...,
        outcome: Outcome = ...,
    ) -> None: ...

    @overload
    def __init__(self, db: A = ..., *, session: Any = ..., transactional_id: str = ..., outcome: Outcome = ...) -> None: ...

    def __init__(
        self, db: Any = None, *, session: Any = None, transactional_id: str = "fake", outcome: Outcome = "published"
    ) -> None:
        self._fake: FakeTransaction[Any] = FakeTransaction(
            db, session=session, transactional_id=transactional_id, outcome=outcome
        )
        self._inline = InlineThread(self._fake._database)  # noqa: SLF001  (of this module)
        super().__init__(self._fake, cast("BorrowedThread", self._inline))  # it has what a coroutine uses

    @property
    def sent(self) -> list[SentMessage]:
        """See `FakeTransaction.sent`."""
        return [*self._fake.sent, *map(SentMessage.of, self._unsent)]

    @property
    def sent_offsets(self) -> dict[str, dict[tuple[str, int], int]]:
        """See `FakeTransaction.sent_offsets`."""
        return self._fake.sent_offsets

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                send_unsent(self)
            self._inline.run(self._fake.__exit__, kind, error, trace)
        finally:
            self._unsent.clear()
            self._inline.is_open = False


class FakePool:
    """A pool for code that joins its own transactions: sessions and connections on any database, without dualwrite's tables.

    The transactions are real: `sent` has what was sent in those that have committed, and nothing of the others. It takes the
    place of a WriterPool and of an AsyncWriterPool; units (`run`) need a FakeTransaction instead.

    Args:
        outcome: What `tx.outcome` is after the commit of a transaction with messages.
    """

    def __init__(self, *, outcome: Outcome = "published") -> None:
        self._recorder = _Recorder()
        self._joining = _FakeJoining(self._recorder, outcome)

    @property
    def sent(self) -> list[SentMessage]:
        """The messages of the transactions that have committed, in the order of the commits."""
        return self._recorder.sent

    @property
    def sent_later(self) -> list[SentLater]:
        """See `FakeTransaction.sent_later`."""
        return self._recorder.later.sent

    @property
    def sent_offsets(self) -> dict[str, dict[tuple[str, int], int]]:
        """See `FakeTransaction.sent_offsets`."""
        return self._recorder.sent_offsets

    def cancel(self, cancel_id: str) -> bool:
        """See `WriterPool.cancel`."""
        return self._recorder.later.cancel(cancel_id)

    def join(self, session: Any) -> Transaction[Any]:
        """See `WriterPool.join`."""
        return self._joining.joined(session)

    def transaction(self, *, connection: Any, timeout: float | None = None) -> Any:
        """See `WriterPool.transaction`; with a connection of an asynchronous driver, see `AsyncWriterPool.transaction`."""
        if users_connection(connection).is_async:
            return self._joining.on_async_connection(connection, timeout)
        return self._joining.on_connection(connection, timeout)


class _FakeJoining(Joining):
    """Commits the user's transactions, and keeps what was sent in them."""

    def __init__(self, recorder: _Recorder, outcome: Outcome) -> None:
        super().__init__(
            "fake", cast("TxnStateStore", _AnyDatabase), cast("Any", None), can_wait=True
        )  # no writer: see `_commit`
        self._recorder = recorder
        self._outcome = outcome

    def _commit(self, timeout: Limit | None, users: UsersTransaction, joined: JoinedOpenTransaction) -> None:
        del timeout
        try:
            users.commit()
        except Exception as error:
            what = "The database did not commit; nothing of the transaction was written."
            raise StoreCommitFailedError(what, cause=str(error).strip()) from error
        if joined.has_content:
            self._recorder.send_messages([message for message, _ in joined.messages])
            for later, _ in joined.waiting:
                self._recorder.later.send(later)
            for positions, group, _ in joined.offsets:
                self._recorder.send_offsets_to_transaction(positions, group, timeout=0)
            joined.outcome = self._outcome


class _AnyDatabase:
    """What joining asks of a store."""

    join = staticmethod(join_unit)
    users_connection = staticmethod(users_connection)


class FakeMessage:
    """A message for a processor's handler, with the methods of confluent-kafka's Message (`Received`).

    Args:
        topic: The topic's name; or a Topic, whose serializers and deserializers the key and the value pass, as on their way
            through Kafka.
        value: The value; None for a tombstone.
        key: The key, or None.
        headers: As for `Transaction.send`.
        partition: The partition.
        offset: The offset in the partition.
        timestamp: Milliseconds since 1970; without it, the message has none.

    Raises:
        InvalidMessageError, SerializationError, DeserializationError: As for `Topic.send` and `Topic.deserialized`.
    """

    def __init__(
        self,
        topic: str | Topic[Any, Any],
        value: Any,
        *,
        key: Any = None,
        headers: Headers | None = None,
        partition: int = 0,
        offset: int = 0,
        timestamp: int | None = None,
    ) -> None:
        recorder = _Recorder()
        send = recorder.send if isinstance(topic, str) else topic.send
        target: Any = topic if isinstance(topic, str) else recorder
        send(target, value, key=key, headers=headers, partition=partition, timestamp=timestamp)
        (self._message,) = recorder.messages
        self._offset = offset
        self._key, self._value = self._message.key, self._message.value
        if isinstance(topic, Topic):
            self._key = topic.deserialized("key", self._message.key, self._message.headers)
            self._value = topic.deserialized("value", self._message.value, self._message.headers)

    def key(self) -> Any:
        """The key, deserialized if the topic does so."""
        return self._key

    def value(self) -> Any:
        """The value, deserialized if the topic does so."""
        return self._value

    def topic(self) -> str:
        """The topic's name."""
        return self._message.topic

    def partition(self) -> int:
        """The partition."""
        return self._message.partition or 0

    def offset(self) -> int:
        """The offset in the partition."""
        return self._offset

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        """The headers; None without headers."""
        return list(self._message.headers) if self._message.headers else None

    def timestamp(self) -> tuple[int, int]:
        """The kind of timestamp, as confluent-kafka numbers them, and milliseconds since 1970."""
        time = self._message.timestamp
        return (_WITHOUT_TIME, 0) if time is None else (_CREATE_TIME, time)

    def error(self) -> None:
        """None: it is a message."""

    def __len__(self) -> int:
        return len(self._message.value or b"")


class _Recorder(Sending):
    """What a transaction uses of its producer until the prepare: messages are checked as producers do, and kept."""

    def __init__(self, savepoints: Callable[[], frozenset[Hashable]] = frozenset) -> None:
        self._kept: list[tuple[Message, frozenset[Hashable]]] = []
        self._savepoints = savepoints
        self.offsets = SentOffsets()
        self.later = _FakeLater()

    @property
    def messages(self) -> list[Message]:
        return [message for message, _ in self._kept]

    @property
    def sent(self) -> list[SentMessage]:
        return [SentMessage.of(message) for message in self.messages]

    @property
    def sent_offsets(self) -> dict[str, dict[tuple[str, int], int]]:
        return {group.group_id: {(one.topic, one.partition): one.offset for one in group.offsets} for group in self.offsets}

    def send_messages(self, messages: Iterable[GivenMessage]) -> None:
        inside = self._savepoints()
        self._kept += [(checked(message), inside) for message in messages]

    def forget_since(self, savepoint: Hashable) -> None:
        self._kept = [each for each in self._kept if savepoint not in each[1]]

    def send_offsets_to_transaction(self, offsets: Sequence[ConsumedOffset], group: GroupMetadata, *, timeout: float) -> None:
        del timeout
        if offsets:
            self.offsets.add(group.group_id, offsets)

    def clear(self) -> None:
        self._kept.clear()
        self.offsets.clear()
        self.later.clear()


class _FakeLater:
    """Keeps the messages that wait for their time."""

    def __init__(self) -> None:
        self._kept: list[LaterMessage] = []

    @property
    def sent(self) -> list[SentLater]:
        times = ((one, datetime.fromtimestamp(one.due_ms / 1000, UTC)) for one in self._kept)
        return [SentLater(SentMessage.of(one.message), time, one.cancel_id) for one, time in times]

    def send(self, later: LaterMessage) -> None:
        if later.cancel_id is not None and any(one.cancel_id == later.cancel_id for one in self._kept):
            raise StoreError(f"A message waits under the cancel_id {later.cancel_id!r} already.")
        self._kept.append(later)

    def cancel(self, cancel_id: str) -> bool:
        before = len(self._kept)
        self._kept = [one for one in self._kept if one.cancel_id != cancel_id]
        return len(self._kept) < before

    def clear(self) -> None:
        self._kept.clear()
