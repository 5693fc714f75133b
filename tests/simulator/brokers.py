"""A Kafka cluster in memory: its transaction coordinator, and the logs of its partitions.

The coordinator answers as Apache Kafka's does (TransactionCoordinator, TransactionMetadata of 4.1): EndTxn v4 and v5 (KIP-890),
InitProducerId, the producer id that changes after the last epoch, timeouts, and markers that are written later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from dualwrite.kafka.base import EndTxnResult, InitProducerIdResult
from dualwrite.kafka.client.kafka_errors import ErrorCode
from dualwrite.state import LAST_EPOCH, TransactionDescription
from dualwrite.state import TransactionStatus as Status

NO_TIMEOUT_MS: Final = 2**31 - 1
_ENDED: Final = (Status.COMPLETE_COMMIT, Status.COMPLETE_ABORT)


class Record(NamedTuple):
    """One record of a partition: a message with a number, or a marker."""

    producer_id: int
    epoch: int
    number: int | None
    commits: bool = False

    @property
    def is_marker(self) -> bool:
        return self.number is None


@dataclass
class Partition:
    """The log of one partition.

    Attributes:
        epochs: The newest epoch that it has seen of each producer.
        sequences: Of each producer: epoch, sequence number and offset of the last messages, by which a repeated one is known.
        deleted: The offsets that retention has removed.
    """

    log: list[Record] = field(default_factory=list)
    epochs: dict[int, int] = field(default_factory=dict)
    sequences: dict[tuple[int, int, int], int] = field(default_factory=dict)
    deleted: set[int] = field(default_factory=set)


@dataclass
class Entry:
    """What a coordinator keeps of one transactional id."""

    producer_id: int
    epoch: int
    timeout_ms: int
    status: Status = Status.EMPTY
    start_ms: int = -1
    partitions: set[int] = field(default_factory=set)
    previous_id: int = -1
    next_id: int = -1


def _answer(code: ErrorCode, producer_id: int = -1, epoch: int = -1) -> EndTxnResult:
    return EndTxnResult(int(code), code.name, producer_id, epoch)


def _initialised(code: ErrorCode, producer_id: int = -1, epoch: int = -1) -> InitProducerIdResult:
    return InitProducerIdResult(int(code), code.name, producer_id, epoch)


class Cluster:
    """One cluster; every method is a request's effect and its answer.

    Args:
        name: Its `cluster.id`.
        now: The brokers' clock, in seconds.
        ends_by_epoch: Whether it has EndTxn v5 (transaction.version 2).
        is_slow: Whether markers are written later, by `write_markers`.
        is_plain: Whether InitProducerId can't only create: see `TransactionCoordinator.create_all`.
        first_epoch: The epoch of a new producer id.
        adds_in_produce: Whether its producers add partitions by Produce (KIP-890), and not by a request of its own.
    """

    def __init__(
        self,
        name: str,
        now: Callable[[], float],
        *,
        ends_by_epoch: bool = True,
        is_slow: bool = False,
        is_plain: bool = False,
        first_epoch: int = 0,
        adds_in_produce: bool = True,
    ) -> None:
        self.name = name
        self.ends_by_epoch = ends_by_epoch
        self.is_slow = is_slow
        self.is_plain = is_plain
        self.adds_in_produce = adds_in_produce
        self.entries: dict[str, Entry] = {}
        self.partitions: dict[int, Partition] = {0: Partition(), 1: Partition()}
        self.is_readable = True
        self.has_forgotten = False
        self.opened: Callable[[str], None] = lambda _: None  # told of an id on which a message has opened a transaction
        self.aborted: Callable[[set[int]], None] = lambda _: None  # told of messages that a request has aborted
        self._now = now
        self._first_epoch = first_epoch
        self._last_id = 999

    # --- requests ---------------------------------------------------------------------------------------------------------

    def describe(self, name: str) -> TransactionDescription | None:
        entry = self.entries.get(name)
        if entry is None:
            return None
        parts = frozenset(("orders", each) for each in entry.partitions) if entry.status is Status.ONGOING else frozenset()
        return TransactionDescription(entry.status, entry.producer_id, entry.epoch, entry.timeout_ms, entry.start_ms, parts)

    def init(self, name: str, timeout_ms: int) -> InitProducerIdResult:
        """InitProducerId without a producer id."""
        entry = self.entries.get(name)
        if entry is None:
            return self._created(name, timeout_ms)
        if entry.status.is_ending:
            return _initialised(ErrorCode.CONCURRENT_TRANSACTIONS)
        if entry.status is Status.ONGOING:
            self._fence(entry)
            return _initialised(ErrorCode.CONCURRENT_TRANSACTIONS)
        entry.status, entry.timeout_ms = Status.EMPTY, timeout_ms
        if entry.epoch >= LAST_EPOCH:
            entry.previous_id, entry.producer_id, entry.epoch = entry.producer_id, self._new_id(), 0
        else:
            entry.previous_id, entry.epoch = -1, entry.epoch + 1
        return InitProducerIdResult(0, "NONE", entry.producer_id, entry.epoch)

    def create(self, name: str, timeout_ms: int) -> InitProducerIdResult:
        """InitProducerId with a producer id that no producer has."""
        if self.is_plain:
            return _initialised(ErrorCode.INVALID_PRODUCER_ID_MAPPING)
        return _initialised(ErrorCode.PRODUCER_FENCED) if name in self.entries else self._created(name, timeout_ms)

    def end(  # noqa: PLR0911  (as in Kafka's own code)
        self, name: str, producer_id: int, epoch: int, *, commit: bool, by_epoch: bool
    ) -> EndTxnResult:
        """EndTxn, v5 if `by_epoch`."""
        entry = self.entries.get(name)
        if entry is None:
            return _answer(ErrorCode.INVALID_PRODUCER_ID_MAPPING)
        done = Status.COMPLETE_COMMIT if commit else Status.COMPLETE_ABORT
        ending = Status.PREPARE_COMMIT if commit else Status.PREPARE_ABORT
        overflown = by_epoch and entry.previous_id == producer_id and epoch == LAST_EPOCH and entry.epoch == 0
        if entry.producer_id != producer_id and not overflown:
            return _answer(ErrorCode.INVALID_PRODUCER_ID_MAPPING)
        repeated = by_epoch and (overflown or entry.epoch == epoch + 1)
        if by_epoch and entry.status.is_ending:
            valid = repeated
        elif by_epoch and entry.status in _ENDED:
            valid = repeated or entry.epoch == epoch
        else:
            valid = entry.producer_id == producer_id and entry.epoch == epoch
        if not valid:
            return _answer(ErrorCode.PRODUCER_FENCED)
        if entry.status.is_ending:
            return _answer(ErrorCode.CONCURRENT_TRANSACTIONS if entry.status is ending else ErrorCode.INVALID_TXN_STATE)
        if entry.status is Status.ONGOING:
            return self._ended(entry, commit=commit, by_epoch=by_epoch)
        if entry.status in _ENDED and (repeated or not by_epoch):
            answers = entry.status is done
            return EndTxnResult(0, "NONE", entry.producer_id, entry.epoch) if answers else _answer(ErrorCode.INVALID_TXN_STATE)
        if commit or not by_epoch:
            return _answer(ErrorCode.INVALID_TXN_STATE)
        entry.start_ms = self._new_start(entry)
        return self._ended(entry, commit=False, by_epoch=True)

    def add(self, name: str, producer_id: int, epoch: int, partition: int) -> ErrorCode:
        """AddPartitionsToTxn, or the part of Produce that does the same."""
        entry = self.entries.get(name)
        if entry is None or entry.producer_id != producer_id:
            return ErrorCode.INVALID_PRODUCER_ID_MAPPING
        if entry.epoch != epoch:
            return ErrorCode.PRODUCER_FENCED
        if entry.status.is_ending:
            return ErrorCode.CONCURRENT_TRANSACTIONS
        if entry.status is not Status.ONGOING:
            entry.status, entry.start_ms, entry.partitions = Status.ONGOING, self._new_start(entry), set()
            entry.previous_id = -1
            if self.adds_in_produce:
                self.opened(name)
        entry.partitions.add(partition)
        return ErrorCode.NONE

    def produce(
        self, name: str, producer_id: int, epoch: int, partition: int, sequence: int, number: int, *, adds: bool
    ) -> tuple[ErrorCode, int]:
        """Produce of one message, and its offset. `adds`: it adds its partition to the transaction (KIP-890)."""
        of = self.partitions[partition]
        known = of.sequences.get((producer_id, epoch, sequence))
        if epoch < of.epochs.get(producer_id, -1):
            return ErrorCode.INVALID_PRODUCER_EPOCH, -1
        if known is not None:
            return ErrorCode.NONE, known
        if adds:
            refused = self.add(name, producer_id, epoch, partition)
            if refused is not ErrorCode.NONE:
                return refused, -1
        elif self.ends_by_epoch:
            entry = self.entries.get(name)
            is_open = entry is not None and entry.status is Status.ONGOING and partition in entry.partitions
            if not is_open or (entry.producer_id, entry.epoch) != (producer_id, epoch):  # type: ignore[union-attr]
                return ErrorCode.INVALID_TXN_STATE, -1
        of.log.append(Record(producer_id, epoch, number))
        of.epochs[producer_id] = epoch
        of.sequences[producer_id, epoch, sequence] = len(of.log) - 1
        return ErrorCode.NONE, len(of.log) - 1

    # --- what a cluster does by itself ------------------------------------------------------------------------------------

    def write_markers(self) -> str | None:
        """Complete every transaction whose end was decided."""
        found = [entry for entry in self.entries.values() if entry.status.is_ending]
        for entry in found:
            self._complete(entry)
        return "markers are written" if found else None

    def time_out(self) -> str | None:
        """Abort the transactions that are open for too long."""
        now = self._now() * 1000
        for name, entry in self.entries.items():
            if entry.status is Status.ONGOING and now - entry.start_ms > entry.timeout_ms:
                self._fence(entry, by_request=False)
                return f"the transaction of {name} times out"
        return None

    def forget_ids(self) -> str | None:
        """Forget the ids on which nothing is open (`transactional.id.expiration.ms`)."""
        found = [name for name, entry in self.entries.items() if entry.status in (*_ENDED, Status.EMPTY)]
        for name in found:
            del self.entries[name]
        self.has_forgotten = self.has_forgotten or bool(found)
        return f"the coordinator forgets {', '.join(found)}" if found else None

    def delete_records(self) -> str | None:
        """Retention removes what is in the log, up to the first message without a marker."""
        is_open = any(entry.status is Status.ONGOING or entry.status.is_ending for entry in self.entries.values())
        if is_open or not any(partition.log for partition in self.partitions.values()):
            return None
        for partition in self.partitions.values():
            partition.deleted.update(range(len(partition.log)))
        return "retention removes the messages that are in the log"

    # --- the log ----------------------------------------------------------------------------------------------------------

    def visible(self) -> list[list[int]]:
        """The messages that `read_committed` consumers get, or have got: of each partition in the order of its log."""
        found = []
        for partition in self.partitions.values():
            open_of: dict[int, list[int]] = {}
            shown: dict[int, int] = {}
            for offset, record in enumerate(partition.log):
                if not record.is_marker:
                    open_of.setdefault(record.producer_id, []).append(offset)
                else:
                    ended = open_of.pop(record.producer_id, [])
                    if record.commits:
                        shown.update((each, partition.log[each].number) for each in ended)
            found.append([shown[offset] for offset in sorted(shown)])
        return found

    def hanging(self) -> list[Any]:
        """What is open at the coordinator, and messages without a marker.

        Without `adds_in_produce` a repeated AddPartitionsToTxn that is late opens a transaction without messages (KIP-890). It
        keeps no consumer waiting, and times out.
        """
        found: list[Any] = [
            name for name, entry in self.entries.items() if entry.status is Status.ONGOING and self.adds_in_produce
        ]
        for partition in self.partitions.values():
            last = {}
            for record in partition.log:
                last[record.producer_id] = record
            found += [record for record in last.values() if not record.is_marker]
        return found

    # --- parts ------------------------------------------------------------------------------------------------------------

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _new_start(self, entry: Entry) -> int:
        return max(int(self._now() * 1000), entry.start_ms + 1)

    def _created(self, name: str, timeout_ms: int) -> InitProducerIdResult:
        entry = self.entries[name] = Entry(self._new_id(), self._first_epoch, timeout_ms)
        return InitProducerIdResult(0, "NONE", entry.producer_id, entry.epoch)

    def _fence(self, entry: Entry, *, by_request: bool = True) -> None:
        """Abort with the next epoch, which nobody has."""
        if by_request:
            self.aborted(self._open(entry))
        entry.epoch += 1
        self._decide(entry, commit=False)

    def _open(self, entry: Entry) -> set[int]:
        """The messages of a transaction that is open, except those that another one had before."""
        found: set[int] = set()
        for number in entry.partitions:
            earlier: set[int | None] = set()
            own: set[int] = set()
            for record in self.partitions[number].log:
                if record.producer_id != entry.producer_id:
                    earlier.add(record.number)
                elif record.number is None:
                    earlier |= own
                    own = set()
                else:
                    own.add(record.number)
            found |= own - earlier
        return found

    def _ended(self, entry: Entry, *, commit: bool, by_epoch: bool) -> EndTxnResult:
        answer = EndTxnResult(0, "NONE", entry.producer_id, entry.epoch)
        if not commit and entry.status is Status.ONGOING:
            self.aborted(self._open(entry))
        if by_epoch:
            if entry.epoch >= LAST_EPOCH:
                entry.next_id = self._new_id()
                answer = EndTxnResult(0, "NONE", entry.next_id, 0)
            else:
                answer = EndTxnResult(0, "NONE", entry.producer_id, entry.epoch + 1)
            entry.epoch += 1
        self._decide(entry, commit=commit)
        return answer

    def _decide(self, entry: Entry, *, commit: bool) -> None:
        entry.status = Status.PREPARE_COMMIT if commit else Status.PREPARE_ABORT
        if not self.is_slow:
            self._complete(entry)

    def _complete(self, entry: Entry) -> None:
        commits = entry.status is Status.PREPARE_COMMIT
        for number in sorted(entry.partitions):
            partition = self.partitions[number]
            partition.log.append(Record(entry.producer_id, entry.epoch, None, commits))
            partition.epochs[entry.producer_id] = max(partition.epochs.get(entry.producer_id, -1), entry.epoch)
        entry.status = Status.COMPLETE_COMMIT if commits else Status.COMPLETE_ABORT
        entry.partitions = set()
        if entry.next_id >= 0:
            entry.previous_id, entry.producer_id, entry.epoch, entry.next_id = entry.producer_id, entry.next_id, 0, -1
