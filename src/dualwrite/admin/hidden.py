"""What Kafka silently leaves out of its lists because of missing ACLs: ids, topics and groups."""

from __future__ import annotations

from typing import Final
from uuid import uuid4

from dualwrite.admin.listing import describe_transactions
from dualwrite.admin.requests import Brokers
from dualwrite.errors import BrokerAuthorizationError
from dualwrite.kafka.client.kafka_errors import ErrorCode
from dualwrite.kafka.client.messages_generated import DescribeClusterRequest, DescribeGroupsRequest
from dualwrite.kafka.inspect import TRANSACTION_STATE_TOPIC

_DESCRIBE: Final = 1 << 8  # of the operations in Kafka's protocol
_NOT_REPORTED: Final = -(2**31)


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
    (probed,) = describe_transactions(lambda: brokers, [uuid4().hex])
    if isinstance(probed.problem, BrokerAuthorizationError):
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
