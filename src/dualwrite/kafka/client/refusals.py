"""Errors of a coordinator that a retry does not solve: a missing ACL, two-phase commit off, a newer broker."""

from __future__ import annotations

from typing import Final

from dualwrite.errors import BrokerAuthorizationError, BrokerError, TwoPhaseCommitRefusedError, UnknownTransactionStateError
from dualwrite.kafka.client.error_codes import ErrorCode, error_name
from dualwrite.kafka.client.errors import TIMEOUT_REFUSED
from dualwrite.state import TransactionStatus

FORBIDDEN_CODES: Final = (ErrorCode.CLUSTER_AUTHORIZATION_FAILED, ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
"""The codes with which a coordinator refuses a request for an id."""


def forbidden(code: int, kafka_transactional_id: str, request: str, operation: str) -> BrokerAuthorizationError:
    """The principal lacks a permission on the id."""
    rights = "Describe" if operation == "Describe" else f"{operation} and Describe"
    return BrokerAuthorizationError(
        f"Kafka refuses {request}: {error_name(code)}.",
        transactional_id=kafka_transactional_id,
        next_step=f"grant the principal {rights} on the transactional ids that start with this one "
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
