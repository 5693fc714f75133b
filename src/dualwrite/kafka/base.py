"""The Kafka-side contracts: a transactional producer, and the transaction coordinator as recovery uses it."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, Self, runtime_checkable

from dualwrite.deadline import Limit
from dualwrite.errors import UsageError
from dualwrite.state import (
    ConsumedOffset,
    Delivery,
    Fate,
    FoundMessages,
    GroupOffsets,
    Place,
    PreparedTxnState,
    ProducerKind,
    TransactionDescription,
    TransactionStatus,
)

_LIBRDKAFKA_MAGIC: Final = b"CGMDv2:"
_GENERATION: Final = struct.Struct("=i")

Headers = Mapping[str, str | bytes | None] | Sequence[tuple[str, str | bytes | None]]


@dataclass(frozen=True, slots=True)
class GroupMetadata:
    """The member that commits: its generation fences members of the group that were replaced (KIP-447).

    Args:
        group_id: The group.
        generation_id: The generation; -1 without group management.
        member_id: The member; empty without group management.
        group_instance_id: The static member, or None.
    """

    group_id: str
    generation_id: int = -1
    member_id: str = ""
    group_instance_id: str | None = None

    @classmethod
    def from_librdkafka(cls, written: bytes) -> Self:
        """Parse what confluent-kafka's `consumer_group_metadata()` returns.

        The format is that of librdkafka's `rd_kafka_consumer_group_metadata_write`: magic, generation, then zero-terminated
        strings; a byte before the last string shows whether that string is null.

        Raises:
            UsageError: It has another format.
        """
        try:
            written_group = written[len(_LIBRDKAFKA_MAGIC) :]
            (generation,) = _GENERATION.unpack_from(written_group)
            group, member, rest = written_group[_GENERATION.size :].split(b"\0", 2)
            instance = None if rest == b"\1" else rest[1 : rest.index(b"\0", 1)].decode()
            found = cls(group.decode(), generation, member.decode(), instance)
        except (ValueError, TypeError, struct.error) as error:
            raise _unreadable(written) from error
        if found.for_librdkafka() != written:  # another magic, a missing part, or trailing bytes
            raise _unreadable(written)
        return found

    def for_librdkafka(self) -> bytes:
        """The format that librdkafka reads."""
        instance = b"\1" if self.group_instance_id is None else b"\0" + self.group_instance_id.encode() + b"\0"
        parts = [self.group_id.encode(), b"\0", self.member_id.encode(), b"\0", instance]
        return _LIBRDKAFKA_MAGIC + _GENERATION.pack(self.generation_id) + b"".join(parts)


def _unreadable(written: object) -> UsageError:
    return UsageError(
        f"The consumer's group metadata can't be parsed: {written!r}.",
        next_step="pass a confluent-kafka Consumer, or your own GroupMetadata",
    )


def progress_of(
    consumer: Any, offsets: Mapping[tuple[str, int], int] | None = None
) -> tuple[list[ConsumedOffset], GroupMetadata]:
    """The positions of a confluent-kafka Consumer and its group, without partitions from which nothing was read.

    `offsets` has the next offset of each partition, instead of what the consumer has returned so far.
    """
    group = GroupMetadata.from_librdkafka(consumer.consumer_group_metadata())
    if offsets is not None:
        return [ConsumedOffset(*key, offset) for key, offset in offsets.items()], group
    positions = consumer.position(consumer.assignment())
    found = [
        ConsumedOffset(p.topic, p.partition, p.offset, p.leader_epoch if p.leader_epoch is not None else -1)
        for p in positions
        if p.offset >= 0
    ]
    return found, group


class SentOffsets:
    """The offsets of consumer groups that were sent to a transaction; a later one of a partition replaces an earlier one."""

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        self._groups: dict[str, dict[tuple[str, int], ConsumedOffset]] = {}

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __iter__(self) -> Iterator[GroupOffsets]:
        for group_id, offsets in self._groups.items():
            yield GroupOffsets(group_id, tuple(offsets.values()))

    def add(self, group_id: str, offsets: Iterable[ConsumedOffset]) -> None:
        """Remember the offsets of a group, which has at least one."""
        self._groups.setdefault(group_id, {}).update(((one.topic, one.partition), one) for one in offsets)

    def clear(self) -> None:
        """Another transaction begins."""
        self._groups.clear()


GivenMessage = tuple[str, bytes | str | None, bytes | str | None, Headers | None, int | None, int | None]
"""A message as somebody has given it: the fields of a Message, in their order. Whatever takes it checks it."""


class Message(NamedTuple):
    """One checked message; `timestamp` is in milliseconds since 1970, None for the time of sending."""

    topic: str
    value: bytes | None
    key: bytes | None
    headers: list[tuple[str, bytes | None]] | None
    partition: int | None
    timestamp: int | None

    @property
    def size(self) -> int:
        """Bytes of key and value."""
        return len(self.value or b"") + len(self.key or b"")


@runtime_checkable
class TransactionalProducer(Protocol):
    """A producer for one Kafka transactional id, with the method names of KIP-939 in snake case.

    Not thread-safe: one thread at a time. Errors of the client library are raised as the matching BrokerError, `from` the
    original.
    """

    @property
    def transaction_timeout(self) -> float | None:
        """Seconds after which the broker aborts a transaction; None under two-phase commit, and before the id is registered."""
        ...

    @property
    def kafka_transactional_id(self) -> str:
        """The transactional id that Kafka sees."""
        ...

    @property
    def must_be_replaced(self) -> bool:
        """Whether this session must not begin another transaction (rule F9).

        True after it was fenced. Unless each transaction has its own epoch, also after a failed delivery, and after an EndTxn
        was sent more than once, since a delayed duplicate may still be in the network.
        """
        ...

    def init_transactions(self, *, timeout: Limit) -> PreparedTxnState | None:
        """Register the id at its coordinator and fence its previous owners (InitProducerId), within the time limit.

        Returns:
            The prepared transaction of the id that was kept, if the producer supports this and it was requested; else None.

        Raises:
            BrokerUnavailableError: No coordinator responded within the time limit.
            BrokerAuthorizationError: The principal is not authorized to use the id.
            ConfigurationError: The broker rejects the transaction timeout.
        """
        ...

    def begin_transaction(self) -> None:
        """Begin a transaction; nothing is sent to Kafka before the first message."""
        ...

    def send_messages(self, messages: Iterable[GivenMessage]) -> None:
        """Check messages and queue them, to be sent in the background; those without a timestamp get the time of this call.

        It does not wait until they are stored; `prepare_transaction` does. After an error it is unspecified how many of the
        messages before the one that has failed were queued.

        The time limit of delivery is for waiting without progress: all waits of the call share one limit, which starts again
        when the brokers have stored messages. A call with millions of messages may therefore take longer than the limit, but
        where the brokers store nothing, it waits no longer than that. The time that the iterable needs does not count.

        Raises:
            InvalidMessageError: A wrong type or range, or the timestamp 0 if the producer can't send it. That message was not
                sent, and the transaction can continue.
            UnknownTopicError: The topic does not exist, and the broker does not create it.
            MessageTooLargeError: The message exceeds the producer's own limit.
            DeliveryError: The queue stayed full, or an earlier message of the transaction has failed.
        """
        ...

    def send_offsets_to_transaction(self, offsets: Iterable[ConsumedOffset], group: GroupMetadata, *, timeout: float) -> None:
        """Make a consumer's positions part of the transaction (KIP-447); does nothing if there are no offsets.

        Raises:
            ProducerFencedError: The consumer's generation in the group is over, so its partitions belong to another member.
            BrokerAuthorizationError: The principal lacks Read on the group.
            BrokerUnavailableError: The group's coordinator did not respond within the time limit.
        """
        ...

    def prepare_transaction(self, *, timeout: float) -> PreparedTxnState | None:
        """Flush, check that every message was acknowledged, and return the transaction's state; None if nothing was sent.

        Afterwards only commit and abort are allowed.

        Raises:
            DeliveryError: A message was not stored (as UnknownTopicError or MessageTooLargeError if that is the reason).
            PrepareError: The transaction is not ongoing at its coordinator, or the prepared state would be ambiguous.
            TransactionTimeoutError: Too little of the transaction's timeout is left.
        """
        ...

    @property
    def delivery(self) -> Delivery | None:
        """Where in the log the messages of the most recently prepared transaction are, as acknowledged by the brokers.

        And the consumer groups' offsets that are part of it. None before `prepare_transaction` has returned, and if the
        transaction has neither messages nor offsets.
        """
        ...

    def check_time_left(self) -> None:
        """Check that enough of the transaction's timeout is left to commit the database now; reads the clock, no I/O.

        Raises:
            TransactionTimeoutError: Too little is left: without two-phase commit the broker may abort the transaction soon.
        """
        ...

    def commit_transaction(self, *, timeout: float) -> None:
        """Commit; when it returns, the coordinator has returned NONE, which proves the commit.

        Raises:
            ProducerFencedError: Another process, or a timeout, ended the transaction; describe it to find out how.
            BrokerUnavailableError: No proof within the time limit; the transaction may be committed or ongoing.
        """
        ...

    def abort_transaction(self, *, timeout: float) -> None:
        """Abort; messages not yet sent are dropped. Raises as `commit_transaction`."""
        ...

    def close(self) -> None:
        """Drop queued messages and release all resources. Does not end a transaction at the coordinator."""
        ...


class TakeOverProducer(TransactionalProducer, Protocol):
    """A producer that takes over an id by compare-and-set, so that several claimants may use one id (rule F5)."""

    def wanted_timeout_ms(self, *, timeout: Limit) -> int:
        """The transaction timeout that the id must have at its coordinator; 2147483647 for two-phase commit.

        If the user has not set one, the first call reads the maximum from a broker.

        Raises:
            BrokerUnavailableError: No broker responded within the time limit.
        """
        ...

    def creation(self, *, timeout: Limit) -> NewProducerId:
        """How the id is to be registered; see `created`.

        Raises:
            BrokerUnavailableError: As for `wanted_timeout_ms`.
            ConfigurationError: The brokers can't be used.
        """
        ...

    def created(self, answer: InitProducerIdResult, *, timeout: Limit) -> bool:
        """Continue with the answer to `TransactionCoordinator.create_all`.

        Returns:
            False if the coordinator knew the id already, or has not answered: this producer must not register it again.

        Raises:
            BrokerError: Another answer.
        """
        ...

    def adopt(self, producer_id: int, epoch: int, *, timeout_ms: int) -> None:
        """Continue with the producer id and epoch from the EndTxn v5 response that bumped the previous owners' epoch.

        After this call and before anything is sent, the caller must check that it still owns the claim.
        """
        ...


class Producers(Protocol):
    """Makes the producers of a writer: a ProducerFactory, or one that is chosen when Kafka answers for the first time."""

    @property
    def kind(self) -> ProducerKind:
        """As of the ProducerFactory. Raises BrokerUnavailableError if it is not chosen yet."""
        ...

    def __call__(self, kafka_transactional_id: str) -> TransactionalProducer:
        """A new producer. Raises as `kind`."""
        ...

    def choose(self, *, timeout: Limit) -> None:
        """Ask Kafka which producers it supports, unless this cluster has answered before.

        Raises: as `choose_producer`.
        """
        ...


@dataclass(frozen=True, slots=True)
class ProducerFactory:
    """Makes the producers of a writer: TakeOverProducers, if the kind takes over ids.

    Args:
        kind: The kind of the producers; each generation of an id is used by one kind only.
        make: Makes the producer for a Kafka transactional id.
        lanes: How many ids a writer uses by default.
    """

    kind: ProducerKind
    make: Callable[[str], TransactionalProducer]
    lanes: int = 1

    def __call__(self, kafka_transactional_id: str) -> TransactionalProducer:
        """A new producer."""
        return self.make(kafka_transactional_id)

    def choose(self, *, timeout: Limit) -> None:
        """Nothing to do: see `Producers`."""


@dataclass(frozen=True, slots=True)
class EndTxnResult:
    """The coordinator's response to an EndTxn: only the code 0 (NONE) proves the requested outcome.

    With EndTxn v5, producer id and epoch are those for the next transaction; else -1.
    """

    code: int
    name: str
    producer_id: int = -1
    epoch: int = -1

    @property
    def proven(self) -> bool:
        """Whether the response proves that the transaction has the requested outcome."""
        return self.code == 0


@dataclass(frozen=True, slots=True)
class EndingTransaction:
    """A transaction that is to be ended.

    Args:
        kafka_transactional_id: The id.
        producer_id: The producer.
        epoch: Its epoch.
        commit: Whether to commit or to abort.
        partitions: Those in its description whose leaders are to be checked before the first request is sent (rule FB).
        described_at: When it was described, by `time.monotonic`. Unless that was just now, it is described again.
    """

    kafka_transactional_id: str
    producer_id: int
    epoch: int
    commit: bool
    partitions: frozenset[tuple[str, int]] = frozenset()
    described_at: float = -math.inf


@dataclass(frozen=True, slots=True)
class InitProducerIdResult(EndTxnResult):
    """The response to an InitProducerId: producer id and epoch to produce with, and those of a prepared transaction, or -1."""

    ongoing_producer_id: int = -1
    ongoing_epoch: int = -1


@dataclass(frozen=True, slots=True)
class NewProducerId:
    """An id that is to be registered. Its coordinator did not know it just now, and nobody else registers it (rule NG)."""

    kafka_transactional_id: str
    timeout_ms: int
    two_phase: bool


@dataclass(frozen=True, slots=True)
class ListedTransaction:
    """One entry of ListTransactions (KIP-664)."""

    kafka_transactional_id: str
    producer_id: int
    status: TransactionStatus


class TransactionCoordinator(Protocol):
    """The requests that recovery sends to Kafka; each one names the transaction it is about. Thread-safe.

    After a coordinator move, a lost connection or CONCURRENT_TRANSACTIONS the same request is retried within the time limit;
    every other response is returned to the caller, who describes the transaction and decides again (rule F3).

    `timeout` is a deadline or a number of seconds for the whole call: name lookup, connecting, TLS, login, finding the
    coordinator, retries, and waiting for other threads' calls. None means the coordinator's own limit.

    Raises (all methods): BrokerUnavailableError, BrokerAuthorizationError.
    """

    def knows_end_by_epoch(self, *, timeout: Limit | None = None) -> bool:
        """Whether EndTxn v5 is supported (transaction.version 2): idempotent by (producerId, epoch), fences old clients."""
        ...

    def cluster_id(self, *, timeout: Limit | None = None) -> str:
        """Kafka's `cluster.id`, as a broker reports it now (Metadata); empty if the brokers have none.

        Raises:
            ClusterMismatchError: It is another one than that of the first connection.
        """
        ...

    def forget_cluster(self) -> None:
        """Close the connections, so that the next one decides which cluster this is: the first one may have been the wrong one.

        Not while anything relies on what this cluster has answered.
        """
        ...

    def describe(self, kafka_transactional_id: str, *, timeout: Limit | None = None) -> TransactionDescription | None:
        """DescribeTransactions; None if the coordinator does not know the id."""
        ...

    def describe_all(
        self, kafka_transactional_ids: Sequence[str], *, timeout: Limit | None = None
    ) -> dict[str, TransactionDescription | None]:
        """`describe` for several ids, in one request to each coordinator."""
        ...

    def end_all(self, endings: Sequence[EndingTransaction], *, timeout: Limit | None = None) -> list[EndTxnResult]:
        """`end_transaction` for several ids, side by side."""
        ...

    def create_all(self, new: Sequence[NewProducerId], *, timeout: Limit | None = None) -> list[InitProducerIdResult]:
        """Register unknown ids (InitProducerId), side by side, with one request for each that has an effect (rule NG).

        The request names a producer id that no producer has: Apache Kafka then leaves a known id unchanged, PRODUCER_FENCED.
        That is not a part of the protocol. A broker that answers that there is no such producer gets the plain request, if it
        still does not know the id; and one that ignores the producer id has taken the first request for a plain one. The plain
        request would end a transaction of a known id, hence the rule: also, NETWORK_EXCEPTION is returned for an id without an
        answer, since the request, if it were sent again, might arrive twice.
        """
        ...

    def end_transaction(
        self, kafka_transactional_id: str, *, producer_id: int, epoch: int, commit: bool, timeout: Limit | None = None
    ) -> EndTxnResult:
        """EndTxn (v5 if supported, else v4); waits until every partition of the transaction has a leader (rule FB)."""
        ...

    def init_producer_id(self, kafka_transactional_id: str, *, timeout: Limit | None = None) -> EndTxnResult:
        """The unconditional InitProducerId: aborts an ongoing transaction and bumps the epoch.

        Only for a generation that no live writer can own: on brokers without EndTxn v5 (rules FA and O2).
        Here CONCURRENT_TRANSACTIONS is returned to the caller, who must check the abort that the request started (rule F7).
        """
        ...

    def fate(self, state: PreparedTxnState, place: Place, *, timeout: Limit | None = None) -> Fate:
        """How the transaction that wrote the first message at `place` ended, according to the partition's log.

        For a transaction that the coordinator no longer knows. Requires Read on the topic.
        """
        ...

    def find_messages(self, state: PreparedTxnState, delivery: Delivery, *, timeout: Limit | None = None) -> FoundMessages:
        """Where the messages of an aborted transaction still are in the log, and which ones can't be read any more.

        Reads the log from the first offset of each place to the transaction's ABORT marker, and checks that every message is
        there: the number of messages at each place, the producer's sequence numbers, the records and the checksum of each
        batch. Where only the number of messages in a topic is known (`Place.in_topic`), all partitions of the topic are
        searched. Keeps no message in memory. Requires Read on the topics; without it, their messages are missing.

        The transaction must have ended, and no later one may have the same producer id and epoch.

        Args:
            state: The transaction.
            delivery: Its acknowledged messages.
            timeout: A number of seconds limits the time without progress, since reading millions of messages takes longer; a
                deadline limits the whole call.

        Raises:
            MessagesCommittedError: The log shows that the transaction was committed.
            MissingDependencyError: The messages are compressed, and the package that decompresses them is not installed.
            BrokerUnavailableError: No progress within the time limit: for example, a partition has no leader, or does not have
                the transaction's marker yet.
        """
        ...

    def find_later(self, state: PreparedTxnState, delivery: Delivery, *, timeout: Limit) -> tuple[int, Delivery | None]:
        """What a transaction's producer has committed after it, in the partitions of that transaction.

        Returns:
            How many transactions there are at least, and where their messages are; as far as the log shows that in the time.
        """
        ...

    def read_messages(
        self, state: PreparedTxnState, found: FoundMessages, *, timeout: Limit | None = None
    ) -> Iterator[Message]:
        """Read the messages that `find_messages` has found, partition by partition in the order of their offsets.

        Key, value, headers, partition and timestamp are as they were written; in a topic with LogAppendTime, the timestamp is
        that of the broker. Everything is checked again while it is read: what was returned before an error must not be
        committed. Keeps one response of a broker in memory, about 1 MiB or one batch.

        Args:
            state: The transaction.
            found: What `find_messages` has returned; if it is not complete, only what was found is read.
            timeout: Limits the time of each wait without progress; of a deadline, the seconds that are left when reading
                begins. The time that the caller takes between two messages does not count.

        Raises (while the messages are iterated):
            MessagesChangedError: Something differs from `found`: messages were deleted, or a topic was created again.
            MessagesCommittedError: The log shows that the transaction was committed.
            MissingDependencyError, BrokerUnavailableError: As for `find_messages`.
        """
        ...

    def committed_positions(
        self, group_id: str, partitions: Iterable[tuple[str, int]], *, timeout: Limit | None = None
    ) -> dict[tuple[str, int], int]:
        """The offset of the next message that a consumer group reads in each partition; only where it has committed one.

        Offsets in a transaction that is still open are waited for (KIP-447). Requires Describe on the group.
        """
        ...

    def list_transactions(self, prefix: str = "", *, timeout: Limit | None = None) -> Iterable[ListedTransaction]:
        """ListTransactions on every broker: the ids that start with `prefix`."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...
