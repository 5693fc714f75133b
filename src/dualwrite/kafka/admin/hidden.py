"""Whether Kafka leaves transactional ids out of its responses, without an error, because an ACL is missing; and which one."""

from __future__ import annotations

from uuid import uuid4

from dualwrite.errors import BrokerAuthorizationError
from dualwrite.kafka.admin.brokers import Brokers
from dualwrite.kafka.admin.describing import describe_transactions
from dualwrite.kafka.client.error_codes import ErrorCode
from dualwrite.kafka.inspect.topics import TRANSACTION_STATE_TOPIC


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
    # A random id, which no ACL for a single id or a prefix matches.
    (probed,) = describe_transactions(lambda: brokers, [uuid4().hex])
    if isinstance(probed.problem, BrokerAuthorizationError):
        brokers.hide(
            "ids",
            BrokerAuthorizationError(
                "Kafka leaves out the transactional ids that the principal may not describe.",
                cause="the principal lacks an ACL",
                next_step="grant the principal Describe on the transactional id '*'",
                code=int(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED),
                name=ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED.name,
            ),
        )
    return brokers.sees_coordinators and probed.problem is None
