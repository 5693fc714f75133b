"""Transactional ids as their coordinators list and describe them (KIP-664)."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self
from uuid import uuid4

from dualwrite.admin.facts import RUNNING, DescribedTransaction, TransactionListing
from dualwrite.admin.requests import DENIED, Brokers, KeyedRequest, Reply, batches, check, denied
from dualwrite.deadline import Deadline
from dualwrite.errors import (
    BrokerAuthorizationError,
    BrokerError,
    BrokerUnavailableError,
    ConfigurationError,
    DualWriteError,
    UnknownTransactionStateError,
    UnsupportedBrokerError,
)
from dualwrite.kafka.client.broker_connection import Connection
from dualwrite.kafka.client.brokers import CoordinatorUnavailableError, MakeRequest
from dualwrite.kafka.client.config import Address
from dualwrite.kafka.client.kafka_errors import ErrorCode, error_name
from dualwrite.kafka.client.messages_generated import (
    DescribeClusterRequest,
    DescribeGroupsRequest,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    ListTransactionsRequest,
    ListTransactionsResponse,
)
from dualwrite.kafka.client.requests import description_of
from dualwrite.kafka.inspect import TRANSACTION_STATE_TOPIC
from dualwrite.state import TransactionStatus

_BY_DURATION: Final = 1  # from this version of ListTransactions on: Apache Kafka 3.8
_BY_PATTERN: Final = 2  # Apache Kafka 4.1
_SAME_IN_RE2: Final = re.compile(r"(?:[^\\{(\[]|\\[^\w\s]|\{(?=\d)|\((?!\?)|\(\?:|\[(?![\[:]|\^\[))*", re.ASCII)
"""A pattern that means the same in RE2J, which brokers use: without classes such as `\\w` (ASCII there), and without `{,3}`."""

_DESCRIBE: Final = 1 << 8  # of the operations in Kafka's protocol
_NOT_REPORTED: Final = -(2**31)


def describe_transactions(
    brokers: Brokers, ids: Iterable[str], *, batch_timeout: float | None = None
) -> Iterator[DescribedTransaction]:
    """Describe ids, as Kafka sees them, in their order, with at most one batch of results in memory.

    Args:
        brokers: The brokers, for this call.
        ids: The ids.
        batch_timeout: Seconds for each batch; None: all have the time limit of the call.
    """
    for batch in batches(ids):
        in_time = brokers if batch_timeout is None else brokers.renewed(Deadline.after(batch_timeout))
        found = _described(in_time, batch)
        for name in batch:
            yield DescribedTransaction(name, found[name].broker, found[name].response, found[name].problem)


def _described(brokers: Brokers, ids: list[str]) -> dict[str, Reply]:
    """What the coordinators of ids respond about them."""

    def located(keys: list[str]) -> dict[str, tuple[int | None, Address | str | DualWriteError]]:
        return {name: _place(name, where) for name, where in brokers.located(keys).items()}

    def responses(response: DescribeTransactionsResponse) -> Iterator[tuple[str, int, Any]]:
        for state in response.transaction_states:
            is_unknown = state.error_code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND
            found: Any = None
            if not state.error_code:
                try:
                    found = description_of(state)
                except UnknownTransactionStateError as error:
                    found = error
            yield state.transactional_id, 0 if is_unknown else state.error_code, found

    def refused(key: str, code: int) -> DualWriteError:
        if code in DENIED:
            return denied(name, code, key)
        return BrokerError(f"{name} returned {error_name(code)}.", transactional_id=key, code=code, name=error_name(code))

    def unanswered(key: str, reason: str) -> BrokerUnavailableError:
        return BrokerUnavailableError(
            f"The transaction's coordinator did not respond: {reason}.",
            transactional_id=key,
            cause="its broker is down, overloaded, or unreachable from here",
            next_step="retry once the broker is back, or another has taken over",
            servers=brokers.network.config.servers,
        )

    name = "DescribeTransactions"
    request = KeyedRequest(name, located, DescribeTransactionsRequest, responses, refused, unanswered)
    return request.replies(brokers, ids)


def _place(
    name: str, where: tuple[int, Address] | CoordinatorUnavailableError
) -> tuple[int | None, Address | str | DualWriteError]:
    if not isinstance(where, CoordinatorUnavailableError):
        return where
    return None, denied("FindCoordinator", int(where.code or 0), name) if where.code in DENIED else str(where)


# --- the ids of a cluster ---------------------------------------------------------------------------------------------


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

    @classmethod
    def of(
        cls,
        states: Collection[str | TransactionStatus],
        producer_ids: Iterable[int],
        pattern: str | None,
        running_longer_than: float | None,
    ) -> Self:
        """The filter of these arguments of `TransactionAdmin.list`.

        Raises:
            ConfigurationError: There is no such state, or the pattern is not a regular expression.
        """
        chosen = frozenset(map(_status, states))
        try:
            expression = re.compile(pattern) if pattern else None
        except re.error as error:
            raise ConfigurationError(
                f"The pattern {pattern!r} is not a regular expression: {error}.",
                next_step="use the syntax of Python's module re",
            ) from error
        limit = None if running_longer_than is None else max(int(running_longer_than * 1000), 0)
        return cls(chosen, frozenset(producer_ids), expression, limit)

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


def _status(name: str | TransactionStatus) -> TransactionStatus:
    """The state with this name, whatever its case."""
    for state in TransactionStatus:
        if name is state or str(name).lower() == state.value.lower():
            return state
    raise ConfigurationError(
        f"{name!r} is not a transaction state.",
        next_step=f"use one of {', '.join(state.value for state in TransactionStatus)}",
    )


@dataclass(slots=True)
class Listed:
    """The listings that meet the filter; the duration of those in `undated` was not checked by their brokers."""

    found: list[TransactionListing] = field(default_factory=list)
    undated: set[str] = field(default_factory=set)


def find_transactions(brokers: Brokers, wanted: Filter) -> list[TransactionListing]:
    """The listings that meet the filter, sorted; also of brokers that can't filter by duration."""
    listed = list_transactions(brokers, wanted)
    if not listed.undated or wanted.running_longer_than_ms is None:
        return listed.found
    latest = time.time() * 1000 - wanted.running_longer_than_ms
    old = {
        described.transactional_id
        for described in describe_transactions(brokers, sorted(listed.undated))
        if described.problem is not None  # its age is unknown, so it is included
        or (described.description is not None and 0 <= described.description.start_time_ms < latest)
    }
    return [found for found in listed.found if found.transactional_id not in listed.undated or found.transactional_id in old]


