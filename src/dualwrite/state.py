"""Values about a Kafka transaction: name, coordinator's description, what it delivered and what is left of it, producer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from functools import lru_cache
from typing import Any, Final, Self

from dualwrite.errors import StoredStateError

MAX_PRODUCER_ID: Final = 2**63 - 1
MAX_EPOCH: Final = 2**15 - 1
LAST_EPOCH: Final = MAX_EPOCH - 1  # the highest epoch of a transaction: after it the producer id changes (KIP-890)

MAX_TOPIC_LENGTH: Final = 249
"""The maximum length of a topic name in characters (Kafka, `Topic.MAX_NAME_LENGTH`)."""

MAX_PLACES: Final = 1000
MAX_DELIVERY_LENGTH: Final = 32_000
"""The maximum number of places, and of characters, stored for a delivery. `Delivery.messages` counts all messages."""

_MAX_SHOWN_PLACES: Final = 16  # places that a text shows, or that are asked how the transaction ended
_PLACE: Final = 3  # numbers of a stored place
_IN_TOPIC: Final = 4  # and of one with `in_topic`
_OFFSET: Final = 4  # values of a stored offset
_STORED_STATE: Final = re.compile(r"(0|[1-9][0-9]{0,18}):(0|[1-9][0-9]{0,4})(?:@(0|[1-9][0-9]{0,18}))?", re.ASCII)


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
        found = _STORED_STATE.fullmatch(text)
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


class Fate(Enum):
    """How a transaction ended, according to the log."""

    COMMITTED = "committed"
    ABORTED = "aborted"

    OPEN = "open"
    """It has not ended: the log has no marker for it."""

    GONE = "gone"
    """The log no longer has the message (retention), or the principal is not allowed to read it."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a transaction wrote to one partition.

    Args:
        topic: The topic.
        partition: The partition; with `in_topic`, that of the topic's first message.
        first_offset: The offset of the first message there, as acknowledged by the broker; None if it was not returned.
        messages: The number of messages in the partition; with `in_topic`, in the whole topic.
        in_topic: Only the place of the topic's first message is known (librdkafka).
        others: With `in_topic`, the other partitions of the topic that have messages; None if they are not known.
    """

    topic: str
    partition: int
    first_offset: int | None
    messages: int
    in_topic: bool = False
    others: tuple[int, ...] | None = ()

    def __str__(self) -> str:
        """Readable text: `orders-0 from offset 17 (3 messages)`; `orders (3 messages, the first in orders-0 at offset 17)`."""
        count = f"{self.messages} message{'' if self.messages == 1 else 's'}"
        if self.in_topic and self.messages > 1:
            at = "" if self.first_offset is None else f" at offset {self.first_offset}"
            return f"{self.topic} ({count}, the first in {self.topic}-{self.partition}{at})"
        where = "" if self.first_offset is None else f" from offset {self.first_offset}"
        return f"{self.topic}-{self.partition}{where} ({count})"


@dataclass(frozen=True, slots=True)
class ConsumedOffset:
    """How far one partition is consumed.

    Args:
        topic: The topic.
        partition: The partition.
        offset: The offset of the next message to read.
        leader_epoch: The leader epoch of the last message read, or -1.
        metadata: Free text of the consumer.
        topic_id: Kafka's id of the topic that was read: Kafka 4.4 commits the offset for no other topic of that name
            (TxnOffsetCommit v6). Empty if it is not known.
    """

    topic: str
    partition: int
    offset: int
    leader_epoch: int = -1
    metadata: str = ""
    topic_id: str = ""


@dataclass(frozen=True, slots=True)
class GroupOffsets:
    """The offsets of one consumer group that are part of a transaction (KIP-447).

    Args:
        group_id: The group.
        offsets: The offsets, one for each partition; none if they were too many to store.
    """

    group_id: str
    offsets: tuple[ConsumedOffset, ...]

    def __str__(self) -> str:
        """Readable text: `group orders (3 partitions)`."""
        count = len(self.offsets)
        return f"group {self.group_id}" + (f" ({count} partition{'' if count == 1 else 's'})" if count else "")


@dataclass(frozen=True, slots=True)
class Delivery:
    """The acknowledged messages of one prepared transaction, and the consumer groups' offsets in it.

    Args:
        messages: The number of messages.
        places: Where they are. All are stored, unless there are more than MAX_PLACES or they need too much space.
        prepared_at: When the transaction was prepared (UTC, aware; this machine's clock), just before the database's commit.
        offsets: The offsets of consumer groups that become visible with the messages.
        copy_of: The generation and state of the lost transaction whose messages were published again; empty if they are new.
            `prepared_at` is that of the lost one, too.
    """

    messages: int
    places: tuple[Place, ...]
    prepared_at: datetime
    offsets: tuple[GroupOffsets, ...] = ()
    copy_of: str = ""

    @classmethod
    def of(cls, places: Iterable[Place], offsets: Iterable[GroupOffsets] = ()) -> Self | None:
        """The delivery of a transaction that was just prepared; None if it has neither messages nor offsets."""
        listed, groups = tuple(places), tuple(offsets)
        if not listed and not groups:
            return None
        return cls(sum(place.messages for place in listed), listed, datetime.now(UTC), groups)

    @property
    def proofs(self) -> tuple[Place, ...]:
        """The places whose first offset is known: a transaction ends the same way in all partitions, so each can prove how.

        Of many places, a few are enough: one of each topic first, since topics differ in retention and permissions.
        """
        known = [place for place in self.places if place.first_offset is not None]
        if len(known) <= _MAX_SHOWN_PLACES:
            return tuple(known)
        of_each_topic = {place.topic: place for place in reversed(known)}
        return tuple(dict.fromkeys([*reversed(of_each_topic.values()), *known]))[:_MAX_SHOWN_PLACES]

    def __str__(self) -> str:
        """Readable text: the number of messages, where the first of them are, and when the transaction was prepared."""
        few = self.places[:_MAX_SHOWN_PLACES]
        shown = f": {', '.join(map(str, few))}" if few else ""
        more = self.messages - sum(place.messages for place in few)
        elsewhere = f" and {more} elsewhere" if more else ""
        groups = f"; offsets of {', '.join(map(str, self.offsets))}" if self.offsets else ""
        prepared = f"; prepared at {self.prepared_at.astimezone(UTC):%F %T} UTC"
        return f"{self.messages} message{'' if self.messages == 1 else 's'}{shown}{elsewhere}{groups}{prepared}"

    def text(self) -> str:
        """The text to store: JSON with all places, or with as many as may be stored, including one with a known offset.

        `["orders",0,17,3,2,5,1]` are two places in a topic: partition, first offset and number of messages of each.
        `["orders",0,17,4,[2,5]]` is a place with `in_topic` and its other partitions.
        `["a group",["orders",0,17,-1,""]]` are offsets: partition, offset, leader epoch and metadata of each.
        """
        groups = _offsets_text(self.offsets) if self.offsets else ""
        if len(groups) > MAX_DELIVERY_LENGTH // 2:
            groups = _offsets_text([GroupOffsets(each.group_id, ()) for each in self.offsets])
        text = self._text_of(self.places, groups)
        if len(self.places) <= MAX_PLACES and len(text) <= MAX_DELIVERY_LENGTH:
            return text
        kept, proofs = tuple(map(_shortened, self.places[:MAX_PLACES])), self.proofs
        while kept:
            if proofs and all(place.first_offset is None for place in kept):
                kept = (_shortened(proofs[0]), *kept[1:])
            text = self._text_of(kept, groups)
            if len(text) <= MAX_DELIVERY_LENGTH:
                return text
            kept = kept[: len(kept) * MAX_DELIVERY_LENGTH // len(text)]
        return self._text_of((), groups)

    def _text_of(self, places: Iterable[Place], groups: str) -> str:
        # not json.dumps for all of it, which takes four times as long: every transaction needs this
        parts = [f'{{"messages":{self.messages},"places":[']
        topic, between = None, "["
        for place in places:
            offset = "null" if place.first_offset is None else place.first_offset
            if place.in_topic:
                others = "null" if place.others is None else f"[{','.join(map(str, place.others))}]"
                parts.append(f"{between}{_quoted(place.topic)},{place.partition},{offset},{place.messages},{others}")
                topic = None
            elif place.topic == topic:
                parts.append(f",{place.partition},{offset},{place.messages}")
                continue
            else:
                topic = place.topic
                parts.append(f"{between}{_quoted(topic)},{place.partition},{offset},{place.messages}")
            between = "],["
        end = "]" if between != "[" else ""
        prepared_at = self.prepared_at.astimezone(UTC).isoformat(timespec="milliseconds")
        copy = f',"copy_of":{json.dumps(self.copy_of)}' if self.copy_of else ""
        parts.append(f'{end}]{groups},"prepared_at":"{prepared_at[:-6]}Z"{copy}}}')
        return "".join(parts)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse a stored text; the empty text returns None.

        Raises:
            StoredStateError: The text does not parse.
        """
        if text == "":
            return None
        try:
            found = json.loads(text)
            places = tuple(place for stored in found["places"] for place in _parsed_places(stored))
            groups = tuple(map(_parsed_group, found.get("offsets", ())))
            prepared_at = datetime.fromisoformat(found["prepared_at"]).astimezone(UTC)
            return cls(int(found["messages"]), places, prepared_at, groups, str(found.get("copy_of", "")))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StoredStateError(
                f"The stored delivery {text[:200]!r} can't be read.",
                cause="the row was changed manually or by a newer release",
                next_step="nothing was changed; restore the text, or set it to the empty text, or upgrade",
                text=text,
            ) from error


@dataclass(frozen=True, slots=True)
class FoundPlace:
    """The aborted messages of one transaction in one partition, as they were found in the log.

    Args:
        topic: The topic.
        partition: The partition.
        first_offset: The offset of the first message.
        end_offset: The offset of the ABORT marker, which follows the last message.
        messages: How many messages there are; other transactions' may lie between them.
    """

    topic: str
    partition: int
    first_offset: int
    end_offset: int
    messages: int


@dataclass(frozen=True, slots=True)
class FoundMessages:
    """The messages of an aborted transaction that can be read from the log, and those that can't.

    Args:
        places: The partitions, in the order of the delivery.
        missing: One sentence, without a period, for each partition or topic with messages that can't be read, which says why.
    """

    places: tuple[FoundPlace, ...]
    missing: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether every message of the transaction can be read."""
        return not self.missing

    @property
    def messages(self) -> int:
        """How many messages can be read."""
        return sum(place.messages for place in self.places)


def delivery_text(delivery: Delivery | None) -> str:
    """The text to store for a delivery; the empty text for None."""
    return "" if delivery is None else delivery.text()


@lru_cache(maxsize=1000)
def _quoted(text: str) -> str:
    return json.dumps(text)


def _shortened(place: Place) -> Place:
    """The place without its other partitions, if these are too many to store."""
    return replace(place, others=None) if place.others and len(place.others) > MAX_PLACES else place


def _parsed_places(stored: Any) -> Iterator[Place]:
    topic, *numbers = stored
    if not isinstance(topic, str):
        raise TypeError(f"{topic!r} is not a topic")
    others = numbers[3] if len(numbers) == _IN_TOPIC else ()
    if others is None or isinstance(others, list):
        partition, offset, messages, _ = numbers
        known = None if others is None else tuple(map(int, others))
        yield Place(topic, int(partition), _parsed_offset(offset), int(messages), in_topic=True, others=known)
        return
    if not numbers or len(numbers) % _PLACE:
        raise ValueError(f"{topic!r} has {len(numbers)} numbers")
    for at in range(0, len(numbers), _PLACE):
        partition, offset, messages = numbers[at : at + _PLACE]
        yield Place(topic, int(partition), _parsed_offset(offset), int(messages))


def _offsets_text(groups: Iterable[GroupOffsets]) -> str:
    """The offsets as a member of the stored JSON; their number is small, and few transactions have them."""
    listed = []
    for group in groups:
        topics: dict[tuple[str, str], list[Any]] = {}
        for one in group.offsets:
            numbers = [one.partition, one.offset, one.leader_epoch, one.metadata]
            topic = [one.topic, one.topic_id] if one.topic_id else one.topic
            topics.setdefault((one.topic, one.topic_id), [topic]).extend(numbers)
        listed.append([group.group_id, *topics.values()])
    return f',"offsets":{json.dumps(listed, separators=(",", ":"))}'


def _parsed_group(stored: Any) -> GroupOffsets:
    group_id, *topics = stored
    found = []
    for named, *numbers in topics:
        topic, topic_id = named if isinstance(named, list) else (named, "")
        if len(numbers) % _OFFSET:
            raise ValueError(f"{topic!r} has {len(numbers)} numbers")
        for at in range(0, len(numbers), _OFFSET):
            partition, offset, leader_epoch, metadata = numbers[at : at + _OFFSET]
            given = int(partition), int(offset), int(leader_epoch), str(metadata)
            found.append(ConsumedOffset(str(topic), *given, str(topic_id)))
    return GroupOffsets(str(group_id), tuple(found))


def _parsed_offset(stored: Any) -> int | None:
    return None if stored is None else int(stored)


class ProducerKind(Enum):
    """The kind of producer that a generation was acquired for; the value is stored in the database."""

    LIBRDKAFKA = "librdkafka"
    """librdkafka, whose InitProducerId can't be made conditional: every claim acquires a new generation (rule O2)."""

    NATIVE = "native"
    """The native producer without two-phase commit: its transactions have a timeout."""

    NATIVE_TWO_PHASE = "native-2pc"
    """The native producer with two-phase commit (KIP-939)."""

    @property
    def takes_over(self) -> bool:
        """Whether a claimant can continue with an earlier claimant's generation, by compare-and-set (rule F5)."""
        return self is not ProducerKind.LIBRDKAFKA
