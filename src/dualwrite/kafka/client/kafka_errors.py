"""Mapping of Kafka's errors to dualwrite's, for every client: which exception, its likely cause, the next step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from dualwrite.errors import (
    BrokerAuthorizationError,
    BrokerError,
    MessageRefusedError,
    MessageTooLargeError,
    ProducerFencedError,
    TransactionTimeoutRefusedError,
    TwoPhaseCommitRefusedError,
    UnknownTopicError,
    UnknownTransactionStateError,
)
from dualwrite.state import TransactionStatus


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """Kafka's error codes that mean the same to a user: which exception, its likely cause, and what to do."""

    error: type[BrokerError]
    cause: str | None = None
    next_step: str | None = None


UNKNOWN_TOPIC: Final = ErrorKind(
    UnknownTopicError,
    cause="the topic or partition does not exist, and the broker does not create topics automatically",
    next_step="create it, or set auto.create.topics.enable on the broker",
)
TOO_LARGE: Final = ErrorKind(
    MessageTooLargeError,
    cause="the message exceeds message.max.bytes of the producer or the broker, or the topic's max.message.bytes",
    next_step="make it smaller, or raise all three limits",
)
REFUSED: Final = ErrorKind(
    MessageRefusedError,
    cause="the topic or the broker does not accept the message: no key in a compacted topic, a timestamp outside the topic's "
    "limits, a policy violation, or an unsupported compression type",
    next_step="change the message or the topic's settings; the same message would be refused again",
)
FENCED: Final = ErrorKind(
    ProducerFencedError,
    cause="the transactional id was taken over, or recovery or a timeout ended its transaction",
)
NOT_LET_IN: Final = ErrorKind(BrokerAuthorizationError, next_step="check security.protocol, sasl.* and ssl.*")
FORBIDDEN: Final = ErrorKind(
    BrokerAuthorizationError,
    next_step="check sasl.*, and grant Write on the topic and, prefixed, on the transactional id",
)
TIMEOUT_REFUSED: Final = ErrorKind(
    TransactionTimeoutRefusedError,
    cause="transaction.timeout.ms is above the broker's transaction.max.timeout.ms",
    next_step="lower the first or raise the second",
)
GROUP_FORBIDDEN: Final = ErrorKind(BrokerAuthorizationError, next_step="grant the principal Read on the consumer group")
READ_FORBIDDEN: Final = ErrorKind(BrokerAuthorizationError, next_step="check sasl.*, and grant the principal Read on the topic")
INSTANCE_FENCED: Final = ErrorKind(
    ProducerFencedError,
    cause="another consumer of the group has the same group.instance.id",
    next_step="give each process a group.instance.id of its own, for example the name of its pod",
)
GROUP_MOVED: Final = ErrorKind(
    ProducerFencedError,
    cause="the consumer's generation is over: its partitions may belong to another member by now",
    next_step="abort, let the consumer rejoin, and consume again from the committed offsets",
)


