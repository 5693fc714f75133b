"""The transaction coordinator as recovery uses it: requests that name their transaction, over our own connections."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from dualwrite.deadline import Deadline, Limit
from dualwrite.kafka.base import (
    EndingTransaction,
    EndTxnResult,
    InitProducerIdResult,
    ListedTransaction,
    Message,
    NewProducerId,
)
from dualwrite.kafka.client.broker_connection import Connection, ConnectionLostError, Inbox
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.descriptions import check_leaders, described
from dualwrite.kafka.client.group_positions import committed_positions
from dualwrite.kafka.client.ids_together import (
    END_BY_EPOCH,
    FOREIGN_PRODUCER_ID,
    INIT_PLAIN,
    INIT_TWO_PHASE,
    created_together,
    described_together,
    ended_together,
)
from dualwrite.kafka.client.kafka_errors import ErrorCode, error_name, status_of, timeout_refused, two_phase_refused
from dualwrite.kafka.client.log_fetch import LogNotReadableError
from dualwrite.kafka.client.log_messages import find_messages, read_messages
from dualwrite.kafka.client.log_proof import fate_in_log
from dualwrite.kafka.client.log_reader import LogReader
from dualwrite.kafka.client.messages_generated import (
    DescribeConfigsRequest,
    EndTxnRequest,
    EndTxnResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
    ListTransactionsRequest,
)
from dualwrite.kafka.client.retries import RetryingClient, TryAgainError, check_response, check_retriable
from dualwrite.state import Delivery, Fate, FoundMessages, Place, PreparedTxnState, TransactionDescription

_END_PLAIN: Final = 3  # of Kafka 3.0; v4 (3.8) only allows one more error code
_BROKER_RESOURCE: Final = 4
_JUST_NOW: Final = 1.0  # seconds
_ANY_TIMEOUT_MS: Final = 60_000


@dataclass(frozen=True, slots=True)
class RequestedCommit:
    """An EndTxn(commit) that was sent on a connection, and its response once it has arrived in the inbox."""

    connection: Connection
    inbox: Inbox


class WireTransactionCoordinator:
    """TransactionCoordinator over our own blocking connections; see the Protocol for the contract.

    `timeout` is in seconds, for one call including retries, unless the call has its own limit.
    """

    def __init__(self, config: KafkaConfig, *, timeout: float = 60.0) -> None:
        self._client = RetryingClient(config, timeout)
        self.network = self._client.network
        self._ends_by_epoch: bool | None = None
        self._max_timeout: tuple[int | None, float] | None = None  # and when it was read

    def knows_end_by_epoch(self, *, timeout: Limit | None = None) -> bool:
        """Whether transaction.version 2 is finalized (KIP-890): then EndTxn v5 is idempotent by (producerId, epoch)."""
        if self._ends_by_epoch is None:

            def request(deadline: Deadline) -> bool:
                broker = self.network.any_broker(deadline)
                return broker.features.get("transaction.version", 0) >= 2 and broker.supports(  # noqa: PLR2004
                    EndTxnRequest, END_BY_EPOCH
                )

            self._ends_by_epoch = self._client.repeated(request, "ApiVersions", timeout)
        return self._ends_by_epoch

    def cluster_id(self, *, timeout: Limit | None = None) -> str:
        return self._client.repeated(self.network.cluster_id, "any broker", timeout)

    def describe(self, kafka_transactional_id: str, *, timeout: Limit | None = None) -> TransactionDescription | None:
        """DescribeTransactions (KIP-664)."""
        return self._client.to_coordinator(
            kafka_transactional_id,
            lambda coordinator, deadline: described(coordinator, kafka_transactional_id, deadline),
            timeout,
        )

    def describe_all(
        self, kafka_transactional_ids: Sequence[str], *, timeout: Limit | None = None
    ) -> dict[str, TransactionDescription | None]:
        """An id that gets no conclusive answer at first is described alone."""
        limit = self._client.limit(timeout)
        ids = list(dict.fromkeys(kafka_transactional_ids))
        found: dict[str, TransactionDescription | None] = {}
        if len(ids) > 1:
            found = self._client.repeated(lambda d: described_together(self.network, ids, d), "the coordinators", limit)
        return {name: found[name] if name in found else self.describe(name, timeout=limit) for name in ids}

    def end_all(self, endings: Sequence[EndingTransaction], *, timeout: Limit | None = None) -> list[EndTxnResult]:
        """A transaction whose request gets no conclusive answer at first is ended alone."""
        limit = self._client.limit(timeout)
        found: dict[str, EndTxnResponse] = {}
        if self.knows_end_by_epoch(timeout=limit):  # then the same request may be sent again
            found = self._client.repeated(lambda d: ended_together(self.network, endings, d), "the coordinators", limit)

        def result(ending: EndingTransaction) -> EndTxnResult:
            name = ending.kafka_transactional_id
            if name in found:
                return _end_txn_result(found[name])
            return self.end_transaction(
                name, producer_id=ending.producer_id, epoch=ending.epoch, commit=ending.commit, timeout=limit
            )

        return [result(ending) for ending in endings]

    def end_transaction(
        self,
        kafka_transactional_id: str,
        *,
        producer_id: int,
        epoch: int,
        commit: bool,
        timeout: Limit | None = None,
        just_written: bool = False,
    ) -> EndTxnResult:
        """EndTxn; retries the same request while markers are written (CONCURRENT_TRANSACTIONS) or if the connection breaks.

        Waits until every partition of the transaction has a leader (rule FB). `just_written` says that each of them has
        acknowledged a write very recently: then the first request is sent without checking the leaders.
        """
        limit = self._client.limit(timeout)
        version = END_BY_EPOCH if self.knows_end_by_epoch(timeout=limit) else _END_PLAIN
        request = EndTxnRequest(kafka_transactional_id, producer_id, epoch, commit, version=version)

        def end(coordinator: Connection, deadline: Deadline) -> EndTxnResult:
            nonlocal just_written
            self._check_end(coordinator, request, deadline, just_written=just_written)
            just_written = False
            response = coordinator.call(request, deadline)
            if response.error_code == ErrorCode.CONCURRENT_TRANSACTIONS:
                raise TryAgainError("EndTxn returned CONCURRENT_TRANSACTIONS: markers are being written")
            if response.error_code:
                check_retriable(response.error_code, kafka_transactional_id, "EndTxn", "Write")
            return _end_txn_result(response)

        return self._client.to_coordinator(kafka_transactional_id, end, limit)

    def request_commit(
        self,
        kafka_transactional_id: str,
        *,
        producer_id: int,
        epoch: int,
        timeout: Limit | None = None,
        just_written: bool = False,
    ) -> RequestedCommit:
        """Send the request of `end_transaction` without waiting for its response, which `requested_commit` reads.

        Only on brokers with EndTxn v5, where the same request can be sent again at any time (KIP-890).

        Raises:
            BrokerUnavailableError: It could not be sent; or it was sent, and the connection broke.
        """
        request = EndTxnRequest(kafka_transactional_id, producer_id, epoch, committed=True, version=END_BY_EPOCH)

        def send(coordinator: Connection, deadline: Deadline) -> RequestedCommit:
            nonlocal just_written
            self._check_end(coordinator, request, deadline, just_written=just_written)
            just_written = False
            inbox: Inbox = []
            coordinator.send(request, inbox, deadline)
            return RequestedCommit(coordinator, inbox)

        return self._client.to_coordinator(kafka_transactional_id, send, timeout)

    def requested_commit(self, requested: RequestedCommit, *, timeout: Limit | None = None) -> EndTxnResult | None:
        """Wait for the response to `request_commit`. None: there is none, since the connection broke or the limit has passed.

        After any response that does not prove the outcome, and without one, `end_transaction` finds out.
        """

        def read(deadline: Deadline) -> EndTxnResult | None:
            try:
                while not requested.inbox:
                    if deadline.expired:
                        return None
                    requested.connection.receive(deadline.left)
            except ConnectionLostError:
                if not requested.inbox:
                    return None
            return _end_txn_result(requested.inbox[0][1])

        return self._client.repeated(read, "the coordinator", timeout)

    def _check_end(self, coordinator: Connection, request: EndTxnRequest, deadline: Deadline, *, just_written: bool) -> None:
        """Check the leaders, unless everything was written just now, and that the coordinator knows the request's version."""
        if not just_written:
            check_leaders(coordinator, request.transactional_id, deadline)
        if not coordinator.supports(EndTxnRequest, request.version or 0):  # the new coordinator of a cluster being upgraded
            self._ends_by_epoch = None
            raise TryAgainError(f"{coordinator.address} does not support EndTxn v{request.version}")

    def wait_for_leaders(self, kafka_transactional_id: str, *, timeout: Limit | None = None) -> None:
        """Wait until every partition of the id's ongoing transaction has a leader (rule FB)."""
        self._client.to_coordinator(
            kafka_transactional_id,
            lambda coordinator, deadline: check_leaders(coordinator, kafka_transactional_id, deadline),
            timeout,
        )

    def init_producer_id(
        self,
        kafka_transactional_id: str,
        *,
        timeout_ms: int = _ANY_TIMEOUT_MS,
        two_phase: bool = False,
        keep_prepared: bool = False,
        producer_id: int = -1,
        epoch: int = -1,
        timeout: Limit | None = None,
    ) -> InitProducerIdResult:
        """InitProducerId: v6 if two-phase commit is requested; unconditional without `producer_id`, else a compare-and-set.

        Transient errors are retried. Every other response is returned to the caller: CONCURRENT_TRANSACTIONS, too, and
        UNSUPPORTED_VERSION if the broker does not support `keep_prepared`.

        Raises:
            TwoPhaseCommitRefusedError: `two_phase` is set, and the broker or its ACLs do not allow it.
            TransactionTimeoutRefusedError: `timeout_ms` exceeds the broker's maximum.
            BrokerUnavailableError, BrokerAuthorizationError: As for all methods.
        """
        needs_v6 = two_phase or keep_prepared

        def request(coordinator: Connection, deadline: Deadline) -> InitProducerIdResult:
            if needs_v6 and not coordinator.supports(InitProducerIdRequest, INIT_TWO_PHASE):
                if two_phase:
                    raise two_phase_refused(kafka_transactional_id, "the broker does not support InitProducerId v6")
                return InitProducerIdResult(ErrorCode.UNSUPPORTED_VERSION, ErrorCode.UNSUPPORTED_VERSION.name)
            if producer_id < 0 and not keep_prepared:  # it aborts an ongoing transaction
                check_leaders(coordinator, kafka_transactional_id, deadline)
            asked = InitProducerIdRequest(
                version=INIT_TWO_PHASE if needs_v6 else min(INIT_PLAIN, coordinator.version_of(InitProducerIdRequest)),
                transactional_id=kafka_transactional_id,
                transaction_timeout_ms=timeout_ms,
                producer_id=producer_id,
                producer_epoch=epoch,
                enable2_pc=two_phase,
                keep_prepared_txn=keep_prepared,
            )
            response = coordinator.call(asked, deadline)
            code = response.error_code
            if two_phase and code == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
                raise two_phase_refused(kafka_transactional_id, error_name(code), code)
            if code == ErrorCode.INVALID_TRANSACTION_TIMEOUT:
                raise timeout_refused(kafka_transactional_id, timeout_ms, code)
            check_retriable(code, kafka_transactional_id, "InitProducerId", "Write")
            return _init_result(response, is_v6=needs_v6)

        return self._client.to_coordinator(kafka_transactional_id, request, timeout)

    def raise_epoch(
        self, kafka_transactional_id: str, *, producer_id: int, epoch: int, timeout: Limit | None = None
    ) -> InitProducerIdResult:
        """Fence a producer without an open transaction: InitProducerId as compare-and-set on its epoch (KIP-360)."""
        return self.init_producer_id(kafka_transactional_id, producer_id=producer_id, epoch=epoch, timeout=timeout)

    def create_producer_id(
        self, kafka_transactional_id: str, *, timeout_ms: int, two_phase: bool, timeout: Limit | None = None
    ) -> InitProducerIdResult:
        """InitProducerId that creates an unknown id, and leaves a known one unchanged: PRODUCER_FENCED (measured).

        It carries a producer id that no producer has, which the coordinator compares with the id's current one.
        """
        return self.init_producer_id(
            kafka_transactional_id,
            timeout_ms=timeout_ms,
            two_phase=two_phase,
            producer_id=FOREIGN_PRODUCER_ID,
            epoch=0,
            timeout=timeout,
        )

    def create_all(self, new: Sequence[NewProducerId], *, timeout: Limit | None = None) -> list[InitProducerIdResult]:
        """An id whose request gets no conclusive answer at first is created alone."""
        limit = self._client.limit(timeout)
        found: dict[str, InitProducerIdResponse] = {}
        if len(new) > 1:
            found = self._client.repeated(lambda d: created_together(self.network, new, d), "the coordinators", limit)

        def result(each: NewProducerId) -> InitProducerIdResult:
            name = each.kafka_transactional_id
            if name in found:
                return _init_result(found[name], is_v6=each.two_phase)
            return self.create_producer_id(name, timeout_ms=each.timeout_ms, two_phase=each.two_phase, timeout=limit)

        return [result(each) for each in new]

    def fate(self, state: PreparedTxnState, place: Place, *, timeout: Limit | None = None) -> Fate:
        """How the transaction that wrote to `place` ended, according to the log; see `log_proof.fate_in_log`."""

        def request(deadline: Deadline) -> Fate:
            try:
                return fate_in_log(self.network, state, place, deadline)
            except LogNotReadableError as error:
                raise TryAgainError(str(error)) from error

        return self._client.repeated(request, f"the leader of {place.topic}-{place.partition}", timeout)

    def find_messages(self, state: PreparedTxnState, delivery: Delivery, *, timeout: Limit | None = None) -> FoundMessages:
        return find_messages(LogReader(self._client, timeout), state, delivery)

    def read_messages(
        self, state: PreparedTxnState, found: FoundMessages, *, timeout: Limit | None = None
    ) -> Iterator[Message]:
        seconds = timeout.left if isinstance(timeout, Deadline) else timeout
        return read_messages(LogReader(self._client, seconds), state, found)

    def committed_positions(
        self, group_id: str, partitions: Iterable[tuple[str, int]], *, timeout: Limit | None = None
    ) -> dict[tuple[str, int], int]:
        return committed_positions(self._client, group_id, partitions, timeout)

    def list_transactions(self, prefix: str = "", *, timeout: Limit | None = None) -> list[ListedTransaction]:
        """ListTransactions on every broker (KIP-664), sorted by id."""

        def request(deadline: Deadline) -> list[ListedTransaction]:
            found = []
            for address in self.network.brokers(deadline).values():
                response = self.network.connection(address, deadline).call(ListTransactionsRequest(), deadline)
                check_response(response.error_code, None, "ListTransactions", "Describe")
                found += [
                    ListedTransaction(t.transactional_id, t.producer_id, status_of(t.transaction_state, t.transactional_id))
                    for t in response.transaction_states
                    if t.transactional_id.startswith(prefix)
                ]
            return sorted(found, key=lambda t: t.kafka_transactional_id)

        return self._client.repeated(request, "ListTransactions", timeout)

    def transaction_max_timeout_ms(self, *, timeout: Limit | None = None) -> int | None:
        """The broker's `transaction.max.timeout.ms`, or None if the principal may not read it.

        An answer is returned again for a second: the lanes of a writer, which open together, all ask for it.
        """
        if self._max_timeout is not None and time.monotonic() - self._max_timeout[1] < _JUST_NOW:
            return self._max_timeout[0]
        name = "transaction.max.timeout.ms"

        def request(deadline: Deadline) -> int | None:
            resource = DescribeConfigsRequest.DescribeConfigsResource
            node, address = next(iter(self.network.brokers(deadline).items()))
            response = self.network.connection(address, deadline).call(
                DescribeConfigsRequest(
                    resources=[resource(resource_type=_BROKER_RESOURCE, resource_name=str(node), configuration_keys=[name])],
                    include_synonyms=False,
                    include_documentation=False,
                ),
                deadline,
            )
            values = [c.value for r in response.results if not r.error_code for c in r.configs if c.name == name]
            return int(values[0]) if values and values[0] is not None else None

        found = self._client.repeated(request, "DescribeConfigs", timeout)
        self._max_timeout = found, time.monotonic()
        return found

    def close(self) -> None:
        """Close the connections."""
        self.network.close()


def _end_txn_result(response: EndTxnResponse) -> EndTxnResult:
    name = error_name(response.error_code)
    return EndTxnResult(response.error_code, name, response.producer_id, response.producer_epoch)


def _init_result(response: InitProducerIdResponse, *, is_v6: bool) -> InitProducerIdResult:
    return InitProducerIdResult(
        code=response.error_code,
        name=error_name(response.error_code),
        producer_id=response.producer_id,
        epoch=response.producer_epoch,
        ongoing_producer_id=response.ongoing_txn_producer_id if is_v6 else -1,
        ongoing_epoch=response.ongoing_txn_producer_epoch if is_v6 else -1,
    )
