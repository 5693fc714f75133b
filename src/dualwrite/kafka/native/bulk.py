"""Calls that add many messages to a transaction: iterables with or without keys, Arrow columns, checked messages."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dualwrite.deadline import Deadline
from dualwrite.errors import DualWriteError
from dualwrite.kafka.base import Message
from dualwrite.kafka.messages import keyed, not_as_many_keys
from dualwrite.kafka.native.accumulator import RecordAccumulator
from dualwrite.kafka.native.retry_policy import MarkerWait, Patience
from dualwrite.kafka.native.sender import Sender
from dualwrite.kafka.time_budget import TimeBudget

if TYPE_CHECKING:
    import pyarrow as pa


class BulkSender:
    """Adds many messages with one call. A transaction's first message is sent at once: it begins the transaction at the broker.

    Args:
        sender: The transaction's sender.
        accumulator: Gets the messages.
        markers: Waits for the last transaction's markers before the first message.
        budget: The clock of the transaction, started before the first message.
        delivery_timeout: Seconds that a call may wait without progress; see Patience.
    """

    def __init__(
        self,
        sender: Sender,
        accumulator: RecordAccumulator,
        markers: MarkerWait,
        budget: TimeBudget,
        delivery_timeout: float,
    ) -> None:
        self._sender = sender
        self._accumulator = accumulator
        self._markers = markers
        self._budget = budget
        self._delivery_timeout = delivery_timeout

    def send_first(
        self, topic: Any, key: Any, value: Any, headers: Any, partition: Any, timestamp: Any, limit: Deadline | Patience
    ) -> None:
        """Add the transaction's first message, as `RecordAccumulator.append` does, and send it."""
        patience = Patience.of(limit)
        self._begin(patience)
        with self._whole():
            self._accumulator.append(topic, key, value, headers, partition, timestamp, patience)
            self._push(patience)

    def send_many(
        self,
        topic: str,
        values: Iterable[bytes | str | None],
        keys: Iterable[bytes | str | None] | None,
        partition: int | None,
        timestamp_ms: int,
    ) -> None:
        self._send_many(topic, values, keys, partition, timestamp_ms, self._patience())

    def send_messages(self, messages: Iterable[Message]) -> None:
        patience = self._patience()
        is_first = not self._sender.has_sent
        if is_first:
            self._begin(patience)
        now = time.time_ns() // 1_000_000
        append = self._accumulator.append
        with self._whole():
            for topic, value, key, headers, partition, timestamp in messages:
                append(topic, key, value, headers, partition, now if timestamp is None else timestamp, patience)
            if is_first:
                self._push(patience)

    def send_columns(self, topic: str, values: pa.Array, keys: pa.Array | None, partition: int | None) -> None:
        from dualwrite.kafka.native.arrow_records import RecordColumns  # noqa: PLC0415  (needs pyarrow)

        if keys is not None and len(keys) != len(values):
            raise not_as_many_keys(f"{len(keys)} keys for {len(values)} values")
        now, patience = time.time_ns() // 1_000_000, self._patience()
        if not self._sender.has_sent:
            self._send_rows(topic, values[:1], None if keys is None else keys[:1], partition, now, patience)
            values, keys = values[1:], None if keys is None else keys[1:]
        if not len(values):
            return
        columns = RecordColumns.of(values, keys)
        if columns is None or not self._accumulator.extend_columns(topic, columns, partition, now, patience):
            self._send_rows(topic, values, keys, partition, now, patience)

    # --- parts ------------------------------------------------------------------------------------------------------------

    def _send_rows(
        self, topic: str, values: pa.Array, keys: pa.Array | None, partition: int | None, now: int, patience: Patience
    ) -> None:
        self._send_many(topic, values.to_pylist(), None if keys is None else keys.to_pylist(), partition, now, patience)

    def _send_many(
        self,
        topic: str,
        values: Iterable[bytes | str | None],
        keys: Iterable[bytes | str | None] | None,
        partition: int | None,
        now: int,
        patience: Patience,
    ) -> None:
        if keys is not None:
            pairs = keyed(keys, values)
            if not self._sender.has_sent:
                for key, value in pairs:
                    self.send_first(topic, key, value, None, partition, now, patience)
                    break
            self._accumulator.extend_keyed(topic, pairs, partition, now, patience)
            return
        remaining = iter(values)
        if not self._sender.has_sent:
            for value in remaining:
                self.send_first(topic, None, value, None, partition, now, patience)
                break
        self._accumulator.extend(topic, remaining, partition, now, patience)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Tell the sender of an interrupt while messages are added: otherwise a half-closed batch could be sent twice."""
        try:
            yield
        except DualWriteError:
            raise
        except BaseException:  # KeyboardInterrupt
            self._sender.interrupted()
            raise

    def _patience(self) -> Patience:
        """The time limit of a call that adds messages."""
        return Patience(self._delivery_timeout, lambda: self._sender.stored)

    def _begin(self, patience: Patience) -> None:
        """Called before the first message of the transaction is added."""
        with patience as limit:
            self._markers.wait(limit)
        self._budget.start()

    def _push(self, patience: Patience) -> None:
        """Send the messages that were added, without waiting for responses."""
        with patience as limit:
            self._accumulator.push(limit)
