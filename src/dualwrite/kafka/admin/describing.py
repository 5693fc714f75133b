"""Transactional ids as their coordinators describe them (KIP-664, DescribeTransactions), in batches for each coordinator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from dualwrite.errors import BrokerError, BrokerUnavailableError, DualWriteError, UnknownTransactionStateError
from dualwrite.kafka.admin.brokers import PAUSE, TRANSIENT, Brokers, batches
from dualwrite.kafka.admin.facts import DescribedTransaction
from dualwrite.kafka.admin.permissions import DENIED, denied
from dualwrite.kafka.client.cluster import CoordinatorUnavailableError
from dualwrite.kafka.client.config import Address
from dualwrite.kafka.client.descriptions import description_of
from dualwrite.kafka.client.error_codes import ErrorCode, error_name
from dualwrite.kafka.client.messages_generated import DescribeTransactionsRequest, DescribeTransactionsResponse
from dualwrite.kafka.client.retry import rounds


def describe_transactions(brokers: Callable[[], Brokers], ids: Iterable[str]) -> Iterator[DescribedTransaction]:
    """Describe ids, in their order, with at most one batch of results in memory.

    Args:
        brokers: Called for each batch; returns the brokers, with the time limit of the batch.
        ids: The ids, as Kafka sees them.

    Raises:
        BrokerUnavailableError, BrokerAuthorizationError: As for `Brokers.view`.
    """
    for batch in batches(ids):
        found = _Batch(brokers(), batch).described()
        yield from (found[name] for name in batch)


class _Batch:
    """The ids of one batch, until each is described or has failed."""

    def __init__(self, brokers: Brokers, ids: Sequence[str]) -> None:
        self._brokers = brokers
        self._waiting = list(dict.fromkeys(ids))
        self._found: dict[str, DescribedTransaction] = {}
        self._reasons: dict[str, tuple[int | None, str]] = {}  # why an id is requested again

    def described(self) -> dict[str, DescribedTransaction]:
        for _ in rounds(self._brokers.turn(), pause=PAUSE):
            self._send_requests()
            self._waiting = [name for name in self._waiting if name not in self._found]
            if not self._waiting:
                break
        for name in self._waiting:
            node, reason = self._reasons.get(name, (None, "no response"))
            self._found[name] = DescribedTransaction(name, node, None, self._unanswered(name, reason))
        return self._found

    def _send_requests(self) -> None:
        by_node: dict[int, list[str]] = defaultdict(list)
        addresses: dict[int, Address] = {}
        for name, where in self._brokers.located(self._waiting).items():
            if isinstance(where, CoordinatorUnavailableError):
                self._not_located(name, where)
                continue
            node, addresses[node] = where
            if self._brokers.is_silent(node):
                self._finish(name, node, self._unanswered(name, f"broker {node} does not respond"))
            else:
                by_node[node].append(name)
        requests = {node: lambda _, names=names: _request(names) for node, names in by_node.items()}
        responses = self._brokers.request(addresses, requests, lambda _, response: response.transaction_states)
        for node, states in responses.items():
            for state in states:
                self._add(node, state)
        for node in by_node.keys() - responses.keys():
            self._reasons |= dict.fromkeys(by_node[node], (node, f"broker {node} does not respond"))

    def _not_located(self, name: str, error: CoordinatorUnavailableError) -> None:
        if error.code in DENIED:
            self._finish(name, None, denied("FindCoordinator", int(error.code or 0), name))
        else:
            self._reasons[name] = (None, str(error))

    def _add(self, node: int, state: DescribeTransactionsResponse.TransactionState) -> None:
        name, code = state.transactional_id, state.error_code
        if code in TRANSIENT:
            self._reasons[name] = (node, f"DescribeTransactions returned {error_name(code)}")
        elif code in DENIED:
            self._finish(name, node, denied("DescribeTransactions", code, name))
        elif code not in (ErrorCode.NONE, ErrorCode.TRANSACTIONAL_ID_NOT_FOUND):
            what = f"DescribeTransactions returned {error_name(code)}."
            self._finish(name, node, BrokerError(what, transactional_id=name, code=code, name=error_name(code)))
        else:
            try:
                description = None if code else description_of(state)
            except UnknownTransactionStateError as error:
                self._finish(name, node, error)
            else:
                self._found[name] = DescribedTransaction(name, node, description)

    def _finish(self, name: str, node: int | None, problem: DualWriteError) -> None:
        self._found[name] = DescribedTransaction(name, node, None, problem)

    def _unanswered(self, name: str, reason: str) -> BrokerUnavailableError:
        return BrokerUnavailableError(
            f"The transaction's coordinator did not respond: {reason}.",
            transactional_id=name,
            cause="its broker is down, overloaded, or unreachable from here",
            next_step="retry once the broker is back, or another has taken over",
            servers=self._brokers.network.config.servers,
        )


def _request(names: list[str]) -> DescribeTransactionsRequest:
    return DescribeTransactionsRequest(transactional_ids=names)
