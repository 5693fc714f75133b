"""What the user's block is given: `tx.db`, `tx.session`, `tx.send`."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dualwrite.errors import ConcurrentUseError, UsageError, WriterClosedError
from dualwrite.failpoints import hit
from dualwrite.kafka.base import Headers, TransactionalProducer
from dualwrite.kafka.offsets import progress_of
from dualwrite.state import PreparedTxnState
from dualwrite.stores.base import StoreTransaction

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault  # in typing from Python 3.13 on

    H = TypeVarWithDefault("H", default=Any)
else:
    H = TypeVar("H")


class Transaction(Generic[H]):
    """One business transaction: what is written through `db` and sent through `send` becomes visible together, or not at all.

    `Transaction[Connection]` is one whose `db` is a SQLAlchemy Connection; without a parameter `db` may be anything.

    Made by `DualWriter.transaction()`; of no use once its block has ended.

    Attributes:
        state: The name under which Kafka's side was prepared; None before that, and where no message was sent.
    """

    def __init__(
        self, transactional_id: str, store_transaction: StoreTransaction, producer: TransactionalProducer, *, timeout: float
    ) -> None:
        self._transactional_id = transactional_id
        self._store_transaction = store_transaction
        self._producer = producer
        self._timeout = timeout
        self._thread = threading.get_ident()
        self._pid = os.getpid()
        self._open = True
        self.state: PreparedTxnState | None = None

    @property
    def db(self) -> H:
        """What to write to the database with: a SQLAlchemy Connection for SQL. It can't end the transaction.

        Raises:
            WriterClosedError: The block has ended.
        """
        self._check()
        handle: H = self._store_transaction.handle
        return handle

    @property
    def session(self) -> Any:
        """A SQLAlchemy ORM Session on the same database transaction as `db`.

        Raises:
            WriterClosedError: The block has ended.
            UsageError: The database is no SQL database.
        """
        self._check()
        return self._store_transaction.session

    def send(
        self,
        topic: str,
        value: bytes | str | None,
        *,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
        timestamp: int | None = None,
    ) -> None:
        """Send one message as part of the transaction. It leaves at once; consumers see it when the block has ended well.

        Args:
            topic: The topic.
            value: Bytes, text (sent in UTF-8), or None for a tombstone.
            key: Bytes, text or None; it chooses the partition.
            headers: A mapping, or pairs in order.
            partition: The partition, instead of the key's.
            timestamp: Milliseconds since 1970, instead of now.

        Raises:
            InvalidMessageError: Wrong type or range; nothing was sent.
            UnknownTopicError: There is no such topic.
            MessageTooLargeError: Larger than the producer takes.
            DeliveryError: A message of this transaction has failed already, or the queue stayed full.
            WriterClosedError: The block has ended.
        """
        self._check()
        self._producer.send(topic, value, key=key, headers=headers, partition=partition, timestamp=timestamp)
        hit("after_send")

    def send_many(
        self,
        topic: str,
        values: Iterable[bytes | str | None],
        *,
        keys: Iterable[bytes | str | None] | None = None,
        partition: int | None = None,
        timestamp: int | None = None,
    ) -> None:
        """Send many messages as part of the transaction, for bulk work: with the native producer it costs less than `send`.

        Args:
            topic: The topic.
            values: As `value` of `send`, of each message.
            keys: As `key`, of each message; as many as values.
            partition: As `partition`, for all.
            timestamp: As `timestamp`, for all; the time of the call unless given.

        Raises: as `send`, and InvalidMessageError where there are not as many keys as values. After an error some may have been
            sent.
        """
        self._check()
        self._producer.send_many(topic, values, keys=keys, partition=partition, timestamp=timestamp)
        hit("after_send")

    def send_offsets(self, consumer: Any) -> None:
        """Make a consumer's positions part of the transaction (KIP-447): consume, write, produce and commit offsets as one.

        Args:
            consumer: A confluent-kafka Consumer with `enable.auto.commit` off.
        """
        self._check()
        offsets, group = progress_of(consumer)
        self._producer.send_offsets_to_transaction(offsets, group, timeout=self._timeout)

    def end(self) -> None:
        """Make every later use of this object an error; called by the writer."""
        self._open = False

    def _check(self) -> None:
        if not self._open:
            raise WriterClosedError("The transaction has ended with its block.", transactional_id=self._transactional_id)
        if os.getpid() != self._pid:
            raise forked("the transaction", self._pid, self._transactional_id)
        if threading.get_ident() != self._thread:
            raise ConcurrentUseError(
                "The transaction belongs to another thread.",
                transactional_id=self._transactional_id,
                next_step="one writer, with a transactional id of its own, for each thread",
            )


def forked(what: str, made_in: int, transactional_id: str) -> UsageError:
    """A child process uses what belongs to its parent, which has the other end of every connection."""
    return UsageError(
        f"{what} in process {os.getpid()}, but the writer was made in {made_in}: it does not survive a fork.",
        transactional_id=transactional_id,
        next_step="open a writer in each process, after the fork, with an id of its own",
    )
