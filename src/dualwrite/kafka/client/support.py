"""What a broker must offer, and the error for one that offers less: it is too old, or it has no transactions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from dualwrite.errors import UnsupportedBrokerError
from dualwrite.kafka.client.fields import Request
from dualwrite.kafka.client.kafka_errors import ErrorCode, error_name
from dualwrite.kafka.client.messages_generated import (
    DescribeTransactionsRequest,
    EndTxnRequest,
    FindCoordinatorRequest,
    InitProducerIdRequest,
    ProduceRequest,
)

Versions = Mapping[int, tuple[int, int]]
"""The lowest and the highest version of each request that a broker offers, by API key, as ApiVersions has answered."""

_TRANSACTIONS: Final = (FindCoordinatorRequest, InitProducerIdRequest, EndTxnRequest, DescribeTransactionsRequest)
_ADD_PARTITIONS: Final = 24
"""AddPartitionsToTxn, which librdkafka sends. A producer that sends Produce v12 does without (KIP-890)."""

REFUSED: Final = (ErrorCode.UNSUPPORTED_VERSION, ErrorCode.INVALID_REQUEST)
"""How brokers answer a request, or a kind of coordinator, that they don't have."""


def newest_common(offered: Versions, request: type[Request[Any]]) -> int | None:
    """The newest version of a request that both the broker and dualwrite support; None if there is none."""
    lowest, highest = offered.get(request.API_KEY, (0, -1))
    chosen = min(highest, request.NEWEST)
    return None if chosen < max(lowest, request.OLDEST) else chosen


def unsupported(*lacks: str, at: object = "") -> UnsupportedBrokerError:
    """The error for a broker that lacks this."""
    return UnsupportedBrokerError(
        f"The broker{f' at {at}' if at else ''} does not offer what dualwrite needs: {'; '.join(lacks)}.",
        cause="it is older than Apache Kafka 3.0, or it has no transactions, or none in this plan",
        next_step="use Apache Kafka 3.0 or newer, or a service and a plan with transactions (documentation: Other brokers)",
        lacks=lacks,
    )


def check_offers(at: object, offered: Versions, requests: Iterable[type[Request[Any]]]) -> None:
    """Check that the broker has these requests, in a version that dualwrite knows.

    Raises:
        UnsupportedBrokerError: It lacks some; all of them are named.
    """
    lacks = [_lack(offered, request) for request in requests if newest_common(offered, request) is None]
    if lacks:
        raise unsupported(*lacks, at=at)


def check_has_transactions(at: object, offered: Versions) -> None:
    """Check that the broker offers all requests of a transaction. Raises as `check_offers`."""
    check_offers(at, offered, _TRANSACTIONS)
    if newest_common(offered, ProduceRequest) is None and _ADD_PARTITIONS not in offered:
        raise unsupported("no AddPartitionsToTxn", at=at)


def check_answer(request: str, code: int, *, at: object = "") -> None:
    """Check that an error code does not mean that the broker has no such request. Raises as `check_offers`."""
    if code in REFUSED:
        raise unsupported(f"it answers {request} with {error_name(code)}", at=at)


def _lack(offered: Versions, request: type[Request[Any]]) -> str:
    name = request.__name__.removesuffix("Request")
    if request.API_KEY not in offered:
        return f"no {name}"
    lowest, highest = offered[request.API_KEY]
    return f"{name} v{lowest} to v{highest}, where v{request.OLDEST} to v{request.NEWEST} is needed"
