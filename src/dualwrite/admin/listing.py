"""Transactional ids as their coordinators describe them (KIP-664, DescribeTransactions), in batches for each coordinator."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import uuid4

from dualwrite.admin.facts import RUNNING, DescribedTransaction, TransactionListing
from dualwrite.admin.requests import DENIED, PAUSE, TRANSIENT, Brokers, batches, check, denied
from dualwrite.deadline import Deadline
from dualwrite.errors import (
    BrokerAuthorizationError,
    BrokerError,
    BrokerUnavailableError,
    DualWriteError,
    UnknownTransactionStateError,
)
from dualwrite.kafka.client.broker_connection import Connection
from dualwrite.kafka.client.brokers import CoordinatorUnavailableError, MakeRequest, Network
from dualwrite.kafka.client.config import Address, KafkaConfig
from dualwrite.kafka.client.descriptions import description_of
from dualwrite.kafka.client.kafka_errors import ErrorCode, error_name
from dualwrite.kafka.client.messages_generated import (
    DescribeClusterRequest,
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    DescribeGroupsRequest,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    InitProducerIdRequest,
    ListTransactionsRequest,
    ListTransactionsResponse,
)
from dualwrite.kafka.client.retries import rounds
from dualwrite.kafka.inspect import (
    BROKER_RESOURCE,
    INIT_PRODUCER_ID,
    TRANSACTION_STATE_TOPIC,
    TWO_PHASE_SETTING,
    settings_in,
    settings_request,
)
from dualwrite.state import TransactionStatus


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
        requests = {node: lambda _, names=names: _describe(names) for node, names in by_node.items()}
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


def _describe(names: list[str]) -> DescribeTransactionsRequest:
    return DescribeTransactionsRequest(transactional_ids=names)


_BY_DURATION: Final = 1  # from this version of ListTransactions on: Apache Kafka 3.8
_BY_PATTERN: Final = 2  # Apache Kafka 4.1
_SAME_IN_RE2: Final = re.compile(r"(?:[^\\{(\[]|\\[^\w\s]|\{(?=\d)|\((?!\?)|\(\?:|\[(?![\[:]|\^\[))*", re.ASCII)
"""A pattern that means the same in RE2J, which brokers use: without classes such as `\\w` (ASCII there), and without `{,3}`."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which transactions to list: those that meet every condition. A condition that is empty or None is not checked.

    Args:
        states: The states.
        producer_ids: The current producer ids.
        pattern: The whole id matches this regular expression.
        running_longer_than_ms: A transaction is open and has been for longer than this.
    """

    states: frozenset[TransactionStatus] = frozenset()
    producer_ids: frozenset[int] = frozenset()
    pattern: re.Pattern[str] | None = None
    running_longer_than_ms: int | None = None

    @property
    def requested_states(self) -> frozenset[TransactionStatus]:
        """The states to request: only a transaction that has not ended can have been open for long."""
        if self.running_longer_than_ms is None:
            return self.states
        return (self.states or RUNNING) & RUNNING

    @property
    def is_contradiction(self) -> bool:
        """Whether nothing can meet it: a duration is given, but in none of the chosen states is a transaction open."""
        return self.running_longer_than_ms is not None and not self.requested_states

    def has(self, listing: TransactionListing) -> bool:
        """Whether a listing meets the conditions that can be checked without its start time."""
        states = {state.value for state in self.requested_states}
        return (
            (not states or listing.state in states)
            and (not self.producer_ids or listing.producer_id in self.producer_ids)
            and (self.pattern is None or self.pattern.fullmatch(listing.transactional_id) is not None)
        )

    @property
    def requested_pattern(self) -> str | None:
        """The pattern to request; None if a broker could understand it differently, and leave out ids that match."""
        if self.pattern is None or not _SAME_IN_RE2.fullmatch(self.pattern.pattern):
            return None
        return self.pattern.pattern


@dataclass(slots=True)
class Listed:
    """What the coordinators listed.

    Attributes:
        found: The listings that meet the filter, except that the duration of those in `undated` was not checked.
        undated: The ids from brokers that can't filter by duration; their start times must be looked up.
    """

    found: list[TransactionListing] = field(default_factory=list)
    undated: set[str] = field(default_factory=set)


def list_transactions(brokers: Brokers, wanted: Filter, coordinators: Mapping[int, Address] | None = None) -> Listed:
    """List the transactions of every broker, or of those given; a broker that does not respond is in `brokers.problems`.

    The pattern is checked here too, and sent only if it means the same to a broker: its dialect of regular expressions differs.

    Raises:
        BrokerUnavailableError, BrokerAuthorizationError: As for `Brokers.view`.
    """
    listed = Listed()
    if wanted.is_contradiction:
        return listed
    chosen = brokers.coordinators() if coordinators is None else coordinators
    unfiltered: set[int] = set()  # nodes that reject the pattern: their dialect of regular expressions differs
    dated: set[int] = set()

    def request(node: int) -> MakeRequest:
        def made(connection: Connection) -> ListTransactionsRequest:
            if connection.supports(ListTransactionsRequest, _BY_DURATION):
                dated.add(node)
            return _request(connection, wanted, with_pattern=node not in unfiltered)

        return made

    def conclude(node: int, response: ListTransactionsResponse) -> list[TransactionListing] | None:
        if (
            response.error_code == ErrorCode.INVALID_REGULAR_EXPRESSION
            and wanted.pattern is not None
            and node not in unfiltered
        ):
            unfiltered.add(node)
            return None
        check(response.error_code, "ListTransactions")
        states = response.transaction_states
        return [TransactionListing(t.transactional_id, node, t.producer_id, t.transaction_state) for t in states]

    found = brokers.request(chosen, {node: request(node) for node in chosen}, conclude)
    found |= brokers.request(chosen, {node: request(node) for node in unfiltered}, conclude)
    for node, listings in found.items():
        kept = [listing for listing in listings or () if wanted.has(listing)]
        listed.found += kept
        if wanted.running_longer_than_ms is not None and node not in dated:
            listed.undated |= {listing.transactional_id for listing in kept}
    listed.found.sort()
    return listed


def _request(connection: Connection, wanted: Filter, *, with_pattern: bool) -> ListTransactionsRequest:
    more: dict[str, Any] = {}
    if wanted.running_longer_than_ms is not None and connection.supports(ListTransactionsRequest, _BY_DURATION):
        more["duration_filter"] = wanted.running_longer_than_ms
    pattern = wanted.requested_pattern if with_pattern else None
    if pattern is not None and connection.supports(ListTransactionsRequest, _BY_PATTERN):
        more["transactional_id_pattern"] = pattern
    return ListTransactionsRequest(
        state_filters=sorted(state.value for state in wanted.requested_states),
        producer_id_filters=sorted(wanted.producer_ids),
        **more,
    )


def statuses(names: Collection[str | TransactionStatus]) -> frozenset[TransactionStatus]:
    """The states with these names, whatever their case.

    Raises:
        ValueError: There is no such state.
    """
    by_name = {state.value.lower(): state for state in TransactionStatus}
    found = set()
    for name in names:
        state = name if isinstance(name, TransactionStatus) else by_name.get(str(name).lower())
        if state is None:
            raise ValueError(name)
        found.add(state)
    return frozenset(found)


_DESCRIBE: Final = 1 << 8  # of the operations in Kafka's protocol
_NOT_REPORTED: Final = -(2**31)


def sees_every_id(brokers: Brokers) -> bool:
    """Whether ListTransactions, sent to all coordinators, lists every id; notes the ACLs that are missing.

    An ACL that denies Describe on some ids can't be noticed: Kafka leaves these ids out, and describes the others.

    Call it after `Brokers.coordinators`.

    Raises:
        BrokerUnavailableError, BrokerAuthorizationError: As for `Brokers.view`.
    """
    if not brokers.sees_coordinators:
        brokers.hide(
            "coordinators",
            BrokerAuthorizationError(
                "It is not known whether every transaction coordinator is up; the ids of one that is down are missing.",
                cause=f"Kafka refuses Metadata for {TRANSACTION_STATE_TOPIC!r}: the principal lacks an ACL",
                next_step=f"grant the principal Describe on the topic {TRANSACTION_STATE_TOPIC!r}",
                code=int(ErrorCode.TOPIC_AUTHORIZATION_FAILED),
                name=ErrorCode.TOPIC_AUTHORIZATION_FAILED.name,
            ),
        )
    (probed,) = describe_transactions(lambda: brokers, [uuid4().hex])
    if isinstance(probed.problem, BrokerAuthorizationError):
        _hide(brokers, "transactional id", ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    return brokers.sees_coordinators and probed.problem is None


def note_hidden_topics(brokers: Brokers) -> None:
    """Note the missing ACL if Metadata for all topics leaves some out.

    Raises:
        BrokerUnavailableError, BrokerAuthorizationError: As for `Brokers.view`.
    """
    name = uuid4().hex
    if brokers.view([name]).refused.get(name) == ErrorCode.TOPIC_AUTHORIZATION_FAILED:
        _hide(brokers, "topic", ErrorCode.TOPIC_AUTHORIZATION_FAILED)


def note_hidden_groups(brokers: Brokers) -> None:
    """Note the missing ACL if ListGroups leaves some groups out. With Describe on the cluster, it lists all.

    Raises:
        BrokerUnavailableError, BrokerAuthorizationError: As for `Brokers.view`.
    """
    name = uuid4().hex
    described = brokers.call_any(lambda: DescribeGroupsRequest(groups=[name], include_authorized_operations=False))
    (group,) = described.groups
    if group.error_code != ErrorCode.GROUP_AUTHORIZATION_FAILED:
        return
    cluster = brokers.call_any(lambda: DescribeClusterRequest(include_cluster_authorized_operations=True))
    operations = cluster.cluster_authorized_operations
    if operations == _NOT_REPORTED or not operations & _DESCRIBE:
        _hide(brokers, "group", ErrorCode.GROUP_AUTHORIZATION_FAILED)


def _hide(brokers: Brokers, resource: str, code: ErrorCode) -> None:
    brokers.hide(
        f"{resource}s",
        BrokerAuthorizationError(
            f"Kafka leaves out the {resource}s that the principal may not describe.",
            cause="the principal lacks an ACL",
            next_step=f"grant the principal Describe on the {resource} '*'",
            code=int(code),
            name=code.name,
        ),
    )


_BROKER_TIMEOUT: Final = 5.0


def two_phase_by_broker(config: KafkaConfig, *, timeout: float) -> dict[int, bool | None]:
    """Whether each live broker has two-phase commit switched on, by node id; None if that is not known.

    Args:
        config: The cluster's settings.
        timeout: Seconds, including retries.

    Raises:
        BrokerUnavailableError: No broker responded.
        BrokerAuthorizationError: The login was refused.
    """
    has_version: dict[int, bool] = {}

    def request(node: int) -> MakeRequest:
        def made(connection: Connection) -> DescribeConfigsRequest:
            has_version[node] = connection.supports(InitProducerIdRequest, INIT_PRODUCER_ID)
            return settings_request(BROKER_RESOURCE, [str(node)], [TWO_PHASE_SETTING])

        return made

    def setting(node: int, response: DescribeConfigsResponse) -> str | None:
        return settings_in(response).get(str(node), {}).get(TWO_PHASE_SETTING)

    with closing(Network(config)) as network:
        brokers = Brokers(network, Deadline.after(timeout), _BROKER_TIMEOUT)
        live = brokers.view([]).brokers
        settings = brokers.request(live, {node: request(node) for node in live}, setting)
    return {node: _is_on(settings.get(node), has_version=has_version.get(node)) for node in sorted(live)}


def _is_on(setting: str | None, *, has_version: bool | None) -> bool | None:
    if has_version is False:
        return False
    return None if setting is None else setting == "true"
