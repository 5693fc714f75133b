"""The name of a prepared Kafka transaction, and a coordinator's description of a transactional id. No I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final, Self

from dualwrite.errors import StoredStateError

MAX_PRODUCER_ID: Final = 2**63 - 1
MAX_EPOCH: Final = 2**15 - 1
LAST_EPOCH: Final = MAX_EPOCH - 1  # the highest epoch of a transaction: after it the producer id changes (KIP-890)

_TEXT = re.compile(r"(0|[1-9][0-9]{0,18}):(0|[1-9][0-9]{0,4})(?:@(0|[1-9][0-9]{0,18}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class PreparedTxnState:
    """The name of one prepared Kafka transaction, as stored in the database (KIP-939, `PreparedTxnState`).

    If each transaction has its own epoch (EndTxn v5, KIP-890), `producer_id:epoch` identifies it. For a client that keeps
    one epoch over many transactions (librdkafka), the transaction's start time is needed as well.

    Args:
        producer_id: Kafka's producer id, 0 to 2^63 - 1.
        epoch: The epoch under which the transaction's messages were written, 0 to 32767.
        start_time_ms: The coordinator's `transactionStartTimeMs` (milliseconds since 1970, broker's clock), or None if
            producer id and epoch are enough to identify the transaction.

    Raises:
        ValueError: A number is out of range.
    """

    producer_id: int
    epoch: int
    start_time_ms: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.producer_id <= MAX_PRODUCER_ID:
            raise ValueError(f"producer id {self.producer_id} is not between 0 and {MAX_PRODUCER_ID}")
        if not 0 <= self.epoch <= MAX_EPOCH:
            raise ValueError(f"epoch {self.epoch} is not between 0 and {MAX_EPOCH}")
        if self.start_time_ms is not None and not 0 <= self.start_time_ms <= MAX_PRODUCER_ID:
            raise ValueError(f"start time {self.start_time_ms} ms is not between 0 and {MAX_PRODUCER_ID}")

    def __str__(self) -> str:
        """`producerId:epoch`, or `producerId:epoch@startTimeMs`."""
        text = f"{self.producer_id}:{self.epoch}"
        return text if self.start_time_ms is None else f"{text}@{self.start_time_ms}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse a stored text; the empty text means that nothing is prepared, and returns None.

        Raises:
            StoredStateError: The text is not in a known format, or a number is out of range.
        """
        if text == "":
            return None
        found = _TEXT.fullmatch(text)
        if found is None:
            raise _unreadable(text)
        start = found[3]
        try:
            return cls(int(found[1]), int(found[2]), None if start is None else int(start))
        except ValueError as error:
            raise _unreadable(text) from error

    @property
    def has_own_epoch(self) -> bool:
        """Whether producer id and epoch alone identify the transaction (native producers; KIP-890)."""
        return self.start_time_ms is None


def _unreadable(text: str) -> StoredStateError:
    return StoredStateError(
        f"The stored prepared transaction state {text!r} can't be read: expected producerId:epoch, "
        "producerId:epoch@startTimeMs, or an empty text.",
        cause="the row was changed manually or by a newer release",
        next_step="nothing was sent to Kafka; compare the row with `dualwrite status` and restore the state, or upgrade",
        text=text,
    )


def state_text(state: PreparedTxnState | None) -> str:
    """The text to store for a state; the empty text for None."""
    return "" if state is None else str(state)


class TransactionStatus(Enum):
    """A transactional id's state at its coordinator, with the names that DescribeTransactions returns (KIP-664)."""

    EMPTY = "Empty"
    ONGOING = "Ongoing"
    PREPARE_COMMIT = "PrepareCommit"
    PREPARE_ABORT = "PrepareAbort"
    COMPLETE_COMMIT = "CompleteCommit"
    COMPLETE_ABORT = "CompleteAbort"
    DEAD = "Dead"
    PREPARE_EPOCH_FENCE = "PrepareEpochFence"

    @property
    def is_ending(self) -> bool:
        """Whether the outcome is decided but not all markers are written: the epoch (at most 32767) can't be used yet."""
        return self in _ENDING


_ENDING: Final = (TransactionStatus.PREPARE_COMMIT, TransactionStatus.PREPARE_ABORT, TransactionStatus.PREPARE_EPOCH_FENCE)


@dataclass(frozen=True, slots=True)
class TransactionDescription:
    """One answer of DescribeTransactions.

    Args:
        status: The id's state.
        producer_id: The current producer id.
        epoch: The current epoch. Once the transaction has ended, EndTxn v5 or a timeout has already raised it by one.
        timeout_ms: The transaction timeout in effect; 2147483647 with two-phase commit.
        start_time_ms: When the current or last transaction began (broker's clock), or -1 if there was none.
        partitions: The topics and partitions that the transaction has written to, while it is ongoing.
    """

    status: TransactionStatus
    producer_id: int
    epoch: int
    timeout_ms: int
    start_time_ms: int
    partitions: frozenset[tuple[str, int]] = frozenset()


def names(stored: PreparedTxnState | None, described: TransactionDescription | None) -> bool:
    """Whether S (`stored`) is the name of the current or last transaction of D (`described`).

    While the transaction is ongoing, D shows its epoch. Once it has ended, EndTxn v5 or a timeout has raised the epoch by one;
    an older EndTxn does not raise it, and a timeout on Kafka 4.0.0 raises it by two (KAFKA-19367), which both are possible only
    for a state with a start time.
    """
    if stored is None or described is None or stored.producer_id != described.producer_id:
        return False
    if described.status is TransactionStatus.EMPTY:
        return False
    ongoing = described.status is TransactionStatus.ONGOING
    if stored.has_own_epoch:
        return described.epoch == (stored.epoch if ongoing else stored.epoch + 1)
    if stored.start_time_ms != described.start_time_ms:
        return False
    aborted = described.status is TransactionStatus.COMPLETE_ABORT
    return described.epoch - stored.epoch in ((0,) if ongoing else (0, 1, 2) if aborted else (0, 1))
