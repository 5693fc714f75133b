"""The transaction coordinator as recovery uses it: requests that name their transaction, over our own connections."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

from dualwrite.deadline import Deadline, Limit
from dualwrite.kafka.base import (
    EndingTransaction,
    EndTxnResult,
    InitProducerIdResult,
    ListedTransaction,
    Message,
    NewProducerId,
)
from dualwrite.kafka.client.broker_connection import Connection, ConnectionLostError
from dualwrite.kafka.client.config import Address, KafkaConfig
from dualwrite.kafka.client.kafka_errors import ErrorCode, error_name, status_of, timeout_refused, two_phase_refused
from dualwrite.kafka.client.log_messages import find_later, find_messages, read_messages
from dualwrite.kafka.client.log_proof import fate_in_log
from dualwrite.kafka.client.log_reader import Certain, LogReader, PartitionGoneError
from dualwrite.kafka.client.messages_generated import (
    EndTxnRequest,
    EndTxnResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
    ListTransactionsRequest,
)
from dualwrite.kafka.client.requests import (
    BROKER_RESOURCE,
    END_BY_EPOCH,
    FOREIGN_PRODUCER_ID,
    INIT_TWO_PHASE,
    committed_positions,
    described,
    init_request,
    leaderless,
    settings_in,
    settings_request,
)
from dualwrite.kafka.client.retries import RetryingClient, TryAgainError, answers, check_response, check_retriable
from dualwrite.state import Delivery, Fate, FoundMessages, Place, PreparedTxnState, TransactionDescription, TransactionStatus

T = TypeVar("T")

_END_PLAIN: Final = 3  # EndTxn of Kafka 3.0; v4 (3.8) only allows one more error code
_JUST_NOW: Final = 1.0  # seconds
_ANY_TIMEOUT_MS: Final = 60_000

_JUST: Final = 1.0
"""Seconds after which a description no longer shows which partitions a transaction has (rule FB); it is described again.

