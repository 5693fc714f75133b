"""Which error codes of coordinators are transient, and the exceptions after which a request is sent again."""

from __future__ import annotations

from typing import Final

from dualwrite.errors import BrokerError, BrokerUnavailableError
from dualwrite.kafka.client.cluster import CoordinatorUnavailableError
from dualwrite.kafka.client.error_codes import ErrorCode, error_name
from dualwrite.kafka.client.refusals import FORBIDDEN_CODES, forbidden
from dualwrite.kafka.client.sockets import ConnectionLostError

_MOVED: Final = (ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.NOT_COORDINATOR)
_TRANSIENT_CODES: Final = (ErrorCode.REQUEST_TIMED_OUT, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)


class TryAgainError(Exception):
    """A transient error: send the request again."""


class NoLeaderError(TryAgainError):
    """A partition of the transaction has no leader that could write the marker."""


class CoordinatorMovedError(Exception):
    """The id has another coordinator now: look the coordinator up and send the request there."""


TRANSIENT: Final = (
    TryAgainError,
    CoordinatorMovedError,
    ConnectionLostError,
    CoordinatorUnavailableError,
    BrokerUnavailableError,
)


def check_retriable(code: int, kafka_transactional_id: str, request: str, operation: str) -> None:
    """Raise transient and authorization errors; all others are left to the caller.

    Args:
        code: The response's error code.
        kafka_transactional_id: The id in the request.
        request: The request's name.
        operation: The operation in the ACL that the request requires.

    Raises:
        TryAgainError, CoordinatorMovedError: The error is transient.
        BrokerAuthorizationError: The principal lacks the ACL.
    """
    if code in _MOVED:
        raise CoordinatorMovedError(f"{request} returned {error_name(code)}")
    if code in _TRANSIENT_CODES:
        raise TryAgainError(f"{request} returned {error_name(code)}")
    if code in FORBIDDEN_CODES:
        raise forbidden(code, kafka_transactional_id, request, operation)


def check_response(code: int, kafka_transactional_id: str | None, request: str, operation: str) -> None:
    """As `check_retriable`, for requests whose other errors the caller does not handle.

    Raises:
        BrokerError: Any other error.
    """
    check_retriable(code, kafka_transactional_id or "", request, operation)
    if code:
        raise BrokerError(
            f"{request} returned {error_name(code)} ({code}).",
            transactional_id=kafka_transactional_id,
            code=code,
            name=error_name(code),
        )
