"""The transaction coordinator as recovery uses it: requests that name the transaction they mean, over our own connections."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from kafka.protocol.admin import DescribeConfigsRequest, DescribeTransactionsRequest, ListTransactionsRequest
from kafka.protocol.producer import EndTxnRequest, InitProducerIdRequest
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential, wait_random

from dualwrite.errors import BrokerAuthorizationError, BrokerError, BrokerUnavailableError
from dualwrite.kafka.base import EndTxnAnswer, ListedTransaction
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.network import CoordinatorUnavailableError, Network
from dualwrite.kafka.wire import Connection, ConnectionLostError, kafka_error_name
from dualwrite.state import TransactionDescription, TransactionStatus

log = logging.getLogger(__name__)

REQUEST_TIMED_OUT: Final = 7
COORDINATOR_LOAD_IN_PROGRESS: Final = 14
COORDINATOR_NOT_AVAILABLE: Final = 15
NOT_COORDINATOR: Final = 16
CLUSTER_AUTHORIZATION_FAILED: Final = 31
CONCURRENT_TRANSACTIONS: Final = 51
INVALID_TXN_STATE: Final = 48
TRANSACTIONAL_ID_AUTHORIZATION_FAILED: Final = 53
TRANSACTIONAL_ID_NOT_FOUND: Final = 105
INVALID_TRANSACTION_TIMEOUT: Final = 50

_MOVED: Final = (COORDINATOR_NOT_AVAILABLE, NOT_COORDINATOR)
_PASSING: Final = (REQUEST_TIMED_OUT, COORDINATOR_LOAD_IN_PROGRESS, *_MOVED)
_FORBIDDEN: Final = (CLUSTER_AUTHORIZATION_FAILED, TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
_END_BY_EPOCH: Final = 5
_END_PLAIN: Final = 4
_INIT_PLAIN: Final = 4
_BROKER_RESOURCE: Final = 4
_ANY_TIMEOUT_MS: Final = 60_000
_WAIT: Final = wait_exponential(multiplier=0.01, max=1.0) + wait_random(0, 0.01)


_T = TypeVar("_T")


class _TryAgainError(Exception):
    """An answer that passes by itself."""


class _MovedError(Exception):
    """The id has another coordinator by now."""


class WireTransactionCoordinator:
    """TransactionCoordinator over blocking connections of our own; see the Protocol for the contract.

    Args:
        config: The cluster's settings.
        timeout: Seconds that one call may take, with all its repetitions.
    """

    def __init__(self, config: KafkaConfig, *, timeout: float = 60.0) -> None:
        self._network = Network(config)
        self._timeout = timeout
        self._lock = threading.Lock()
        self._ends_by_epoch: bool | None = None

    @property
    def ends_by_epoch(self) -> bool:
        """Whether transaction.version 2 is finalised (KIP-890): then EndTxn v5 is idempotent by (producerId, epoch)."""
        if self._ends_by_epoch is None:

            def ask() -> bool:
                broker = self._network.any_broker()
                return broker.features.get("transaction.version", 0) >= 2 and broker.supports(  # noqa: PLR2004
                    EndTxnRequest, _END_BY_EPOCH
                )

            with self._lock:
                self._ends_by_epoch = self._repeated(ask, "ApiVersions")
        return self._ends_by_epoch

    def describe(self, kafka_transactional_id: str) -> TransactionDescription | None:
        """DescribeTransactions (KIP-664)."""

        def ask(coordinator: Connection) -> TransactionDescription | None:
            request = DescribeTransactionsRequest(transactional_ids=[kafka_transactional_id])
            answer = coordinator.call(request).transaction_states[0]
            if answer.error_code == TRANSACTIONAL_ID_NOT_FOUND:
                return None
            self._check(answer.error_code, kafka_transactional_id, "DescribeTransactions", "Describe")
            return TransactionDescription(
                status=TransactionStatus(answer.transaction_state),
                producer_id=answer.producer_id,
                epoch=answer.producer_epoch,
                timeout_ms=answer.transaction_timeout_ms,
                start_time_ms=answer.transaction_start_time_ms,
                partitions=frozenset((t.topic, p) for t in answer.topics for p in t.partitions),
            )

        return self._ask_coordinator(kafka_transactional_id, ask)

    def end_transaction(self, kafka_transactional_id: str, *, producer_id: int, epoch: int, commit: bool) -> EndTxnAnswer:
        """EndTxn; the same request again while markers are written (CONCURRENT_TRANSACTIONS) or the connection breaks."""
        version = _END_BY_EPOCH if self.ends_by_epoch else _END_PLAIN

        def ask(coordinator: Connection) -> EndTxnAnswer:
            if not coordinator.supports(EndTxnRequest, version):  # the new coordinator of a cluster being upgraded
                self._ends_by_epoch = None
                raise _TryAgainError(f"{coordinator.address} does not know EndTxn v{version}")
            answer = coordinator.call(
                EndTxnRequest(
                    version=min(version, coordinator.version_of(EndTxnRequest)),
                    transactional_id=kafka_transactional_id,
                    producer_id=producer_id,
                    producer_epoch=epoch,
                    committed=commit,
                )
            )
            if answer.error_code == CONCURRENT_TRANSACTIONS:
                raise _TryAgainError("EndTxn answered CONCURRENT_TRANSACTIONS: markers are being written")
            self._check_passing(answer.error_code, kafka_transactional_id, "EndTxn", "Write")
            return _answer(answer)

        return self._ask_coordinator(kafka_transactional_id, ask)

    def init_producer_id(self, kafka_transactional_id: str) -> EndTxnAnswer:
        """InitProducerId v4 or older, unconditional; CONCURRENT_TRANSACTIONS is given to the caller."""

        def ask(coordinator: Connection) -> EndTxnAnswer:
            answer = coordinator.call(
                InitProducerIdRequest(
                    version=min(_INIT_PLAIN, coordinator.version_of(InitProducerIdRequest)),
                    transactional_id=kafka_transactional_id,
                    transaction_timeout_ms=_ANY_TIMEOUT_MS,
                    producer_id=-1,
                    producer_epoch=-1,
                )
            )
            self._check_passing(answer.error_code, kafka_transactional_id, "InitProducerId", "Write")
            return _answer(answer)

        return self._ask_coordinator(kafka_transactional_id, ask)

    def list_transactions(self, prefix: str = "") -> list[ListedTransaction]:
        """ListTransactions at every broker (KIP-664), sorted by id."""

        def ask() -> list[ListedTransaction]:
            found = []
            for address in self._network.brokers().values():
                answer = self._network.connection(address).call(ListTransactionsRequest())
                self._check(answer.error_code, None, "ListTransactions", "Describe")
                found += [
                    ListedTransaction(t.transactional_id, t.producer_id, TransactionStatus(t.transaction_state))
                    for t in answer.transaction_states
                    if t.transactional_id.startswith(prefix)
                ]
            return sorted(found, key=lambda t: t.kafka_transactional_id)

        with self._lock:
            return self._repeated(ask, "ListTransactions")

    def transaction_max_timeout_ms(self) -> int | None:
        """The broker's `transaction.max.timeout.ms`, or None where the principal may not see it."""
        name = "transaction.max.timeout.ms"

        def ask() -> int | None:
            resource = DescribeConfigsRequest.DescribeConfigsResource
            node, address = next(iter(self._network.brokers().items()))
            answer = self._network.connection(address).call(
                DescribeConfigsRequest(
                    resources=[resource(resource_type=_BROKER_RESOURCE, resource_name=str(node), configuration_keys=[name])],
                    include_synonyms=False,
                    include_documentation=False,
                )
            )
            values = [int(c.value) for r in answer.results if not r.error_code for c in r.configs if c.name == name]
            return values[0] if values else None

        with self._lock:
            return self._repeated(ask, "DescribeConfigs")

    def close(self) -> None:
        """Close the connections."""
        self._network.close()

    # --- asking again -------------------------------------------------------------------------------------------------

    def _ask_coordinator(self, kafka_transactional_id: str, ask: Callable[[Connection], _T]) -> _T:
        def once() -> _T:
            try:
                return ask(self._network.coordinator(kafka_transactional_id))
            except (ConnectionLostError, _MovedError):
                self._network.forget_coordinator(kafka_transactional_id)
                raise

        with self._lock:
            return self._repeated(once, f"the coordinator of {kafka_transactional_id!r}")

    def _repeated(self, once: Callable[[], _T], what: str) -> _T:
        """Call until an answer that says something, or the time is over."""
        passing = (_TryAgainError, _MovedError, ConnectionLostError, CoordinatorUnavailableError, BrokerUnavailableError)
        deadline = time.monotonic() + self._timeout
        try:
            return once()  # tenacity costs 60 µs, and describe stands on the path of every transaction
        except passing as error:
            log.debug("%s: %s; asking again", what, error)
        try:
            stop = stop_after_delay(max(deadline - time.monotonic(), 0))
            return Retrying(retry=retry_if_exception_type(passing), stop=stop, wait=_WAIT, reraise=True)(once)
        except BrokerUnavailableError:
            raise
        except passing as error:
            raise BrokerUnavailableError(
                f"No answer from {what} at {self._network.config.servers} within {self._timeout:g} s: {error}.",
                cause="the broker is starting, is overloaded, or can't be reached at the address that it advertises",
                next_step="try again; what is prepared stays prepared",
                servers=self._network.config.servers,
            ) from error

    def _check_passing(self, code: int, kafka_transactional_id: str, request: str, operation: str) -> None:
        """Raise what passes or is forbidden; other errors are the caller's to decide on."""
        if code in _MOVED:
            raise _MovedError(f"{request} answered {kafka_error_name(code)}")
        if code in _PASSING:
            raise _TryAgainError(f"{request} answered {kafka_error_name(code)}")
        if code in _FORBIDDEN:
            raise BrokerAuthorizationError(
                f"Kafka refuses {request}: {kafka_error_name(code)}.",
                transactional_id=kafka_transactional_id,
                next_step=f"grant the principal {operation} and Describe on the transactional ids that begin with "
                "this one (a prefixed ACL: dualwrite appends '#' and a number)",
                code=code,
                name=kafka_error_name(code),
            )

    def _check(self, code: int, kafka_transactional_id: str | None, request: str, operation: str) -> None:
        """Raise any error."""
        self._check_passing(code, kafka_transactional_id or "", request, operation)
        if code:
            raise BrokerError(
                f"{request} answered {kafka_error_name(code)} ({code}).",
                transactional_id=kafka_transactional_id,
                code=code,
                name=kafka_error_name(code),
            )


def _answer(answer: Any) -> EndTxnAnswer:
    return EndTxnAnswer(
        code=answer.error_code,
        name=kafka_error_name(answer.error_code),
        producer_id=getattr(answer, "producer_id", -1),
        epoch=getattr(answer, "producer_epoch", -1),
    )
