"""Which ACL each request of the transaction tools needs, for the error if it is missing. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dualwrite.errors import BrokerAuthorizationError
from dualwrite.kafka.client.error_codes import ErrorCode, error_name

DENIED: Final = frozenset(
    {
        ErrorCode.TOPIC_AUTHORIZATION_FAILED,
        ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
        ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        ErrorCode.GROUP_AUTHORIZATION_FAILED,
    }
)
"""The codes by which a broker refuses a request of these tools."""


@dataclass(frozen=True, slots=True)
class Permission:
    """An operation on a kind of resource, as in an ACL."""

    operation: str
    resource: str


PERMISSIONS: Final = {
    "Metadata": Permission("Describe", "topic"),
    "FindCoordinator": Permission("Describe", "transactional id"),
    "ListTransactions": Permission("Describe", "transactional id"),
    "DescribeTransactions": Permission("Describe", "transactional id"),
    "DescribeProducers": Permission("Read", "topic"),
    "ListOffsets": Permission("Describe", "topic"),
    "Fetch": Permission("Read", "topic"),
    "OffsetFetch": Permission("Describe", "group"),
    "DescribeGroups": Permission("Describe", "group"),
    "WriteTxnMarkers": Permission("ClusterAction", "cluster"),
}
"""The ACL that each request needs."""


def denied(request: str, code: int, name: str) -> BrokerAuthorizationError:
    """The error for a request that was refused because an ACL is missing.

    Args:
        request: A key of PERMISSIONS.
        code: One of DENIED.
        name: The topic, the transactional id or the group.
    """
    needed = PERMISSIONS[request]
    if code == ErrorCode.TOPIC_AUTHORIZATION_FAILED and needed.resource == "group":
        return _topics_of_group(request, code, name)
    resource = "cluster" if code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED else f"{needed.resource} {name!r}"
    return BrokerAuthorizationError(
        f"Kafka refuses {request} for {name!r}: {error_name(code)}.",
        transactional_id=name if code == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED else None,
        cause="the principal lacks an ACL",
        next_step=f"grant the principal {needed.operation} on the {resource}",
        code=code,
        name=error_name(code),
    )


def _topics_of_group(request: str, code: int, group: str) -> BrokerAuthorizationError:
    return BrokerAuthorizationError(
        f"Kafka refuses {request} for {group!r}: {error_name(code)}.",
        cause="the principal may not describe a topic that the group consumes",
        next_step="grant the principal Describe on the topics of the group",
        code=code,
        name=error_name(code),
    )