class ErrorCode(IntEnum):
    """The codes of Apache Kafka 4.2 (org.apache.kafka.common.protocol.Errors)."""

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    INVALID_FETCH_SIZE = 4
    LEADER_NOT_AVAILABLE = 5
    NOT_LEADER_OR_FOLLOWER = 6
    REQUEST_TIMED_OUT = 7
    BROKER_NOT_AVAILABLE = 8
    REPLICA_NOT_AVAILABLE = 9
    MESSAGE_TOO_LARGE = 10
    STALE_CONTROLLER_EPOCH = 11
    OFFSET_METADATA_TOO_LARGE = 12
    NETWORK_EXCEPTION = 13
    COORDINATOR_LOAD_IN_PROGRESS = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    INVALID_TOPIC_EXCEPTION = 17
    RECORD_LIST_TOO_LARGE = 18
    NOT_ENOUGH_REPLICAS = 19
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20
    INVALID_REQUIRED_ACKS = 21
    ILLEGAL_GENERATION = 22
    INCONSISTENT_GROUP_PROTOCOL = 23
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER_ID = 25
    INVALID_SESSION_TIMEOUT = 26
    REBALANCE_IN_PROGRESS = 27
    INVALID_COMMIT_OFFSET_SIZE = 28
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    CLUSTER_AUTHORIZATION_FAILED = 31
    INVALID_TIMESTAMP = 32
    UNSUPPORTED_SASL_MECHANISM = 33
    ILLEGAL_SASL_STATE = 34
    UNSUPPORTED_VERSION = 35
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PARTITIONS = 37
    INVALID_REPLICATION_FACTOR = 38
    INVALID_REPLICA_ASSIGNMENT = 39
    INVALID_CONFIG = 40
    NOT_CONTROLLER = 41
    INVALID_REQUEST = 42
    UNSUPPORTED_FOR_MESSAGE_FORMAT = 43
    POLICY_VIOLATION = 44
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    DUPLICATE_SEQUENCE_NUMBER = 46
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    INVALID_TRANSACTION_TIMEOUT = 50
    CONCURRENT_TRANSACTIONS = 51
    TRANSACTION_COORDINATOR_FENCED = 52
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    SECURITY_DISABLED = 54
    OPERATION_NOT_ATTEMPTED = 55
    KAFKA_STORAGE_ERROR = 56
    LOG_DIR_NOT_FOUND = 57
    SASL_AUTHENTICATION_FAILED = 58
    UNKNOWN_PRODUCER_ID = 59
    REASSIGNMENT_IN_PROGRESS = 60
    DELEGATION_TOKEN_AUTH_DISABLED = 61
    DELEGATION_TOKEN_NOT_FOUND = 62
    DELEGATION_TOKEN_OWNER_MISMATCH = 63
    DELEGATION_TOKEN_REQUEST_NOT_ALLOWED = 64
    DELEGATION_TOKEN_AUTHORIZATION_FAILED = 65
    DELEGATION_TOKEN_EXPIRED = 66
    INVALID_PRINCIPAL_TYPE = 67
    NON_EMPTY_GROUP = 68
    GROUP_ID_NOT_FOUND = 69
    FETCH_SESSION_ID_NOT_FOUND = 70
    INVALID_FETCH_SESSION_EPOCH = 71
    LISTENER_NOT_FOUND = 72
    TOPIC_DELETION_DISABLED = 73
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    UNSUPPORTED_COMPRESSION_TYPE = 76
    STALE_BROKER_EPOCH = 77
    OFFSET_NOT_AVAILABLE = 78
    MEMBER_ID_REQUIRED = 79
    PREFERRED_LEADER_NOT_AVAILABLE = 80
    GROUP_MAX_SIZE_REACHED = 81
    FENCED_INSTANCE_ID = 82
    ELIGIBLE_LEADERS_NOT_AVAILABLE = 83
    ELECTION_NOT_NEEDED = 84
    NO_REASSIGNMENT_IN_PROGRESS = 85
    GROUP_SUBSCRIBED_TO_TOPIC = 86
    INVALID_RECORD = 87
    UNSTABLE_OFFSET_COMMIT = 88
    THROTTLING_QUOTA_EXCEEDED = 89
    PRODUCER_FENCED = 90
    RESOURCE_NOT_FOUND = 91
    DUPLICATE_RESOURCE = 92
    UNACCEPTABLE_CREDENTIAL = 93
    INCONSISTENT_VOTER_SET = 94
    INVALID_UPDATE_VERSION = 95
    FEATURE_UPDATE_FAILED = 96
    PRINCIPAL_DESERIALIZATION_FAILURE = 97
    SNAPSHOT_NOT_FOUND = 98
    POSITION_OUT_OF_RANGE = 99
    UNKNOWN_TOPIC_ID = 100
    DUPLICATE_BROKER_REGISTRATION = 101
    BROKER_ID_NOT_REGISTERED = 102
    INCONSISTENT_TOPIC_ID = 103
    INCONSISTENT_CLUSTER_ID = 104
    TRANSACTIONAL_ID_NOT_FOUND = 105
    FETCH_SESSION_TOPIC_ID_ERROR = 106
    INELIGIBLE_REPLICA = 107
    NEW_LEADER_ELECTED = 108
    OFFSET_MOVED_TO_TIERED_STORAGE = 109
    FENCED_MEMBER_EPOCH = 110
    UNRELEASED_INSTANCE_ID = 111
    UNSUPPORTED_ASSIGNOR = 112
    STALE_MEMBER_EPOCH = 113
    MISMATCHED_ENDPOINT_TYPE = 114
    UNSUPPORTED_ENDPOINT_TYPE = 115
    UNKNOWN_CONTROLLER_ID = 116
    UNKNOWN_SUBSCRIPTION_ID = 117
    TELEMETRY_TOO_LARGE = 118
    INVALID_REGISTRATION = 119
    TRANSACTION_ABORTABLE = 120
    INVALID_RECORD_STATE = 121
    SHARE_SESSION_NOT_FOUND = 122
    INVALID_SHARE_SESSION_EPOCH = 123
    FENCED_STATE_EPOCH = 124
    INVALID_VOTER_KEY = 125
    DUPLICATE_VOTER = 126
    VOTER_NOT_FOUND = 127
    INVALID_REGULAR_EXPRESSION = 128
    REBOOTSTRAP_REQUIRED = 129
    STREAMS_INVALID_TOPOLOGY = 130
    STREAMS_INVALID_TOPOLOGY_EPOCH = 131
    STREAMS_TOPOLOGY_FENCED = 132
    SHARE_SESSION_LIMIT_REACHED = 133


