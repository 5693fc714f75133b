"""A processor's progress: where partitions are read from, and how their positions move with each batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dualwrite.errors import (
    BrokerUnavailableError,
    LogTruncatedError,
    MessagesDeletedError,
    PositionForgottenError,
    PositionMovedError,
    TopicReplacedError,
)
from dualwrite.kafka.inspect import TopicMetadata, topic_ids, topic_metadata
from dualwrite.kafka.librdkafka.consumer import BEGINNING, GroupConsumer
from dualwrite.kafka.librdkafka.group_offsets import Batch
from dualwrite.observability.logs import SubjectLogger
from dualwrite.processor.options import ProcessorOptions
from dualwrite.processor.position_keeping import QUERY_TIMEOUT, PositionKeeping
from dualwrite.stores.positions import Move, Partition, Position
from dualwrite.transaction import Transaction

log = SubjectLogger(__name__)

Finish = Callable[[Transaction[Any]], None]
"""The end of a transaction's work: sends a dead letter, if any, and moves the positions. Called in the transaction's thread."""


@dataclass(frozen=True, slots=True)
class PartitionState:
    """What is known about a partition when it is assigned.

    Args:
        topic_id: Kafka's id of the topic; empty if the brokers have none.
        first_offset: The first offset that retention has not deleted; None if it was not queried.
        committed: The group's committed offset at Kafka, if there is one.
        end_offset: The partition's end, if Kafka refused to read from the position; None otherwise.
        is_truncated: Whether Kafka refused since the log was truncated before the position; it may have grown again since.
    """

    topic_id: str
    first_offset: int | None = None
    committed: int | None = None
    end_offset: int | None = None
    is_truncated: bool = False


def begin_of(partition: Partition, stored: Position | None, seen: PartitionState, options: ProcessorOptions) -> int:
    """The offset to start at, or BEGINNING: by the stored position, the partition as it is now, and the policies.

    Raises:
        TopicReplacedError: The topic was deleted and created again, and the policy is to stop.
        MessagesDeletedError: Retention has deleted messages that were not read yet, and the policy is to stop.
        LogTruncatedError: The partition ends, or was truncated, before the position, and the policy is to stop.
    """
    topic, number = partition
    if stored is not None and stored.topic_id and seen.topic_id and stored.topic_id != seen.topic_id:
        if options.on_new_topic == "begin":
            return BEGINNING
        raise TopicReplacedError(
            f"The topic {topic!r} is not the one that was read before: it was deleted and created again.",
            next_step="to read it from its first message, set on_new_topic='begin', or forget the positions "
            "(`dualwrite offsets forget`)",
            topic=topic,
        )
    position = seen.committed if stored is None else stored.offset
    if position is None:
        return BEGINNING
    if seen.first_offset is not None and seen.first_offset > position:
        if options.on_gap == "skip":
            return seen.first_offset
        raise MessagesDeletedError(
            f"Up to {seen.first_offset - position} messages of {topic}-{number} were deleted before they were read: the "
            f"position is {position}, and the partition begins at {seen.first_offset}.",
            cause="the consumer fell further behind than the topic's retention allows",
            next_step=f"to go on without them, set on_gap='skip', or move the position: {how_to_reset(options)}",
            topic=topic,
            partition=number,
            position=position,
            first_offset=seen.first_offset,
        )
    if seen.end_offset is not None and (seen.end_offset < position or seen.is_truncated):
        if options.on_gap == "skip":
            return min(seen.end_offset, position)
        if seen.end_offset < position:
            what = f"ends at {seen.end_offset}, before the position {position}"
            next_step = f"to go on at the end, set on_gap='skip'; or move the position: {how_to_reset(options)}"
        else:
            what = (
                f"was truncated before the position {position}, and has grown again since, to {seen.end_offset}: an unknown "
                "number of new messages lie before the position"
            )
            next_step = (
                "to process these messages, stop the other processors of the group too, and move the position first: "
                f"{how_to_reset(options)}; they, and a restart, do not notice this, and go on at the position"
            )
        raise LogTruncatedError(
            f"The partition {topic}-{number} {what}.",
            cause="brokers have lost messages that were read already (an unclean election of a leader, a lost disk), or the "
            "topic was deleted and created again",
            next_step=next_step,
            topic=topic,
            partition=number,
            position=position,
            end_offset=seen.end_offset,
        )
    return position


def how_to_reset(options: ProcessorOptions) -> str:
    """The command that moves a position; it depends on where the options say that positions are stored."""
    if options.offsets == "kafka":
        return "`kafka-consumer-groups.sh --reset-offsets`, while the group is stopped"
    return "`dualwrite offsets reset`"


class Progress:
    """The positions of one consumer group, as one of its members knows them. For one thread.

    Args:
        group_id: The group.
        kafka: The consumer's settings, for queries of the topics' ids.
        keeping: Where the positions are.
        options: The policies.
    """

    def __init__(self, group_id: str, kafka: Mapping[str, Any], keeping: PositionKeeping, options: ProcessorOptions) -> None:
        self._group = group_id
        self._kafka = connection_settings(kafka)
        self._keeping = keeping
        self._options = options
        self._known: dict[Partition, Position] = {}
        self._ids: dict[Partition, str] = {}  # the topic's id when the partition was assigned
        self._compared: dict[Partition, int | None] = {}  # the position at which the id was last seen unchanged
        self._in_doubt = False

    def prepare(self) -> None:
        """See PositionKeeping."""
        self._keeping.prepare()

    def known(self) -> Mapping[Partition, Position]:
        """The positions, as far as they are known."""
        return dict(self._known)

    def begin(
        self, consumer: GroupConsumer, partitions: Sequence[Partition], refused: Mapping[Partition, int] | None = None
    ) -> Mapping[Partition, int]:
        """The offset at which to start reading each of these partitions, or BEGINNING.

        `refused` has the offsets from which Kafka refused to read some of them.

        Raises:
            DualWriteError: The offsets can't be determined now (retriable), or a policy says to stop.
        """
        refused = refused or {}
        self._keeping.prepare()  # a member that keeps positions elsewhere may have joined in the meantime
        stored = self._keeping.read(consumer, partitions)
        topics = self._topics_of(partitions)
        ids = {key: topics[key[0]].id for key in partitions}
        for key in partitions:
            position = stored.get(key)
            if position is None or position.topic_id != ids[key]:
                self._check_replaced(key, ids[key])
            self._check_not_forgotten(key, position)
        if self._options.start == "latest" and self._keeping.keep_ends(consumer, partitions, stored, topics):
            stored = self._keeping.read(consumer, partitions)
        seen = self._seen(consumer, partitions, stored, ids, refused)
        found: dict[Partition, int] = {}
        for key in partitions:
            position = stored.get(key)
            found[key] = begin_of(key, position, seen[key], self._options)
            self._note(key, position)
            self._ids[key] = ids[key]
            self._compared[key] = self._offset(key)
            self._warn_of_gap(key, seen[key].committed if position is None else position.offset, seen[key], found[key])
        refused_first = [key for key in refused if found.get(key) == BEGINNING]  # a seek needs their offsets
        return found | consumer.offsets.first_offsets(refused_first, QUERY_TIMEOUT)

    def move(self, consumer: GroupConsumer, batch: Batch, tx: Transaction[Any]) -> None:
        """Move the positions past a batch, at the end of its transaction. This fails if the batch is no longer ours."""
        if self._in_doubt:
            self._find_out(consumer, batch)
        self._keeping.move(consumer, self._moves(batch.after), tx)

    def moved(self, consumer: GroupConsumer, after: Mapping[Partition, int]) -> None:
        """Called when the transaction has committed."""
        self._in_doubt = False
        self._known |= {key: self._at(key, offset) for key, offset in after.items()}
        self._keeping.moved(consumer, after)

    def advance_to_ends(self, consumer: GroupConsumer, ends: Mapping[Partition, int]) -> None:
        """Move the positions of partitions that were read to their ends past the markers and aborted messages there.

        Otherwise, when retention deletes only those, unread messages would seem to be deleted.

        Raises:
            DualWriteError: The positions were not moved, which does no harm.
        """
        moved = {key: end for key, end in ends.items() if end > (self._offset(key) or 0)}
        if moved and self.can_assign:
            self._keeping.reset(consumer, self._moves(moved))
            self.moved(consumer, moved)

    def catch_up(self, consumer: GroupConsumer, batch: Batch) -> tuple[Batch, Mapping[Partition, int]]:
        """After PositionMovedError: the rest of a batch, and the new offsets of the partitions whose positions have moved.

        The rest does not include messages that an earlier attempt of our own has committed.
        """
        moved: dict[Partition, int] = {}
        for key, position in self._changed(consumer, batch.after.keys()).items():
            self._check_not_forgotten(key, position)
            self._note(key, position)
            moved[key] = BEGINNING if position is None else position.offset
        self._in_doubt = False
        return batch.only(batch.after.keys() - moved.keys()), moved

    @property
    def can_assign(self) -> bool:
        """Whether partitions can be assigned now: a group's offsets can't be read before a transaction in doubt has ended."""
        return not self._in_doubt

    def left_in_doubt(self) -> None:
        """Note that it is unknown whether the last transaction committed; positions in the database show it by themselves."""
        self._in_doubt = not self._keeping.in_database

    def moved_by_others(self, consumer: GroupConsumer) -> Mapping[Partition, int]:
        """Where to continue in partitions whose position another process has moved; called between two transactions.

        Raises:
            StoreError, BrokerError: The positions or the topics' ids can't be read now.
            PositionForgottenError: A position is gone.
            TopicReplacedError: A topic was deleted and created again, and the policy is to stop, or it is not certain which
                messages were read.
        """
        owned = consumer.owned().keys()
        ids = topic_ids(self._kafka, {topic for topic, _ in owned}, timeout=QUERY_TIMEOUT)
        replaced = []
        for key in owned:
            now, before = ids.get(key[0], ""), self._ids.get(key, "")
            if now and before and now != before:
                self._check_replaced(key, now)
                replaced.append(key)
            else:
                self._compared[key] = self._offset(key)
        moved = dict(self.begin(consumer, replaced)) if replaced else {}
        if self._keeping.in_database:  # Kafka moves no offsets of a group that has members
            for key, position in self._changed(consumer, owned - moved.keys()).items():
                self._check_not_forgotten(key, position)
                if position is not None:
                    self._note(key, position)
                    moved[key] = position.offset
        return moved

    def ask_kafka(self, topics: Sequence[str], timeout: float) -> None:
        """Ask a broker about the topics, with a connection of its own, in any thread.

        Raises:
            DualWriteError: No broker responds within so many seconds.
        """
        topic_ids(self._kafka, topics, timeout=timeout)

    def has_lost_partitions(self, error: BaseException) -> bool:
        """Whether the error means that the member may have lost its partitions."""
        return isinstance(error, self._keeping.membership_errors)

    def forget(self) -> None:
        """Forget everything, because the processor has stopped."""
        self._known.clear()
        self._ids.clear()
        self._compared.clear()
        self._in_doubt = False

    def _find_out(self, consumer: GroupConsumer, batch: Batch) -> None:
        """Find out the outcome of a transaction in doubt; called inside the next one, when the writer has ended it.

        Only then can the group's offsets be read.

        Raises:
            PositionMovedError: The transaction in doubt has committed.
            BrokerError: The offsets can't be read yet.
        """
        if self._changed(consumer, batch.after.keys()):
            raise PositionMovedError(f"The offsets of the group {self._group!r} have moved.", group_id=self._group)
        self._in_doubt = False

    def _changed(self, consumer: GroupConsumer, keys: Collection[Partition]) -> dict[Partition, Position | None]:
        """The positions of partitions that have changed since they were read."""
        found = self._keeping.read(consumer, keys)
        return {key: found.get(key) for key in keys if place_of(found.get(key)) != place_of(self._known.get(key))}

    def _offset(self, key: Partition) -> int | None:
        known = self._known.get(key)
        return None if known is None else known.offset

    def _check_not_forgotten(self, key: Partition, found: Position | None) -> None:
        """Check that a known position still exists: without it, nothing says what was read.

        Raises:
            PositionForgottenError: The position is gone.
        """
        known = self._known.get(key)
        if found is None and known is not None:
            raise PositionForgottenError(
                f"The position of group {self._group!r} on {key[0]}-{key[1]} is gone; it was {known.offset}.",
                cause=self._keeping.gone_because,
                next_step="stop the other processors of the group too, and check where it will start when it is started again: "
                f"{how_to_reset(self._options)} moves it",
                topic=key[0],
                partition=key[1],
                position=known.offset,
            )

    def _check_replaced(self, key: Partition, now: str) -> None:
        """Stop if the topic was replaced since the assignment, and new messages may have been mistaken for old ones.

        Raises:
            TopicReplacedError: That is the case.
        """
        before = self._ids.get(key, "")
        if not (before and now and before != now):
            return
        is_certain = (
            self._keeping.in_database and self._options.on_new_topic == "begin" and self._compared.get(key) == self._offset(key)
        )
        if not is_certain:
            raise TopicReplacedError(
                f"The topic {key[0]!r} was deleted and created again while it was read: the position {self._offset(key)} of "
                f"{key[0]}-{key[1]} belongs to the old topic.",
                cause="messages of the new topic may have been mistaken for messages of the old one since the position "
                f"{self._compared.get(key)}, where the topic was last compared",
                next_step="check which messages of the new topic took effect, and choose where to start in it: "
                + how_to_reset(self._options)
                + (" or on_new_topic='begin'" if self._keeping.in_database else ""),
                topic=key[0],
            )

    def _topics_of(self, partitions: Sequence[Partition]) -> dict[str, TopicMetadata]:
        """The topics of these partitions; not by `list_topics`, which must not be called here: see GroupConsumer."""
        names = {topic for topic, _ in partitions}
        found = topic_metadata(self._kafka, names, timeout=QUERY_TIMEOUT)
        for topic in names - found.keys():  # or a new topic could pass for the old one
            raise BrokerUnavailableError(
                f"The brokers don't know the topic {topic!r} of an assigned partition.",
                cause="it was just created or deleted",
                next_step="retry",
            )
        return found

    def _seen(
        self,
        consumer: GroupConsumer,
        partitions: Sequence[Partition],
        stored: Mapping[Partition, Position],
        ids: Mapping[Partition, str],
        refused: Mapping[Partition, int],
    ) -> dict[Partition, PartitionState]:
        """The partitions as they are now, to check the positions against."""
        missing = [key for key in partitions if key not in stored]
        committed = consumer.offsets.committed(missing, QUERY_TIMEOUT) if missing else {}
        begun = {key: stored[key].offset if key in stored else committed.get(key) for key in partitions}
        first = consumer.offsets.first_offsets([key for key, offset in begun.items() if offset is not None], QUERY_TIMEOUT)
        truncated = consumer.truncated & refused.keys()  # whose offset is not the position's if markers were passed meanwhile
        ends = consumer.offsets.end_offsets(
            [key for key, place in refused.items() if key in truncated or begun.get(key) == place], QUERY_TIMEOUT
        )
        return {
            key: PartitionState(ids[key], first.get(key), committed.get(key), ends.get(key), is_truncated=key in truncated)
            for key in partitions
        }

    def _warn_of_gap(self, key: Partition, position: int | None, seen: PartitionState, begin: int) -> None:
        fields: dict[str, Any] = {"group_id": self._group, "topic": key[0], "partition": key[1]}
        where = "its first message" if begin == BEGINNING else begin
        if seen.is_truncated:
            log.warning("%s-%d was truncated before its position; continuing at %s", *key, where, **fields)
        if position is not None and begin != position:
            message = "%s-%d continues at %s instead of its position %d; messages in between are not processed"
            log.warning(message, *key, where, position, offset=position, **fields)

    def _moves(self, after: Mapping[Partition, int]) -> list[Move]:
        """What Kafka keeps has no topic's id; but it can refuse offsets of another topic than the one that was read."""
        return [Move(self._known.get(key), Position(*key, offset, self._ids.get(key, ""))) for key, offset in after.items()]

    def _at(self, key: Partition, offset: int) -> Position:
        return Position(*key, offset, self._ids.get(key, "") if self._keeping.in_database else "")

    def _note(self, key: Partition, position: Position | None) -> None:
        if position is None:
            self._known.pop(key, None)
        else:
            self._known[key] = position


def place_of(position: Position | None) -> tuple[int, str] | None:
    """The parts of a position that are compared: the offset, and the topic that it belongs to."""
    return None if position is None else (position.offset, position.topic_id)


def connection_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without those of a consumer."""
    return {name: value for name, value in settings.items() if not name.startswith(("group.", "partition.assignment", "auto."))}
