"""Requests about several transactional ids, sent to their coordinators side by side, once.

An id that gets no conclusive answer is missing in the result: the caller asks for it alone, with all retries.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from dualwrite.deadline import Deadline
from dualwrite.kafka.base import EndingTransaction, NewProducerId
from dualwrite.kafka.client.broker_connection import Connection, ConnectionLostError
from dualwrite.kafka.client.brokers import MakeRequest, Network, request_together, requests_together
from dualwrite.kafka.client.config import Address
from dualwrite.kafka.client.descriptions import about_topics, check_partitions, description_of
from dualwrite.kafka.client.kafka_errors import ErrorCode
from dualwrite.kafka.client.messages_generated import (
    DescribeTransactionsRequest,
    EndTxnRequest,
    EndTxnResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
)
from dualwrite.kafka.client.retries import TRANSIENT, NoLeaderError, check_retriable
from dualwrite.state import TransactionDescription

END_BY_EPOCH: Final = 5
"""EndTxn: the first version that is idempotent, and returns the next producer id and epoch (KIP-890)."""

INIT_PLAIN: Final = 4
"""InitProducerId of Kafka 3.0."""

INIT_TWO_PHASE: Final = 6
"""InitProducerId with `enable2Pc`."""

FOREIGN_PRODUCER_ID: Final = 2**63 - 2
"""A producer id that no producer has: brokers allocate ids in blocks, starting from 0."""

_JUST: Final = 1.0
"""Seconds after which a description no longer shows which partitions a transaction has (rule FB); their leaders are asked now.

A prepared transaction gets no more partitions; one that is to be aborted may, from an owner that was paused.
"""


def described_together(network: Network, ids: Sequence[str], deadline: Deadline) -> dict[str, TransactionDescription | None]:
    """The descriptions of ids; None for one that its coordinator does not know."""
    by_address: dict[Address, list[str]] = {}
    for name, address in _coordinators(network, ids, deadline).items():
        by_address.setdefault(address, []).append(name)

    def about(names: list[str]) -> MakeRequest:
        return lambda _: DescribeTransactionsRequest(transactional_ids=names)

    responses = request_together(network, {address: about(names) for address, names in by_address.items()}, deadline)
    states = (state for response in _conclusive(responses.values()) for state in response.transaction_states)
    return {
        state.transactional_id: description_of(state) if state.error_code == ErrorCode.NONE else None
        for state in states
        if state.error_code in (ErrorCode.NONE, ErrorCode.TRANSACTIONAL_ID_NOT_FOUND)
    }


def ended_together(network: Network, endings: Iterable[EndingTransaction], deadline: Deadline) -> dict[str, EndTxnResponse]:
    """The responses to EndTxn v5, by the ids. Without one are also those whose partitions have no leader (rule FB)."""
    now = time.monotonic()
    just = {each.kafka_transactional_id: each for each in endings if now - each.described_at < _JUST}
    addresses = _coordinators(network, list(just), deadline)
    ready = _with_leaders(network, {name: just[name] for name in addresses}, addresses, deadline)

    def ending(each: EndingTransaction) -> MakeRequest:
        def make(coordinator: Connection) -> EndTxnRequest:
            if not coordinator.supports(EndTxnRequest, END_BY_EPOCH):
                raise ConnectionLostError(coordinator.address, "the broker does not support EndTxn v5")
            return EndTxnRequest(each.kafka_transactional_id, each.producer_id, each.epoch, each.commit, version=END_BY_EPOCH)

        return make

    requests = {name: (addresses[name], ending(each)) for name, each in ready.items()}
    return {
        name: response
        for name, response in requests_together(network, requests, deadline).items()
        if not isinstance(response, Exception) and _is_conclusive(response, name)
    }


def created_together(network: Network, new: Sequence[NewProducerId], deadline: Deadline) -> dict[str, InitProducerIdResponse]:
    """The responses to InitProducerId with a producer id that no producer has, by the ids."""
    addresses = _coordinators(network, [each.kafka_transactional_id for each in new], deadline)

    def creation(each: NewProducerId) -> MakeRequest:
        def make(coordinator: Connection) -> InitProducerIdRequest:
            if each.two_phase and not coordinator.supports(InitProducerIdRequest, INIT_TWO_PHASE):
                raise ConnectionLostError(coordinator.address, "the broker does not support InitProducerId v6")
            plain = min(INIT_PLAIN, coordinator.version_of(InitProducerIdRequest))
            return InitProducerIdRequest(
                version=INIT_TWO_PHASE if each.two_phase else plain,
                transactional_id=each.kafka_transactional_id,
                transaction_timeout_ms=each.timeout_ms,
                producer_id=FOREIGN_PRODUCER_ID,
                producer_epoch=0,
                enable2_pc=each.two_phase,
                keep_prepared_txn=False,
            )

        return make

    by_id = {each.kafka_transactional_id: each for each in new}
    requests = {name: (address, creation(by_id[name])) for name, address in addresses.items()}
    return {
        name: response
        for name, response in requests_together(network, requests, deadline).items()
        if not isinstance(response, Exception) and response.error_code in (ErrorCode.NONE, ErrorCode.PRODUCER_FENCED)
    }


def _coordinators(network: Network, ids: Sequence[str], deadline: Deadline) -> dict[str, Address]:
    try:
        return network.find_coordinators(ids, deadline)
    except TRANSIENT:
        return {}


def _with_leaders(
    network: Network, endings: Mapping[str, EndingTransaction], addresses: Mapping[str, Address], deadline: Deadline
) -> dict[str, EndingTransaction]:
    """Those whose partitions have leaders, in the metadata of their coordinators."""
    partitions: dict[Address, set[tuple[str, int]]] = {}
    for name, each in endings.items():
        if each.partitions:
            partitions.setdefault(addresses[name], set()).update(each.partitions)

    def about(some: set[tuple[str, int]]) -> MakeRequest:
        return lambda _: about_topics(some)

    responses = request_together(network, {address: about(some) for address, some in partitions.items()}, deadline)

    def has_leaders(name: str, each: EndingTransaction) -> bool:
        if not each.partitions:
            return True
        try:
            for response in _conclusive([responses[addresses[name]]]):
                check_partitions(response, each.partitions)
                return True
        except NoLeaderError:
            pass
        return False

    return {name: each for name, each in endings.items() if has_leaders(name, each)}


def _conclusive(responses: Iterable[Any]) -> list[Any]:
    """The responses that are not errors."""
    return [
        response for response in responses if not isinstance(response, Exception) and not getattr(response, "error_code", 0)
    ]


def _is_conclusive(response: EndTxnResponse, kafka_id: str) -> bool:
    if response.error_code == ErrorCode.CONCURRENT_TRANSACTIONS:
        return False
    try:
        check_retriable(response.error_code, kafka_id, "EndTxn", "Write")
    except Exception:  # noqa: BLE001  (asking alone raises it again)
        return False
    return True
