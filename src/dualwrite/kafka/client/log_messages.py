"""Find the messages of an aborted transaction in the log, and read them again: aborted records stay until retention.

Every message is accounted for: the number of messages in each partition (or topic), which the delivery has; the sequence
numbers of the producer, which continue each other without a gap; the number of records in each batch, which compaction lowers;
the checksum of each batch; and the ABORT marker that follows. What does not fit is missing, and why is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

from dualwrite.errors import BrokerError, MessagesChangedError, MessagesCommittedError
from dualwrite.kafka.base import Message
from dualwrite.kafka.client.kafka_errors import ErrorCode
from dualwrite.kafka.client.log_reader import LogReader, OffsetGoneError, PartitionGoneError
from dualwrite.kafka.client.record_batches import Batch, DamagedBatchError, read_headers
from dualwrite.kafka.client.transaction_runs import PartitionRun, RunsInPartition
from dualwrite.observability.logs import SubjectLogger
from dualwrite.state import Delivery, FoundMessages, FoundPlace, Place, PreparedTxnState

log = SubjectLogger(__name__)

_LOOKED_BACK: Final = timedelta(hours=1)
"""How long before its preparation a transaction is looked for first, if its beginning is not known."""

_SKEW_MS: Final = 10_000
"""Milliseconds by which the clocks of two brokers differ at most."""

_ATTEMPTS: Final = 3


class _MissingError(Exception):
    """Messages can't be read: a sentence that says which and why."""


def find_messages(reader: LogReader, state: PreparedTxnState, delivery: Delivery) -> FoundMessages:
    """As `TransactionCoordinator.find_messages`."""
    began_ms = state.start_time_ms
    if began_ms is None:
        began_ms = int((delivery.prepared_at.astimezone(UTC) - _LOOKED_BACK).timestamp() * 1000)
    search = _Search(reader, state, began_ms)
    places: list[FoundPlace] = []
    missing: list[str] = []
    for place in delivery.places:
        try:
            found, lacking = search.found(place)
            places += found
            missing += lacking
        except _MissingError as error:
            missing.append(f"{error}")
        except PartitionGoneError as error:
            missing.append(_gone(place, error))
    elsewhere = delivery.messages - sum(place.messages for place in delivery.places)
    if elsewhere:
        missing.append(f"the places of {elsewhere} of the {delivery.messages} messages were not stored")
    missing += [f"the offsets of {group} were not stored" for group in delivery.offsets if not group.offsets]
    return FoundMessages(tuple(places), tuple(dict.fromkeys(missing)))


def find_later(reader: LogReader, state: PreparedTxnState, delivery: Delivery) -> tuple[int, Delivery | None]:
    """As `TransactionCoordinator.find_later`."""
    found: list[Place] = []
    most, ended_ms = 0, 0
    for place in delivery.proofs:
        count, begun, messages = 0, None, 0
        try:
            for batch in reader.batches_from(place.topic, place.partition, place.first_offset or 0):
                if batch.producer_id != state.producer_id:
                    continue
                if not batch.is_control:
                    begun, messages = batch.base_offset if begun is None else begun, messages + batch.count
                    continue
                if begun not in (None, place.first_offset) and batch.commits:
                    found.append(Place(place.topic, place.partition, begun, messages))
                    count, ended_ms = count + 1, max(ended_ms, batch.max_timestamp_ms)
                begun, messages = None, 0
        except (OffsetGoneError, PartitionGoneError, BrokerError) as error:
            log.info("the log of %s was not read to its end: %s", place, error, topic=place.topic, partition=place.partition)
        most = max(most, count)
    at = datetime.fromtimestamp(ended_ms / 1000, UTC)
    return most, Delivery(sum(each.messages for each in found), tuple(found), at) if found else None


def read_messages(reader: LogReader, state: PreparedTxnState, found: FoundMessages) -> Iterator[Message]:
    """As `TransactionCoordinator.read_messages`."""
    for place in found.places:
        try:
            yield from _read_place(reader, state, place)
        except (OffsetGoneError, PartitionGoneError, DamagedBatchError) as error:
            raise _changed(place, f"{error}" or "retention has deleted messages, or the topic was created again") from error