A prepared transaction gets no more partitions; one that is to be aborted may, from an owner that was paused.
"""

NO_SUCH_PRODUCER: Final = (ErrorCode.INVALID_PRODUCER_ID_MAPPING, ErrorCode.UNKNOWN_PRODUCER_ID)
_KNOWN: Final = InitProducerIdResult(ErrorCode.PRODUCER_FENCED, ErrorCode.PRODUCER_FENCED.name)
_NO_ANSWER: Final = InitProducerIdResult(ErrorCode.NETWORK_EXCEPTION, ErrorCode.NETWORK_EXCEPTION.name)


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

    def forget_cluster(self) -> None:
        self._client.forget_cluster()
        self._ends_by_epoch = self._max_timeout = None

    def describe(self, kafka_transactional_id: str, *, timeout: Limit | None = None) -> TransactionDescription | None:
        return self.describe_all([kafka_transactional_id], timeout=timeout)[kafka_transactional_id]

    def describe_all(
        self, kafka_transactional_ids: Iterable[str], *, timeout: Limit | None = None
    ) -> dict[str, TransactionDescription | None]:
        """DescribeTransactions (KIP-664)."""
        return self._client.of_each(kafka_transactional_ids, partial(described, self.network), timeout)

    def end_transaction(
        self, kafka_transactional_id: str, *, producer_id: int, epoch: int, commit: bool, timeout: Limit | None = None
    ) -> EndTxnResult:
        return self.end_all([EndingTransaction(kafka_transactional_id, producer_id, epoch, commit)], timeout=timeout)[0]

    def end_all(self, endings: Sequence[EndingTransaction], *, timeout: Limit | None = None) -> list[EndTxnResult]:
        """EndTxn; sends the same requests again while markers are written (CONCURRENT_TRANSACTIONS) or if connections break."""
        limit = self._client.limit(timeout)
        version = END_BY_EPOCH if self.knows_end_by_epoch(timeout=limit) else _END_PLAIN
        requests = {each.kafka_transactional_id: partial(self._end_request, each, version) for each in endings}

        def send(addresses: Mapping[str, Address], deadline: Deadline) -> dict[str, EndTxnResult | Exception]:
            return answers(self.network, requests, _end_result, addresses, deadline)

        found = self._once_led(endings, send, limit)
        return [found[each.kafka_transactional_id] for each in endings]

    def wait_for_leaders(self, kafka_transactional_id: str, *, timeout: Limit | None = None) -> None:
        """Wait until every partition of the id's ongoing transaction has a leader (rule FB)."""
        ending = EndingTransaction(kafka_transactional_id, -1, -1, commit=False)
        self._once_led([ending], lambda addresses, _: dict.fromkeys(addresses), timeout)

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
        new = NewProducerId(kafka_transactional_id, timeout_ms, two_phase)
        found = self._init_all([new], timeout, producer_id=producer_id, epoch=epoch, keep_prepared=keep_prepared)
        return found[kafka_transactional_id]

    def create_all(self, new: Sequence[NewProducerId], *, timeout: Limit | None = None) -> list[InitProducerIdResult]:
        """InitProducerId with a producer id that no producer has, or else without one; see the Protocol for why."""
        limit = self._client.limit(timeout)
        found = self._init_all(new, limit, producer_id=FOREIGN_PRODUCER_ID, epoch=0, only_once=True)
        refused = [name for name, answer in found.items() if answer.code in NO_SUCH_PRODUCER]
        if refused:
            known = self.describe_all(refused, timeout=limit)
            unknown = [each for each in new if known.get(each.kafka_transactional_id, _KNOWN) is None]
            found |= dict.fromkeys(refused, _KNOWN)
            found |= self._init_all(unknown, limit, producer_id=-1, epoch=-1, only_once=True)
        return [found[each.kafka_transactional_id] for each in new]

    def _init_all(
        self,
        new: Sequence[NewProducerId],
        timeout: Limit | None,
        *,
        producer_id: int,
        epoch: int,
        keep_prepared: bool = False,
        only_once: bool = False,
    ) -> dict[str, InitProducerIdResult]:
        by_id = {each.kafka_transactional_id: each for each in new}

        def make(each: NewProducerId, coordinator: Connection) -> InitProducerIdRequest | None:
            has_two_phase = coordinator.supports(InitProducerIdRequest, INIT_TWO_PHASE)
            if each.two_phase and not has_two_phase:
                raise two_phase_refused(each.kafka_transactional_id, "the broker does not support InitProducerId v6")
            if keep_prepared and not has_two_phase:
                return None
            return init_request(each, producer_id, epoch, keep_prepared=keep_prepared)

        requests = {name: partial(make, each) for name, each in by_id.items()}

        def send(addresses: Mapping[str, Address], deadline: Deadline) -> dict[str, InitProducerIdResult | Exception]:
            aborts = producer_id < 0 and not keep_prepared and not only_once
            failed = self._without_leaders(addresses, {}, deadline) if aborts else {}
            read = lambda name, found: _init_result(by_id[name], found)  # noqa: E731
            ready = {name: address for name, address in addresses.items() if name not in failed}
            found = answers(self.network, requests, read, ready, deadline)
            if only_once:
                for name, answer in found.items():
                    if isinstance(answer, ConnectionLostError) and not answer.is_throttled:
                        self.network.forget_coordinator(name)
                        found[name] = _NO_ANSWER
            return failed | found

        return self._client.of_each(by_id, send, timeout)

    def fate(self, state: PreparedTxnState, place: Place, *, timeout: Limit | None = None) -> Fate:
        """How the transaction that wrote to `place` ended, according to the log; see `log_proof.fate_in_log`."""
        certain = Certain()

        def request(deadline: Deadline) -> Fate:
            with certain:
                return fate_in_log(self.network, state, place, deadline)

        try:
            return self._client.repeated(request, f"the leader of {place.topic}-{place.partition}", timeout)
        except PartitionGoneError:
            return Fate.GONE

    def find_messages(self, state: PreparedTxnState, delivery: Delivery, *, timeout: Limit | None = None) -> FoundMessages:
        return find_messages(LogReader(self._client, timeout), state, delivery)

    def find_later(self, state: PreparedTxnState, delivery: Delivery, *, timeout: Limit) -> tuple[int, Delivery | None]:
        return find_later(LogReader(self._client, timeout), state, delivery)

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
            node, address = next(iter(self.network.brokers(deadline).items()))
            asked = settings_request(BROKER_RESOURCE, [str(node)], [name])
            found = settings_in(self.network.connection(address, deadline).call(asked, deadline)).get(str(node), {})
            return int(found[name]) if name in found else None

        found = self._client.repeated(request, "DescribeConfigs", timeout)
        self._max_timeout = found, time.monotonic()
        return found

    def close(self) -> None:
        """Close the connections."""
        self.network.close()

    # --- parts ------------------------------------------------------------------------------------------------------------

    def _once_led(
        self,
        endings: Iterable[EndingTransaction],
        send: Callable[[Mapping[str, Address], Deadline], Mapping[str, T | Exception]],
        timeout: Limit | None,
    ) -> dict[str, T]:
        """What `send` returns for each transaction, once every one of its partitions has a leader (rule FB).

        Its description counts for the first attempt, if it is fresh; each other attempt describes the transaction again.
        """
        untried = {each.kafka_transactional_id: each for each in endings}

        def ask(addresses: Mapping[str, Address], deadline: Deadline) -> dict[str, T | Exception]:
            now = time.monotonic()
            fresh: dict[str, frozenset[tuple[str, int]]] = {}
            for name in addresses:
                each = untried.pop(name, None)
                if each is not None and now - each.described_at < _JUST:
                    fresh[name] = each.partitions
            failed = self._without_leaders(addresses, fresh, deadline)
            ready = {name: at for name, at in addresses.items() if name not in failed} if failed else addresses
            return {**failed, **send(ready, deadline)}

        return self._client.of_each(untried, ask, timeout)

    def _without_leaders(
        self, addresses: Mapping[str, Address], fresh: Mapping[str, frozenset[tuple[str, int]]], deadline: Deadline
    ) -> dict[str, Exception]:
        """Why ids can't be asked to end their transactions now: a partition has no leader, or who has one is not known.

        The partitions of an id that is not in `fresh` are those of the transaction that is ongoing now.
        """
        partitions, failed = dict(fresh), dict[str, Exception]()
        if len(fresh) < len(addresses):
            others = {name: at for name, at in addresses.items() if name not in fresh}
            for name, each in described(self.network, others, deadline).items():
                if isinstance(each, Exception):
                    failed[name] = each
                elif each is not None and each.status is TransactionStatus.ONGOING:
                    partitions[name] = each.partitions
        if not any(partitions.values()):
            return failed
        return failed | leaderless(self.network, partitions, addresses, deadline)

    def _end_request(self, ending: EndingTransaction, version: int, coordinator: Connection) -> EndTxnRequest:
        if not coordinator.supports(EndTxnRequest, version):  # the new coordinator of a cluster being upgraded
            self._ends_by_epoch = None
            raise ConnectionLostError(coordinator.address, f"the broker does not support EndTxn v{version}")
        return EndTxnRequest(ending.kafka_transactional_id, ending.producer_id, ending.epoch, ending.commit, version=version)


