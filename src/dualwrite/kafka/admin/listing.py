"""The transactional ids of all coordinators (KIP-664, ListTransactions), filtered by the brokers that support it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dualwrite.kafka.admin.brokers import Brokers, check
from dualwrite.kafka.admin.facts import RUNNING, TransactionListing
from dualwrite.kafka.client.config import Address
from dualwrite.kafka.client.connection import Connection
from dualwrite.kafka.client.error_codes import ErrorCode
from dualwrite.kafka.client.messages_generated import ListTransactionsRequest, ListTransactionsResponse
from dualwrite.kafka.client.together import MakeRequest
from dualwrite.state import TransactionStatus

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
