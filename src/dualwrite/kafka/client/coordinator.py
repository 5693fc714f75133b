"""The transaction coordinator as recovery uses it: requests that name their transaction, over our own connections."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

from kafka.protocol.admin import DescribeConfigsRequest, DescribeTransactionsRequest, ListTransactionsRequest
from kafka.protocol.metadata import MetadataRequest
from kafka.protocol.producer import InitProducerIdRequest

from dualwrite.deadline import Deadline, Limit
from dualwrite.delivery import Fate, Place
from dualwrite.errors import (
    BrokerError,
    BrokerUnavailableError,
)
from dualwrite.kafka.base import EndTxnAnswer, InitProducerIdAnswer, ListedTransaction
from dualwrite.kafka.client.cluster import CoordinatorUnavailableError, Network
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.connection import Connection
from dualwrite.kafka.client.error_codes import ErrorCode, error_name
from dualwrite.kafka.client.errors import TIMEOUT_REFUSED
from dualwrite.kafka.client.hot_messages import EndTxn, EndTxnReply
from dualwrite.kafka.client.log_proof import LogNotReadableError, fate_in_log
from dualwrite.kafka.client.refusals import forbidden, status_of, two_phase_refused
from dualwrite.kafka.client.retry import repeated
from dualwrite.kafka.client.sockets import ConnectionLostError
from dualwrite.state import PreparedTxnState, TransactionDescription, TransactionStatus

log = logging.getLogger(__name__)

CONCURRENT_TRANSACTIONS: Final = ErrorCode.CONCURRENT_TRANSACTIONS
INVALID_TXN_STATE: Final = ErrorCode.INVALID_TXN_STATE

_MOVED: Final = (ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.NOT_COORDINATOR)
_TRANSIENT_CODES: Final = (ErrorCode.REQUEST_TIMED_OUT, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, *_MOVED)
_FORBIDDEN: Final = (ErrorCode.CLUSTER_AUTHORIZATION_FAILED, ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
_END_PLAIN: Final = 4
_INIT_PLAIN: Final = 4
_BROKER_RESOURCE: Final = 4
_INIT_TWO_PHASE: Final = 6
_ANY_TIMEOUT_MS: Final = 60_000
_NAMED: Final = 5  # partitions listed in an error
FOREIGN_PRODUCER_ID: Final = 2**63 - 2  # brokers allocate ids in blocks, starting from 0
_PAUSE: Final = 0.01


_T = TypeVar("_T")


class _TryAgainError(Exception):
    """A transient error: retry."""


class _NoLeaderError(_TryAgainError):
    """A partition of the transaction has no leader that could write the marker."""


class _MovedError(Exception):
    """The id has moved to another coordinator."""


_TRANSIENT: Final = (_TryAgainError, _MovedError, ConnectionLostError, CoordinatorUnavailableError, BrokerUnavailableError)


class WireTransactionCoordinator:
    """TransactionCoordinator over our own blocking connections; see the Protocol for the contract.

    Args:
        config: The cluster's settings.
        timeout: Seconds that one call may take, including retries, unless the call has its own limit.
    """

    def __init__(self, config: KafkaConfig, *, timeout: float = 60.0) -> None:
        self.network = Network(config)
        self._timeout = timeout
        self._lock = threading.RLock()  # only its owner can release it, which matters after KeyboardInterrupt
        self._ends_by_epoch: bool | None = None

    @property
    def ends_by_epoch(self) -> bool:
        """Whether transaction.version 2 is finalised (KIP-890): then EndTxn v5 is idempotent by (producerId, epoch)."""
        return self.knows_end_by_epoch()

    def knows_end_by_epoch(self, *, timeout: Limit | None = None) -> bool:
        """See TransactionCoordinator."""
        if self._ends_by_epoch is None:

            def ask(deadline: Deadline) -> bool:
                broker = self.network.any_broker(deadline)
                return broker.features.get("transaction.version", 0) >= 2 and broker.supports(  # noqa: PLR2004
                    EndTxn, EndTxn.BY_EPOCH
                )

            self._ends_by_epoch = self._repeated(ask, "ApiVersions", timeout)
        return self._ends_by_epoch

    def cluster_id(self, *, timeout: Limit | None = None) -> str:
        """See TransactionCoordinator; a Metadata request to any broker."""
        return self._repeated(self.network.cluster_id, "any broker", timeout)

    def describe(self, kafka_transactional_id: str, *, timeout: Limit | None = None) -> TransactionDescription | None:
        """DescribeTransactions (KIP-664)."""
        return self._ask_coordinator(
            kafka_transactional_id,
            lambda coordinator, deadline: self._described(coordinator, kafka_transactional_id, deadline),
            timeout,
        )

    def end_transaction(
        self,
        kafka_transactional_id: str,
        *,
        producer_id: int,
        epoch: int,
        commit: bool,
        timeout: Limit | None = None,
        just_written: bool = False,
    ) -> EndTxnAnswer:
        """EndTxn; retries the same request while markers are written (CONCURRENT_TRANSACTIONS) or if the connection breaks.

        Waits until every partition of the transaction has a leader (rule FB).

        Args:
            kafka_transactional_id: The id.
            producer_id: The transaction's producer id.
            epoch: The transaction's epoch.
            commit: True to commit, False to abort.
            timeout: Seconds, including retries.
            just_written: Every partition of the transaction has acknowledged a write very recently: the first request is
                sent without checking the leaders.
        """
        limit = Deadline.of(self._timeout if timeout is None else timeout)
        version = EndTxn.BY_EPOCH if self.knows_end_by_epoch(timeout=limit) else _END_PLAIN
        trusted = just_written

        def ask(coordinator: Connection, deadline: Deadline) -> EndTxnAnswer:
            nonlocal trusted
            if not trusted:
                self._demand_leaders(coordinator, kafka_transactional_id, deadline)
            trusted = False
            if not coordinator.supports(EndTxn, version):  # the new coordinator of a cluster being upgraded
                self._ends_by_epoch = None
                raise _TryAgainError(f"{coordinator.address} does not support EndTxn v{version}")
            answer = coordinator.call(EndTxn(version, kafka_transactional_id, producer_id, epoch, commit), deadline)
            if answer.error_code == ErrorCode.CONCURRENT_TRANSACTIONS:
                raise _TryAgainError("EndTxn answered CONCURRENT_TRANSACTIONS: markers are being written")
            if answer.error_code:
                self._check_passing(answer.error_code, kafka_transactional_id, "EndTxn", "Write")
            return _answer(answer)

        return self._ask_coordinator(kafka_transactional_id, ask, limit)

    def wait_for_leaders(self, kafka_transactional_id: str, *, timeout: Limit | None = None) -> None:
        """Wait until every partition of the id's ongoing transaction has a leader (rule FB)."""
        self._ask_coordinator(
            kafka_transactional_id,
            lambda coordinator, deadline: self._demand_leaders(coordinator, kafka_transactional_id, deadline),
            timeout,
        )

    def init_producer_id(
        self,
        kafka_transactional_id: str,
        *,
        timeout_ms: int = _ANY_TIMEOUT_MS,
        two_phase: bool = False,
        keep_prepared: bool = False,
        timeout: Limit | None = None,
    ) -> InitProducerIdAnswer:
        """The unconditional InitProducerId; v6 if two-phase commit is requested. See `_init_producer_id` for errors.

        Returns CONCURRENT_TRANSACTIONS to the caller, and UNSUPPORTED_VERSION if the broker does not support `keep_prepared`.
        """
        return self._init_producer_id(
            kafka_transactional_id, timeout, timeout_ms=timeout_ms, two_phase=two_phase, keep_prepared=keep_prepared
        )

    def raise_epoch(
        self, kafka_transactional_id: str, *, producer_id: int, epoch: int, timeout: Limit | None = None
    ) -> InitProducerIdAnswer:
        """InitProducerId as compare-and-set on the epoch of a producer without an open transaction (KIP-360): it is fenced."""
        return self._init_producer_id(
            kafka_transactional_id, timeout, timeout_ms=_ANY_TIMEOUT_MS, two_phase=False, producer_id=producer_id, epoch=epoch
        )

    def create_producer_id(
        self, kafka_transactional_id: str, *, timeout_ms: int, two_phase: bool, timeout: Limit | None = None
    ) -> InitProducerIdAnswer:
        """InitProducerId that creates an unknown id, and leaves a known one unchanged: PRODUCER_FENCED (measured).

        It carries a producer id that no producer has, which the coordinator compares with the id's current one.
        """
        return self._init_producer_id(
            kafka_transactional_id,
            timeout,
            timeout_ms=timeout_ms,
            two_phase=two_phase,
            producer_id=FOREIGN_PRODUCER_ID,
            epoch=0,
        )

    def _init_producer_id(
        self,
        kafka_transactional_id: str,
        timeout: Limit | None,
        *,
        timeout_ms: int,
        two_phase: bool,
        keep_prepared: bool = False,
        producer_id: int = -1,
        epoch: int = -1,
    ) -> InitProducerIdAnswer:
        """InitProducerId; transient errors are retried, every other answer is returned to the caller.

        Raises:
            TwoPhaseCommitRefusedError: `two_phase` is set, and the broker or its ACLs do not allow it.
            TransactionTimeoutRefusedError: `timeout_ms` exceeds the broker's maximum.
            BrokerUnavailableError, BrokerAuthorizationError: As for all methods.
        """
        new = two_phase or keep_prepared

        def ask(coordinator: Connection, deadline: Deadline) -> InitProducerIdAnswer:
            if new and not coordinator.supports(InitProducerIdRequest, _INIT_TWO_PHASE):
                if two_phase:
                    raise two_phase_refused(kafka_transactional_id, "the broker does not support InitProducerId v6")
                return InitProducerIdAnswer(ErrorCode.UNSUPPORTED_VERSION, ErrorCode.UNSUPPORTED_VERSION.name)
            if producer_id < 0 and not keep_prepared:  # it aborts an ongoing transaction
                self._demand_leaders(coordinator, kafka_transactional_id, deadline)
            answer = coordinator.call(
                InitProducerIdRequest(
                    version=_INIT_TWO_PHASE if new else min(_INIT_PLAIN, coordinator.version_of(InitProducerIdRequest)),
                    transactional_id=kafka_transactional_id,
                    transaction_timeout_ms=timeout_ms,
                    producer_id=producer_id,
                    producer_epoch=epoch,
                    enable2_pc=two_phase,
                    keep_prepared_txn=keep_prepared,
                ),
                deadline,
            )
            code = answer.error_code
            if two_phase and code == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
                raise two_phase_refused(kafka_transactional_id, error_name(code), code)
            if code == ErrorCode.INVALID_TRANSACTION_TIMEOUT:
                raise TIMEOUT_REFUSED.error(
                    f"The broker refuses a transaction timeout of {timeout_ms} ms.",
                    transactional_id=kafka_transactional_id,
                    cause=TIMEOUT_REFUSED.cause,
                    next_step=TIMEOUT_REFUSED.next_step,
                    code=code,
                    name=error_name(code),
                )
            self._check_passing(code, kafka_transactional_id, "InitProducerId", "Write")
            return InitProducerIdAnswer(
                code=code,
                name=error_name(code),
                producer_id=answer.producer_id,
                epoch=answer.producer_epoch,
                ongoing_producer_id=getattr(answer, "ongoing_txn_producer_id", -1) if new else -1,
                ongoing_epoch=getattr(answer, "ongoing_txn_producer_epoch", -1) if new else -1,
            )

        return self._ask_coordinator(kafka_transactional_id, ask, timeout)

    def fate(self, state: PreparedTxnState, place: Place, *, timeout: Limit | None = None) -> Fate:
        """How the transaction that wrote to `place` ended, according to the log; see `log_proof.fate_in_log`."""

        def ask(deadline: Deadline) -> Fate:
            try:
                return fate_in_log(self.network, state, place, deadline)
            except LogNotReadableError as error:
                raise _TryAgainError(str(error)) from error

        return self._repeated(ask, f"the leader of {place.topic}-{place.partition}", timeout)

    def list_transactions(self, prefix: str = "", *, timeout: Limit | None = None) -> list[ListedTransaction]:
        """ListTransactions on every broker (KIP-664), sorted by id."""

        def ask(deadline: Deadline) -> list[ListedTransaction]:
            found = []
            for address in self.network.brokers(deadline).values():
                answer = self.network.connection(address, deadline).call(ListTransactionsRequest(), deadline)
                self._check(answer.error_code, None, "ListTransactions", "Describe")
                found += [
                    ListedTransaction(t.transactional_id, t.producer_id, status_of(t.transaction_state, t.transactional_id))
                    for t in answer.transaction_states
                    if t.transactional_id.startswith(prefix)
                ]
            return sorted(found, key=lambda t: t.kafka_transactional_id)

        return self._repeated(ask, "ListTransactions", timeout)

    def transaction_max_timeout_ms(self, *, timeout: Limit | None = None) -> int | None:
        """The broker's `transaction.max.timeout.ms`, or None if the principal may not read it."""
        name = "transaction.max.timeout.ms"

        def ask(deadline: Deadline) -> int | None:
            resource = DescribeConfigsRequest.DescribeConfigsResource
            node, address = next(iter(self.network.brokers(deadline).items()))
            answer = self.network.connection(address, deadline).call(
                DescribeConfigsRequest(
                    resources=[resource(resource_type=_BROKER_RESOURCE, resource_name=str(node), configuration_keys=[name])],
                    include_synonyms=False,
                    include_documentation=False,
                ),
                deadline,
            )
            values = [int(c.value) for r in answer.results if not r.error_code for c in r.configs if c.name == name]
            return values[0] if values else None

        return self._repeated(ask, "DescribeConfigs", timeout)

    def close(self) -> None:
        """Close the connections."""
        self.network.close()

    def _described(
        self, coordinator: Connection, kafka_transactional_id: str, deadline: Deadline
    ) -> TransactionDescription | None:
        request = DescribeTransactionsRequest(transactional_ids=[kafka_transactional_id])
        answer = coordinator.call(request, deadline).transaction_states[0]
        if answer.error_code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND:
            return None
        self._check(answer.error_code, kafka_transactional_id, "DescribeTransactions", "Describe")
        return description_of(answer)

    def _demand_leaders(self, coordinator: Connection, kafka_transactional_id: str, deadline: Deadline) -> None:
        """Check that every partition of an ongoing transaction has a leader (rule FB), in the coordinator's own metadata.

        Kafka 4.3.0 to 4.4.0 treats a partition without a leader as deleted, and completes a transaction whose marker was
        never written there (KAFKA-20734): its messages stay invisible until the next transaction's marker decides on them too.
        """
        described = self._described(coordinator, kafka_transactional_id, deadline)
        if described is None or described.status is not TransactionStatus.ONGOING or not described.partitions:
            return
        topics = [MetadataRequest.MetadataRequestTopic(name=name) for name in sorted({t for t, _ in described.partitions})]
        answer = coordinator.call(MetadataRequest(topics=topics, allow_auto_topic_creation=False), deadline)
        # For a topic that was deleted, or that the principal may not describe, there is nothing to wait for.
        leaderless = {
            (topic.name, partition.partition_index)
            for topic in answer.topics
            for partition in topic.partitions
            if partition.leader_id < 0 and partition.error_code in (ErrorCode.NONE, ErrorCode.LEADER_NOT_AVAILABLE)
        }
        if missing := sorted(leaderless & described.partitions):
            named = ", ".join(f"{topic}-{index}" for topic, index in missing[:_NAMED])
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            raise _NoLeaderError(f"{named}{more} has no leader to write the transaction's marker")

    # --- retries ------------------------------------------------------------------------------------------------------

    def _ask_coordinator(
        self,
        kafka_transactional_id: str,
        ask: Callable[[Connection, Deadline], _T],
        timeout: Limit | None = None,
    ) -> _T:
        def once(deadline: Deadline) -> _T:
            try:
                return ask(self.network.coordinator(kafka_transactional_id, deadline=deadline), deadline)
            except (ConnectionLostError, _MovedError):
                self.network.forget_coordinator(kafka_transactional_id)
                raise
            except CoordinatorUnavailableError as error:
                if error.code in _FORBIDDEN:
                    raise forbidden(error.code, kafka_transactional_id, "FindCoordinator", "Describe") from error
                raise

        return self._repeated(once, f"the coordinator of {kafka_transactional_id!r}", timeout)

    def _repeated(self, once: Callable[[Deadline], _T], what: str, timeout: Limit | None = None) -> _T:
        """Call until a conclusive answer or the deadline; waiting for other threads' calls counts against it."""
        deadline = Deadline.of(self._timeout if timeout is None else timeout)
        try:
            try:
                if not self._lock.acquire(timeout=deadline.left):
                    raise _TryAgainError("another thread is still using the connections")
                return repeated(lambda: once(deadline), _TRANSIENT, deadline, pause=_PAUSE)
            finally:
                with suppress(RuntimeError):  # not acquired: the time limit passed, or KeyboardInterrupt came first
                    self._lock.release()
        except BrokerUnavailableError:
            raise
        except _NoLeaderError as error:
            raise BrokerUnavailableError(
                f"The transaction could not be ended within {deadline.seconds:.3g} s by {what}: {error}.",
                cause="the brokers with the partition's replicas are down or still starting",
                next_step="start them and retry; prepared and open transactions stay as they are",
                servers=self.network.config.servers,
            ) from error
        except _TRANSIENT as error:
            raise BrokerUnavailableError(
                f"No answer from {what} at {self.network.config.servers} within {deadline.seconds:.3g} s: {error}.",
                cause="the broker is starting, overloaded, or unreachable at its advertised address",
                next_step="retry; prepared transactions stay prepared",
                servers=self.network.config.servers,
            ) from error

    def _check_passing(self, code: int, kafka_transactional_id: str, request: str, operation: str) -> None:
        """Raise transient and authorization errors; all others are left to the caller."""
        if code in _MOVED:
            raise _MovedError(f"{request} answered {error_name(code)}")
        if code in _TRANSIENT_CODES:
            raise _TryAgainError(f"{request} answered {error_name(code)}")
        if code in _FORBIDDEN:
            raise forbidden(code, kafka_transactional_id, request, operation)

    def _check(self, code: int, kafka_transactional_id: str | None, request: str, operation: str) -> None:
        """Raise any error."""
        self._check_passing(code, kafka_transactional_id or "", request, operation)
        if code:
            raise BrokerError(
                f"{request} answered {error_name(code)} ({code}).",
                transactional_id=kafka_transactional_id,
                code=code,
                name=error_name(code),
            )


def description_of(answer: Any) -> TransactionDescription:
    """One id's part of an answer to DescribeTransactions.

    Raises:
        UnknownTransactionStateError: This release does not know the state.
    """
    return TransactionDescription(
        status=status_of(answer.transaction_state, answer.transactional_id),
        producer_id=answer.producer_id,
        epoch=answer.producer_epoch,
        timeout_ms=answer.transaction_timeout_ms,
        start_time_ms=answer.transaction_start_time_ms,
        partitions=frozenset((t.topic, p) for t in answer.topics for p in t.partitions),
    )


def _answer(answer: EndTxnReply) -> EndTxnAnswer:
    return EndTxnAnswer(answer.error_code, error_name(answer.error_code), answer.producer_id, answer.producer_epoch)
