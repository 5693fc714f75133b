"""What names a prepared Kafka transaction, and what a coordinator says of a transactional id. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Self

from dualwrite.errors import InvalidTransactionalIdError, StoredStateError

MAX_PRODUCER_ID: Final = 2**63 - 1
MAX_EPOCH: Final = 2**15 - 1
LAST_EPOCH: Final = MAX_EPOCH - 1  # that a transaction can have: after it the producer id changes (KIP-890)
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
    """The name of one prepared Kafka transaction, as it is stored in the database (KIP-939, `PreparedTxnState`).

    Where each transaction has an epoch of its own (EndTxn v5, KIP-890), `producer_id:epoch` names it. A client that keeps
    one epoch over many transactions (librdkafka) needs the transaction's start time as well.

    Args:
        producer_id: Kafka's producer id, 0 to 2^63 - 1.
        epoch: The epoch under which the transaction's messages were written, 0 to 32767.
        start_time_ms: The coordinator's `transactionStartTimeMs` (milliseconds since 1970, broker's clock), or None where
            producer id and epoch name the transaction by themselves.

    Raises:
        ValueError: A number is outside its limits.
    """

    producer_id: int
    epoch: int
    start_time_ms: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.producer_id <= MAX_PRODUCER_ID:
            raise ValueError(f"producer id {self.producer_id} is not within 0 and {MAX_PRODUCER_ID}")
        if not 0 <= self.epoch <= MAX_EPOCH:
            raise ValueError(f"epoch {self.epoch} is not within 0 and {MAX_EPOCH}")
        if self.start_time_ms is not None and not 0 <= self.start_time_ms <= MAX_PRODUCER_ID:
            raise ValueError(f"start time {self.start_time_ms} ms is not within 0 and {MAX_PRODUCER_ID}")

    def __str__(self) -> str:
        """`producerId:epoch`, or `producerId:epoch@startTimeMs`."""
        text = f"{self.producer_id}:{self.epoch}"
        return text if self.start_time_ms is None else f"{text}@{self.start_time_ms}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read a stored text; the empty text means that nothing is prepared and gives None.

        Raises:
            StoredStateError: The text is of no known form, or a number is outside its limits.
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
        """Whether producer id and epoch alone name the transaction (native producers; KIP-890)."""
        return self.start_time_ms is None


def _unreadable(text: str) -> StoredStateError:
    return StoredStateError(
        f"The stored prepared transaction state {text!r} can't be read: expected producerId:epoch, "
        "producerId:epoch@startTimeMs, or an empty text.",
        cause="the row was changed by hand or by a newer release",
        next_step="nothing was sent to Kafka; compare the row with `dualwrite status` and put the state back, or upgrade",
        text=text,
    )


def state_text(state: PreparedTxnState | None) -> str:
    """The text to store: the state's own, or the empty text for none."""
    return "" if state is None else str(state)


def validate_transactional_id(transactional_id: str, *, lanes: int = 1) -> str:
    """Return the id if users may choose it: 1 to 255 characters, without `#`, `~`, and control characters.

    Args:
        transactional_id: The id.
        lanes: How many lanes it is for: the ids of all of them must fit into the 255 characters.

    Raises:
        InvalidTransactionalIdError: It is not.
    """
    if not isinstance(transactional_id, str) or not transactional_id:
        raise InvalidTransactionalIdError(
            f"A transactional id is a text of 1 to {MAX_TRANSACTIONAL_ID_LENGTH} characters, not {transactional_id!r}.",
            next_step="choose a name that stays the same over restarts and that no other running process uses",
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
            f"The transactional id {transactional_id!r} holds {' '.join(map(repr, bad))}.",
            cause="'#' and '~' number the generations and lanes of an id; control characters can't be typed back",
        )
    return transactional_id


def lane_id(transactional_id: str, lane: int) -> str:
    """The id of one lane, which has a row of its own: the logical id for lane 0, `<id>~<lane>` from then on."""
    return transactional_id if lane == 0 else f"{transactional_id}{LANE_MARK}{lane}"


def split_lane_id(row_id: str) -> tuple[str, int]:
    """The logical id and the lane that a row's id stands for; what no lane can be called is an id with the lane 0."""
    found = _LANE_ID.fullmatch(row_id)
    return (row_id, 0) if found is None else (found[1], int(found[2]))


def is_lane_of(row_id: str, transactional_id: str) -> bool:
    """Whether the row's id is that of a lane of the logical id; lane 0 is one."""
    return split_lane_id(row_id)[0] == transactional_id


def lanes_of(row_ids: Iterable[str], transactional_id: str) -> list[str]:
    """Those of the ids that are lanes of the logical id, by their numbers."""
    return sorted((row_id for row_id in row_ids if is_lane_of(row_id, transactional_id)), key=split_lane_id)


@dataclass(frozen=True, slots=True)
class KafkaId:
    """The transactional id that Kafka sees: `<row id>#<store>.<generation>`; a row's id is `<logical>` or `<logical>~<lane>`.

    The store's part keeps databases apart that use one logical id on one cluster (rule ST). What was taken before
    revision 0005 has none: the row's id alone for generation 0, `<row id>#<generation>` from then on.

    Args:
        row_id: The logical id, or a lane's.
        generation: The generation.
        store_id: The store's id; empty in the older form.
    """

    row_id: str
    generation: int
    store_id: str = ""

    def __str__(self) -> str:
        """As Kafka sees it."""
        if self.store_id:
            return f"{self.row_id}{GENERATION_MARK}{self.store_id}.{self.generation}"
        return f"{self.row_id}{GENERATION_MARK}{self.generation}" if self.generation else self.row_id

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The reverse; None for what dualwrite does not name so, such as `<id>#probe`."""
        found = _KAFKA_ID.fullmatch(text)
        if found is None:
            return None
        row_id, older, store_id, newer = found.groups()
        return cls(row_id, int(newer or older or 0), store_id or "")

    @property
    def logical(self) -> str:
        """The id that the user has chosen."""
        return split_lane_id(self.row_id)[0]

    @property
    def lane(self) -> int:
        """Number of the lane."""
        return split_lane_id(self.row_id)[1]


class TransactionStatus(Enum):
    """A transactional id's state at its coordinator, by the names that DescribeTransactions gives (KIP-664)."""

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
        epoch: The current epoch. EndTxn v5 and a time-out have already raised it by one once the transaction ends.
        timeout_ms: The transaction timeout in force; 2147483647 under two-phase commit.
        start_time_ms: When the current or last transaction began (broker's clock), or -1 where there was none.
        partitions: Topic and partition of what the transaction has written to, while it is ongoing.
    """

    status: TransactionStatus
    producer_id: int
    epoch: int
    timeout_ms: int
    start_time_ms: int
    partitions: frozenset[tuple[str, int]] = frozenset()


def names(stored: PreparedTxnState | None, described: TransactionDescription | None) -> bool:
    """Whether S is the name of D's current or last transaction.

    While it is ongoing, the epoch is the transaction's own. Once it has ended, EndTxn v5 or a time-out has raised the epoch
    by one; EndTxn v4 has not, which only a state with a start time can meet.
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
