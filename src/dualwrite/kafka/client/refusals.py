"""What a coordinator says that no repetition changes, as errors: a missing right, two-phase commit off, a newer broker."""

from __future__ import annotations

from dualwrite.errors import BrokerAuthorizationError, TwoPhaseCommitRefusedError, UnknownTransactionStateError
from dualwrite.kafka.client.error_codes import error_name
from dualwrite.state import TransactionStatus


def forbidden(code: int, kafka_transactional_id: str, request: str, operation: str) -> BrokerAuthorizationError:
    """The principal lacks a right to the id."""
    rights = "Describe" if operation == "Describe" else f"{operation} and Describe"
    return BrokerAuthorizationError(
        f"Kafka refuses {request}: {error_name(code)}.",
        transactional_id=kafka_transactional_id,
        next_step=f"grant the principal {rights} on the transactional ids that begin with this one "
        "(a prefixed ACL: dualwrite appends '~', '#', the database's id and numbers)",
        code=code,
        name=error_name(code),
    )


def status_of(name: str, kafka_transactional_id: str) -> TransactionStatus:
    """The transaction state of this name.

    Raises:
        UnknownTransactionStateError: A broker newer than this release has it.
    """
    try:
        return TransactionStatus(name)
    except ValueError:
        raise UnknownTransactionStateError(
            f"Kafka says that the last transaction is {name!r}, a state that this release of dualwrite does not know.",
            transactional_id=kafka_transactional_id,
            cause="the brokers are newer than this release",
            next_step="upgrade dualwrite; nothing was ended, and what is prepared stays prepared",
            state=name,
        ) from None


def two_phase_refused(kafka_transactional_id: str, answer: str, code: int | None = None) -> TwoPhaseCommitRefusedError:
    """Two-phase commit was asked for and is not to be had; a broker gives one code for all three reasons."""
    return TwoPhaseCommitRefusedError(
        f"Kafka refuses two-phase commit: {answer}.",
        transactional_id=kafka_transactional_id,
        cause="the broker has it switched off, is older than 4.1, or the principal lacks the right to it",
        next_step="set transaction.two.phase.commit.enable=true and unstable.api.versions.enable=true on every broker "
        "(Apache Kafka 4.1 or newer), and grant the principal TwoPhaseCommit (and Write, Describe) on the transactional "
        "ids; or go without (`dualwrite doctor` tells what the cluster offers)",
        code=code,
        name=answer,
    )