def list_transactions(brokers: Brokers, wanted: Filter, coordinators: Mapping[int, Address] | None = None) -> Listed:
    """List the transactions of every broker, or of those given; a broker that does not respond is in `brokers.problems`.

    The pattern is checked here too, and sent only if it means the same to a broker: its dialect of regular expressions differs.
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


def sees_every_id(brokers: Brokers) -> bool:
    """Whether ListTransactions, sent to all coordinators, lists every id; notes the ACLs that are missing.

    An ACL that denies Describe on some ids can't be noticed: Kafka leaves these ids out, and describes the others.

    Call it after `Brokers.coordinators`.
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
    (probed,) = describe_transactions(brokers, [uuid4().hex])
    if isinstance(probed.problem, BrokerAuthorizationError) and not isinstance(probed.problem, UnsupportedBrokerError):
        _hide(brokers, "transactional id", ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    return brokers.sees_coordinators and probed.problem is None


def note_hidden_topics(brokers: Brokers) -> None:
    """Note the missing ACL if Metadata for all topics leaves some out."""
    name = uuid4().hex
    if brokers.view([name]).refused.get(name) == ErrorCode.TOPIC_AUTHORIZATION_FAILED:
        _hide(brokers, "topic", ErrorCode.TOPIC_AUTHORIZATION_FAILED)


def note_hidden_groups(brokers: Brokers) -> None:
    """Note the missing ACL if ListGroups leaves some groups out. With Describe on the cluster, it lists all."""
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