PERMANENT: Final = frozenset(
    {
        ErrorCode.INVALID_REQUIRED_ACKS,
        ErrorCode.INVALID_TIMESTAMP,
        ErrorCode.UNSUPPORTED_VERSION,
        ErrorCode.INVALID_REQUEST,
        ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT,
        ErrorCode.POLICY_VIOLATION,
        ErrorCode.SECURITY_DISABLED,
        ErrorCode.UNSUPPORTED_COMPRESSION_TYPE,
        ErrorCode.INVALID_RECORD,
    }
)
"""Codes that a broker returns for the same message every time, until the message, the topic or the settings change."""


KINDS: Final[Mapping[int, ErrorKind]] = {
    **dict.fromkeys(
        (ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.INVALID_PRODUCER_ID_MAPPING, ErrorCode.PRODUCER_FENCED), FENCED
    ),
    **dict.fromkeys((ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.RECORD_LIST_TOO_LARGE), TOO_LARGE),
    **dict.fromkeys(
        (
            ErrorCode.TOPIC_AUTHORIZATION_FAILED,
            ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
            ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        ),
        FORBIDDEN,
    ),
    ErrorCode.GROUP_AUTHORIZATION_FAILED: GROUP_FORBIDDEN,
    **dict.fromkeys((ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.INVALID_TOPIC_EXCEPTION), UNKNOWN_TOPIC),
    **dict.fromkeys((ErrorCode.ILLEGAL_GENERATION, ErrorCode.UNKNOWN_MEMBER_ID), GROUP_MOVED),
    ErrorCode.FENCED_INSTANCE_ID: INSTANCE_FENCED,
}
"""What brokers' codes mean to either producer; each has more of its own."""


def error_name(code: int) -> str:
    """Kafka's name for an error code, such as INVALID_TXN_STATE; `error 999` for a code of a newer Kafka."""
    try:
        return ErrorCode(code).name
    except ValueError:
        return f"error {code}"


FORBIDDEN_CODES: Final = (
    ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
    ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    ErrorCode.GROUP_AUTHORIZATION_FAILED,
)
"""The codes with which a coordinator refuses a request for an id or a group."""


def forbidden(code: int, kafka_transactional_id: str, request: str, operation: str) -> BrokerAuthorizationError:
    """The principal lacks a permission on the id, or on the group."""
    if code == ErrorCode.GROUP_AUTHORIZATION_FAILED:
        return BrokerAuthorizationError(
            f"Kafka refuses to show the positions of the consumer group {kafka_transactional_id!r}.",
            next_step="grant the principal Describe on the group",
            code=code,
            name=error_name(code),
        )
    return BrokerAuthorizationError(
        f"Kafka refuses {request}: {error_name(code)}.",
        transactional_id=kafka_transactional_id,
        next_step=f"grant the principal {operation} on the transactional ids that start with this one "
        "(a prefixed ACL: dualwrite appends '~', '#', the database's id and numbers)",
        code=code,
        name=error_name(code),
    )


def status_of(name: str, kafka_transactional_id: str) -> TransactionStatus:
    """The transaction state with this name.

    Raises:
        UnknownTransactionStateError: This release does not know the name: the broker is newer.
    """
    try:
        return TransactionStatus(name)
    except ValueError:
        raise UnknownTransactionStateError(
            f"Kafka reports the last transaction in state {name!r}, which this release of dualwrite does not know.",
            transactional_id=kafka_transactional_id,
            cause="the brokers are newer than this release",
            next_step="upgrade dualwrite; no transaction was ended, and prepared transactions stay prepared",
            state=name,
        ) from None


def two_phase_refused(kafka_transactional_id: str, response: str, code: int | None = None) -> TwoPhaseCommitRefusedError:
    """Two-phase commit was requested and refused; a broker uses one code for all three causes."""
    return TwoPhaseCommitRefusedError(
        f"Kafka refuses two-phase commit: {response}.",
        transactional_id=kafka_transactional_id,
        cause="it is disabled on the broker, the broker is older than 4.1, or the principal lacks the permission",
        next_step="set transaction.two.phase.commit.enable=true and unstable.api.versions.enable=true on every broker "
        "(Apache Kafka 4.1 or newer), and grant the principal TwoPhaseCommit (and Write, Describe) on the transactional "
        "ids; or run without it (`dualwrite doctor` shows what the cluster supports)",
        code=code,
        name=response,
    )


def timeout_refused(kafka_transactional_id: str, timeout_ms: int, code: int) -> BrokerError:
    """The transaction timeout is above the broker's maximum."""
    return TIMEOUT_REFUSED.error(
        f"The broker refuses a transaction timeout of {timeout_ms} ms.",
        transactional_id=kafka_transactional_id,
        cause=TIMEOUT_REFUSED.cause,
        next_step=TIMEOUT_REFUSED.next_step,
        code=code,
        name=error_name(code),
    )
