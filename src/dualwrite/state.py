"""The name of a prepared Kafka transaction, transactional ids, and a coordinator's description of an id. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Self

from dualwrite.errors import InvalidTransactionalIdError, StoredStateError

MAX_PRODUCER_ID: Final = 2**63 - 1
MAX_EPOCH: Final = 2**15 - 1
LAST_EPOCH: Final = MAX_EPOCH - 1  # the highest epoch of a transaction: after it the producer id changes (KIP-890)
MAX_TRANSACTIONAL_ID_LENGTH: Final = 255
GENERATION_MARK: Final = "#"
LANE_MARK: Final = "~"
RESERVED_CHARACTERS: Final = GENERATION_MARK + LANE_MARK

_TEXT = re.compile(r"(0|[1-9][0-9]{0,18}):(0|[1-9][0-9]{0,4})(?:@(0|[1-9][0-9]{0,18}))?", re.ASCII)
STORE_ID_LENGTH: Final = 12
_LANE_ID = re.compile(r"([^#~]+)~([1-9][0-9]*)", re.ASCII)
_KAFKA_ID = re.compile(r"([^#]+?)(?:#([1-9][0-9]*)|#([0-9a-f]+)\.(0|[1-9][0-9]*))?", re.ASCII)


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


def validate_transactional_id(transactional_id: str, *, lanes: int = 1) -> str:
    """Return the id if it is valid: 1 to 255 characters, without `#`, `~` and control characters.

    Args:
        transactional_id: The id.
        lanes: The number of its lanes: the id of each lane must fit into the 255 characters.

    Raises:
        InvalidTransactionalIdError: The id is not valid.
    """
    if not isinstance(transactional_id, str) or not transactional_id:
        raise InvalidTransactionalIdError(
            f"A transactional id must be a string of 1 to {MAX_TRANSACTIONAL_ID_LENGTH} characters, not {transactional_id!r}.",
            next_step="choose a name that stays the same across restarts and that no other running process uses",
        )
    limit = MAX_TRANSACTIONAL_ID_LENGTH - len(lane_id("", lanes - 1))
    if len(transactional_id) > limit:
        raise InvalidTransactionalIdError(
            f"The transactional id has {len(transactional_id)} characters; {limit} is the limit"
            f"{f' with {lanes} lanes' if lanes > 1 else ''}: {transactional_id[:40]!r}…",
        )
    bad = sorted({c for c in transactional_id if c in RESERVED_CHARACTERS or not c.isprintable()})
    if bad:
        raise InvalidTransactionalIdError(
            f"The transactional id {transactional_id!r} contains {' '.join(map(repr, bad))}.",
            cause="'#' and '~' are reserved for the generations and lanes of an id; control characters are not allowed",
        )
    return transactional_id


def lane_id(transactional_id: str, lane: int) -> str:
    """The id of one lane, which has its own row: the logical id for lane 0, `<id>~<lane>` for the others."""
    return transactional_id if lane == 0 else f"{transactional_id}{LANE_MARK}{lane}"


def split_lane_id(row_id: str) -> tuple[str, int]:
    """The logical id and the lane of a row's id; an id that is not in the form of a lane's is a logical id with lane 0."""
    found = _LANE_ID.fullmatch(row_id)
    return (row_id, 0) if found is None else (found[1], int(found[2]))


def is_lane_of(row_id: str, transactional_id: str) -> bool:
    """Whether the row's id is that of a lane of the logical id, including lane 0."""
    return split_lane_id(row_id)[0] == transactional_id


def lanes_of(row_ids: Iterable[str], transactional_id: str) -> list[str]:
    """Those of the ids that are lanes of the logical id, in the order of their numbers."""
    return sorted((row_id for row_id in row_ids if is_lane_of(row_id, transactional_id)), key=split_lane_id)


@dataclass(frozen=True, slots=True)
class KafkaId:
    """The transactional id that Kafka sees: `<row id>#<store>.<generation>`; a row's id is `<logical>` or `<logical>~<lane>`.

    The store's part separates databases that use the same logical id on one cluster (rule ST). Generations that were acquired
    before revision 0005 don't have it: the row's id alone for generation 0, `<row id>#<generation>` for later ones.

    Args:
        row_id: The logical id, or the id of a lane.
        generation: The generation.
        store_id: The store's id; empty in the older form.
    """

    row_id: str
    generation: int
    store_id: str = ""

    def __str__(self) -> str:
        """The id as Kafka sees it."""
        if self.store_id:
            return f"{self.row_id}{GENERATION_MARK}{self.store_id}.{self.generation}"
        return f"{self.row_id}{GENERATION_MARK}{self.generation}" if self.generation else self.row_id

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse an id that Kafka shows; None if it is not in this form, such as `<id>#probe`."""
        found = _KAFKA_ID.fullmatch(text)
        if found is None:
            return None
        row_id, older, store_id, newer = found.groups()
        return cls(row_id, int(newer or older or 0), store_id or "")

    @property
    def logical(self) -> str:
        """The logical id, which the user has chosen."""
        return split_lane_id(self.row_id)[0]

    @property
    def lane(self) -> int:
        """The number of the lane."""
        return split_lane_id(self.row_id)[1]


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
    EndTxn v4 does not raise it, which is possible only for a state with a start time.
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
    return described.epoch == stored.epoch or (not ongoing and described.epoch == stored.epoch + 1)
