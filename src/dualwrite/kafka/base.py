"""The contracts of Kafka's side: a transactional producer, and what recovery asks of a transaction coordinator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from dualwrite.deadline import Limit
from dualwrite.delivery import Delivery, Fate, Place
from dualwrite.kafka.offsets import ConsumedOffset, GroupMetadata
from dualwrite.producer_kind import ProducerKind
from dualwrite.state import PreparedTxnState, TransactionDescription, TransactionStatus

if TYPE_CHECKING:
    import pyarrow as pa

Headers = Mapping[str, str | bytes | None] | Sequence[tuple[str, str | bytes | None]]


@runtime_checkable
class TransactionalProducer(Protocol):
    """A producer for one Kafka transactional id, with the method names of KIP-939 in snake case.

    One thread at a time. Errors of the client library arrive as the BrokerError that fits, `raise … from` the original.
    """

    @property
    def transaction_timeout(self) -> float | None:
        """Seconds after which the broker aborts a transaction; None under two-phase commit, and before the id is taken."""
        ...

    @property
    def kafka_transactional_id(self) -> str:
        """The transactional id that Kafka sees."""
        ...

    @property
    def must_be_replaced(self) -> bool:
        """Whether this session must not begin another transaction (rule F9).

        It was fenced, a delivery failed, or an EndTxn had to be sent again, so that a late duplicate may be under way.
        """
        ...

    def init_transactions(self, *, timeout: float) -> PreparedTxnState | None:
        """Register the id at its coordinator and fence earlier holders of it (InitProducerId). Waits `timeout` s at most.

        Returns:
            A prepared transaction of the id that was kept, where the producer can do that and was asked to; else None.

        Raises:
            BrokerUnavailableError: No coordinator answered in time.
            BrokerAuthorizationError: The principal may not use the id.
            ConfigurationError: The broker refuses the transaction timeout.
        """
        ...

    def begin_transaction(self) -> None:
        """Begin a transaction; no request is sent before the first message."""
        ...

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
        """Hand one message over; it is sent in the background. `timestamp` is in milliseconds since 1970.

        Raises:
            InvalidMessageError: Wrong type or range; nothing was sent, the transaction can go on.
            UnknownTopicError: The topic does not exist and is not created by itself.
            MessageTooLargeError: The message is above the producer's own limit.
            DeliveryError: The queue stayed full, or an earlier message of the transaction has failed already.
        """
        ...

    def send_many(
        self,
        topic: str,
        values: Iterable[bytes | str | None],
        *,
        keys: Iterable[bytes | str | None] | None = None,
        partition: int | None = None,
        timestamp: int | None = None,
    ) -> None:
        """Hand many messages over, as `send` would one after another; all have the timestamp of the call unless one is given.

        How many were handed over before one that can't be taken, or before an error of the iterable's own, is left open.

        Raises: as `send`, and InvalidMessageError where there are not as many keys as values.
        """
        ...

    def send_offsets_to_transaction(self, offsets: Iterable[ConsumedOffset], group: GroupMetadata, *, timeout: float) -> None:
        """Make a consumer's positions part of the transaction (KIP-447); no offsets, nothing is done.

        Raises:
            ProducerFencedError: Of the group: the consumer's generation is over, so that its partitions are somebody else's.
            BrokerAuthorizationError: The principal may not read with the group.
            BrokerUnavailableError: The group's coordinator did not answer in time.
        """
        ...

    def prepare_transaction(self, *, timeout: float) -> PreparedTxnState | None:
        """Flush, see that every message is acknowledged, and name the transaction. None where nothing was sent.

        After it only commit and abort are allowed.

        Raises:
            DeliveryError: A message was not stored (UnknownTopicError, MessageTooLargeError where that is the reason).
            PrepareError: The broker does not hold the transaction as ours and ongoing.
            TransactionTimeoutError: Too little of the transaction's timeout is left.
        """
        ...

    @property
    def delivery(self) -> Delivery | None:
        """Where the messages of the transaction that was prepared last lie, as the brokers acknowledged them.

        None before `prepare_transaction` has returned, and where the transaction has no message.
        """
        ...

    def check_time_left(self) -> None:
        """See that enough of the transaction's timeout is left to commit the database now; a look at the clock, no I/O.

        Raises:
            TransactionTimeoutError: It is not. Without two-phase commit the broker may abort the transaction soon.
        """
        ...

    def commit_transaction(self, *, timeout: float) -> None:
        """Commit; returning means that the coordinator has answered NONE, which is proof.

        Raises:
            ProducerFencedError: The transaction was ended by somebody else; describe to learn how.
            BrokerUnavailableError: No proof in time; the transaction may be committed or ongoing.
        """
        ...

    def abort_transaction(self, *, timeout: float) -> None:
        """Abort; messages not yet sent are dropped. Raises as `commit_transaction`."""
        ...

    def close(self) -> None:
        """Drop what is queued and release everything. Ends no transaction at the coordinator."""
        ...


@runtime_checkable
class ColumnProducer(Protocol):
    """What a producer may offer beside TransactionalProducer: messages by column."""

    def send_columns(self, topic: str, values: pa.Array, *, keys: pa.Array | None = None, partition: int | None = None) -> None:
        """Hand many messages over, as `send_many` would, from Arrow arrays of binary; a null value is a tombstone.

        Raises: as `send_many`.
        """
        ...


class TakeOverProducer(TransactionalProducer, Protocol):
    """A producer that takes an id over by compare-and-set, so that several claimants may use one id (rule F5)."""

    @property
    def wanted_timeout_ms(self) -> int:
        """The transaction timeout that the id must have at its coordinator; 2147483647 for two-phase commit."""
        ...

    def create(self, *, timeout: float) -> bool:
        """Register the id if its coordinator does not know it; False, and nothing is changed, where it does.

        Raises: as `init_transactions`.
        """
        ...

    def adopt(self, producer_id: int, epoch: int, *, timeout_ms: int) -> None:
        """Go on with what EndTxn v5 answered when the epoch of the id's earlier holders was raised.

        The caller sees that it still holds the claim, after this and before anything is sent.
        """
        ...


@dataclass(frozen=True, slots=True)
class ProducerFactory:
    """Makes the producers of a writer.

    Args:
        kind: What its producers are; a generation of an id is used by one kind only.
        make: Makes the producer for a Kafka transactional id; a TakeOverProducer where the kind takes over.
        lanes: How many ids a writer uses where its user does not say.
    """

    kind: ProducerKind
    make: Callable[[str], TransactionalProducer]
    lanes: int = 1

    def __call__(self, kafka_transactional_id: str) -> TransactionalProducer:
        """A new producer."""
        return self.make(kafka_transactional_id)


@dataclass(frozen=True, slots=True)
class EndTxnAnswer:
    """One answer to EndTxn.

    Args:
        code: Kafka's error code; 0 (NONE) is proof of the asked outcome, nothing else is.
        name: Kafka's name of the code.
        producer_id: The producer id for the next transaction (EndTxn v5), or -1.
        epoch: The epoch for the next transaction (EndTxn v5), or -1.
    """

    code: int
    name: str
    producer_id: int = -1
    epoch: int = -1

    @property
    def proven(self) -> bool:
        """Whether the transaction is now known to have the outcome that was asked for."""
        return self.code == 0


@dataclass(frozen=True, slots=True)
class InitProducerIdAnswer(EndTxnAnswer):
    """One answer to InitProducerId; `producer_id` and `epoch` are the ones to produce with.

    Args:
        ongoing_producer_id: The producer id of a prepared transaction that was kept (`keepPreparedTxn`), or -1.
        ongoing_epoch: Its epoch, or -1.
    """

    ongoing_producer_id: int = -1
    ongoing_epoch: int = -1


@dataclass(frozen=True, slots=True)
class ListedTransaction:
    """One entry of ListTransactions (KIP-664)."""

    kafka_transactional_id: str
    producer_id: int
    status: TransactionStatus


class TransactionCoordinator(Protocol):
    """What recovery asks of Kafka, by requests that name the transaction they mean. Safe to use from several threads.

    Moves of the coordinator, lost connections and CONCURRENT_TRANSACTIONS are waited out within the time limit, by the very
    same request; every other answer is given to the caller, who describes and decides again (rule F3).

    `timeout` is a deadline or seconds, for all of a call: name look-up, connecting, TLS, login, finding the coordinator,
    repetitions, and waiting for other threads' calls. None stands for the coordinator's own limit.

    Raises (all methods): BrokerUnavailableError, BrokerAuthorizationError.
    """

    @property
    def ends_by_epoch(self) -> bool:
        """Whether EndTxn v5 is there (transaction.version 2): idempotent by (producerId, epoch), and it fences old clients."""
        ...

    def cluster_id(self, *, timeout: Limit | None = None) -> str:
        """Kafka's `cluster.id`, as a broker answers it now (Metadata); empty where the brokers have none."""
        ...

    def describe(self, kafka_transactional_id: str, *, timeout: Limit | None = None) -> TransactionDescription | None:
        """DescribeTransactions; None where the coordinator does not know the id."""
        ...

    def end_transaction(
        self, kafka_transactional_id: str, *, producer_id: int, epoch: int, commit: bool, timeout: Limit | None = None
    ) -> EndTxnAnswer:
        """EndTxn, v5 where the broker has it, else v4; waits until each partition of the transaction has a leader (rule FB)."""
        ...

    def init_producer_id(self, kafka_transactional_id: str, *, timeout: Limit | None = None) -> EndTxnAnswer:
        """The unconditional InitProducerId: aborts what is ongoing and raises the epoch.

        Only for a generation that no live writer can hold: on brokers without EndTxn v5 (rules FA and O2).
        CONCURRENT_TRANSACTIONS is given to the caller here, since the abort that it began must be looked at (rule F7).
        """
        ...

    def fate(self, state: PreparedTxnState, place: Place, *, timeout: Limit | None = None) -> Fate:
        """How the transaction ended that wrote the first message at a place, by the log of its partition.

        For a transaction that the coordinator no longer knows. Needs the right to read the topic.
        """
        ...

    def list_transactions(self, prefix: str = "", *, timeout: Limit | None = None) -> Iterable[ListedTransaction]:
        """ListTransactions at every broker: the ids that begin with `prefix`."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...