def _end_result(kafka_transactional_id: str, response: EndTxnResponse) -> EndTxnResult:
    if response.error_code == ErrorCode.CONCURRENT_TRANSACTIONS:
        raise TryAgainError("EndTxn returned CONCURRENT_TRANSACTIONS: markers are being written")
    check_retriable(response.error_code, kafka_transactional_id, "EndTxn", "Write")
    return _end_txn_result(response)


def _end_txn_result(response: EndTxnResponse) -> EndTxnResult:
    name = error_name(response.error_code)
    return EndTxnResult(response.error_code, name, response.producer_id, response.producer_epoch)


def _init_result(new: NewProducerId, response: InitProducerIdResponse | None) -> InitProducerIdResult:
    """The result; without a response the broker does not support `keepPreparedTxn`."""
    if response is None:
        return InitProducerIdResult(ErrorCode.UNSUPPORTED_VERSION, ErrorCode.UNSUPPORTED_VERSION.name)
    code = response.error_code
    if new.two_phase and code == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
        raise two_phase_refused(new.kafka_transactional_id, error_name(code), code)
    if code == ErrorCode.INVALID_TRANSACTION_TIMEOUT:
        raise timeout_refused(new.kafka_transactional_id, new.timeout_ms, code)
    check_retriable(code, new.kafka_transactional_id, "InitProducerId", "Write")
    return InitProducerIdResult(
        code=code,
        name=error_name(code),
        producer_id=response.producer_id,
        epoch=response.producer_epoch,
        ongoing_producer_id=response.ongoing_txn_producer_id,
        ongoing_epoch=response.ongoing_txn_producer_epoch,
    )