class _Search:
    """The search for the messages of one transaction."""

    def __init__(self, reader: LogReader, state: PreparedTxnState, began_ms: int) -> None:
        self._reader = reader
        self._state = state
        self._began_ms = began_ms

    def found(self, place: Place) -> tuple[list[FoundPlace], list[str]]:
        """Where the messages of a place are, and which are missing.

        Raises:
            _MissingError: None can be read.
            PartitionGoneError: As for LogReader.
        """
        runs = {}
        if place.first_offset is not None:
            run = self._proven(place, place.first_offset)
            if not place.in_topic:
                self._check(place, run)
                return [run.place(place.topic, place.partition)], []
            runs[place.partition] = run
        elif not place.in_topic:
            runs = self._searched(place, [place.partition])
            return self._complete(place, runs, [place.partition])
        if place.others is None and place.messages > sum(run.messages for run in runs.values()):
            raise _MissingError(f"the partitions of the {place.messages} messages of {place.topic} were not stored")
        partitions = [place.partition, *(place.others or ())]
        runs |= self._searched(place, [each for each in partitions if each not in runs], runs.get(place.partition))
        return self._complete(place, runs, partitions)

    def _proven(self, place: Place, offset: int) -> PartitionRun:
        """The run that has the transaction's message at this offset, which is its first in the partition."""
        topic, partition = place.topic, place.partition
        runs = RunsInPartition(self._state)
        try:
            for batch in self._reader.batches_from(topic, partition, offset, lambda: runs.open is not None):
                if runs.last is None and batch.base_offset <= offset and not self._wrote(batch, offset):
                    raise _MissingError(
                        f"offset {offset} of {topic}-{partition} has another message: the topic was deleted and created again, "
                        "or a leader was elected uncleanly"
                    )
                runs.add(batch)
                if runs.last is not None and runs.last.marker is not None:
                    break
        except OffsetGoneError:
            raise _MissingError(self._cut(place, offset)) from None
        if runs.last is None:
            raise _MissingError(f"compaction has removed the messages of {topic}-{partition} from offset {offset} on")
        self._check_aborted(topic, partition, runs.last)
        return runs.last

    def _wrote(self, batch: Batch, offset: int) -> bool:
        state = self._state
        is_data = batch.is_transactional and not batch.is_control
        return is_data and batch.base_offset == offset and (batch.producer_id, batch.epoch) == (state.producer_id, state.epoch)

    def _cut(self, place: Place, offset: int) -> str:
        """Why the partition does not have an offset."""
        first = self._reader.first_offset(place.topic, place.partition)
        where = f"{place.topic}-{place.partition}"
        if first > offset:
            what = f"offset {offset}" if first - 1 == offset else f"offsets {offset} to {first - 1}"
            return f"retention has deleted {what} of {where}"
        return (
            f"{where} ends before offset {offset}: the topic was deleted and created again, or a leader was elected uncleanly"
        )

    def _check(self, place: Place, run: PartitionRun) -> None:
        where = f"{place.topic}-{place.partition}"
        if run.damage is not None:
            raise _MissingError(f"{run.damage} in {where}")
        if run.messages < place.messages:
            raise _MissingError(
                f"compaction has removed {place.messages - run.messages} of {place.messages} messages of {where}"
            )
        if run.messages > place.messages or run.removed:
            raise _MissingError(
                f"{where} has {run.messages + run.removed} messages of the transaction and not {place.messages}"
            )

    def _check_aborted(self, topic: str, partition: int, run: PartitionRun) -> None:
        if run.is_committed:
            raise _committed(self._state, topic, partition, run.marker)

    def _searched(self, place: Place, partitions: list[int], proven: PartitionRun | None = None) -> dict[int, PartitionRun]:
        """The transaction's runs in partitions of which the offsets are not known.

        First from near the time of its beginning, which records with timestamps of the user's choice don't have; then, if there
        are too few messages, from the beginning of each partition.
        """
        found: dict[int, PartitionRun] = {}
        before = 0 if proven is None else proven.messages
        left = partitions
        for is_near in (True, False):
            not_whole = []
            for partition in left:
                run, is_whole = self._last_run(place.topic, partition, self._ended(proven), is_near=is_near)
                if run is not None:
                    found[partition] = run
                if not is_whole:
                    not_whole.append(partition)
            if before + sum(run.messages for run in found.values()) == place.messages and len(found) == len(partitions):
                break
            left = not_whole
        return found

    def _ended(self, proven: PartitionRun | None) -> int | None:
        """A time before which no marker of the transaction was written, and after which none of an earlier one; None: any.

        It is compared with the times of markers, by the clocks of brokers. An earlier transaction ended before this one began.
        """
        if self._state.start_time_ms is None:
            return None
        lasted = 0 if proven is None else proven.ended_ms - self._began_ms
        return self._began_ms + max(_SKEW_MS, lasted // 2)

    def _last_run(self, topic: str, partition: int, ended_ms: int | None, *, is_near: bool) -> tuple[PartitionRun | None, bool]:
        """The last run, and whether everything that the partition still has was read, from its beginning."""
        for _ in range(_ATTEMPTS):
            first = self._reader.first_offset(topic, partition)
            begin = self._reader.offset_at(topic, partition, self._began_ms - _SKEW_MS) if is_near else first
            try:
                run = None if begin is None else self._last_run_from(topic, partition, begin, ended_ms)
            except OffsetGoneError:  # it is empty, or retention has deleted it just now
                run = None
                if self._reader.first_offset(topic, partition) != first:
                    continue
            if run is not None and run.is_committed:
                if self._state.has_own_epoch:
                    raise _committed(self._state, topic, partition, run.marker)
                run = None  # that of an earlier transaction
            return run, begin == first
        raise _MissingError(f"retention deletes {topic}-{partition} faster than it can be read")

    def _last_run_from(self, topic: str, partition: int, begin: int, ended_ms: int | None) -> PartitionRun | None:
        runs = RunsInPartition(self._state)
        for batch in self._reader.batches_from(topic, partition, begin, lambda: runs.open is not None):
            runs.add(batch)
            run = runs.last
            if run is not None and run.marker is not None and (ended_ms is None or run.ended_ms >= ended_ms):
                break
        return runs.last

    def _complete(
        self, place: Place, runs: Mapping[int, PartitionRun], partitions: list[int]
    ) -> tuple[list[FoundPlace], list[str]]:
        """The places of runs, after checking that they have all messages of the place."""
        topic, missing = place.topic, []
        for partition in partitions:
            run = runs.get(partition)
            if run is None:
                missing.append(f"retention or compaction has removed all messages of {topic}-{partition}")
            elif run.damage is not None:
                missing.append(f"{run.damage} in {topic}-{partition}")
        count = sum(run.messages for run in runs.values())
        before_compaction = count + sum(run.removed for run in runs.values())
        if before_compaction > place.messages:
            raise _MissingError(f"{topic} has {before_compaction} messages of the transaction and not {place.messages}")
        if count < place.messages and not missing:
            missing.append(
                f"retention or compaction has removed {place.messages - count} of {place.messages} messages of {topic}"
            )
        sound = [(partition, run) for partition, run in sorted(runs.items()) if run.damage is None]
        return [run.place(topic, partition) for partition, run in sound], missing


def _read_place(reader: LogReader, state: PreparedTxnState, place: FoundPlace) -> Iterator[Message]:
    runs = RunsInPartition(state)
    for batch in reader.batches_from(place.topic, place.partition, place.first_offset, lambda: True):
        before = 0 if runs.last is None else runs.last.messages
        runs.add(batch)
        run = runs.last
        if run is None or run.first_offset != place.first_offset:
            raise _changed(place, f"offset {place.first_offset} has another message")
        if run.is_committed:
            raise _committed(state, place.topic, place.partition, run.marker)
        if run.damage is not None or run.removed:
            raise _changed(place, run.damage or "compaction has removed messages")
        if run.marker is not None:
            if (run.messages, run.marker.base_offset) != (place.messages, place.end_offset):
                raise _changed(place, f"there are {run.messages} messages up to offset {run.marker.base_offset}")
            return
        if batch.base_offset >= place.end_offset:
            raise _changed(place, f"offset {place.end_offset} has no marker")
        if run.messages > before:
            yield from _decoded(place, batch)


def _decoded(place: FoundPlace, batch: Batch) -> Iterator[Message]:
    for key, value, encoded, timestamp in batch.records():
        try:
            headers = read_headers(encoded)
        except (IndexError, ValueError) as error:
            raise DamagedBatchError(f"headers in the batch at offset {batch.base_offset} can't be decoded: {error}") from error
        yield Message(place.topic, value, key, headers, place.partition, timestamp if timestamp >= 0 else None)


def _gone(place: Place, error: PartitionGoneError) -> str:
    if error.code is ErrorCode.TOPIC_AUTHORIZATION_FAILED:
        return f"the principal may not read topic {place.topic}: grant it Read on the topic"
    where = f"topic {place.topic}" if place.in_topic else f"{place.topic}-{place.partition}"
    return f"{where} does not exist any more"


def _committed(state: PreparedTxnState, topic: str, partition: int, marker: Batch | None) -> MessagesCommittedError:
    assert marker is not None
    return MessagesCommittedError(
        f"Transaction {state} was committed: {topic}-{partition} has its COMMIT marker at offset {marker.base_offset}.",
        next_step="its messages are visible, and must not be published again; recover the id again",
        topic=topic,
        partition=partition,
        offset=marker.base_offset,
    )


def _changed(place: FoundPlace, cause: str) -> MessagesChangedError:
    return MessagesChangedError(
        f"The {place.messages} messages in {place.topic}-{place.partition} from offset {place.first_offset} on could not be "
        "read again as they were found.",
        cause=cause,
        next_step="abort what was sent, and search again for what can still be read",
        topic=place.topic,
        partition=place.partition,
    )
