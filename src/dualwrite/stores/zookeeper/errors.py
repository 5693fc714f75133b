"""The one place where kazoo's errors are translated into ours, except those of commit."""

from __future__ import annotations

from enum import Enum
from typing import Final

from kazoo.exceptions import (
    AuthFailedError,
    ConnectionDropped,
    ConnectionLoss,
    NoAuthError,
    NotReadOnlyCallError,
    OperationTimeoutError,
    SASLException,
    SessionClosedRequireSaslError,
    SessionExpiredError,
    SessionMovedError,
    ThrottledOpError,
    UnknownSessionError,
)

from dualwrite.errors import StoreError, StoreUnavailableError
from dualwrite.stores.zookeeper.connection import NoAnswerError, NotSentError
from dualwrite.stores.zookeeper.paths import LEASE_ROOT, STATE_ROOT


class ErrorClass(Enum):
    """What one of kazoo's errors means to us."""

    CONNECTION = "the connection could not be made, or broke, or the session ended"
    REFUSED = "the server refused our credentials"
    DENIED = "an ACL does not permit it"
    READ_ONLY = "the server is read-only"
    OTHER = "anything else"


_KINDS: Final[dict[ErrorClass, tuple[type[Exception], ...]]] = {
    ErrorClass.CONNECTION: (
        NotSentError,
        NoAnswerError,
        ConnectionLoss,
        SessionExpiredError,  # and ConnectionClosedError
        SessionMovedError,
        UnknownSessionError,
        OperationTimeoutError,
        ConnectionDropped,
        ThrottledOpError,
    ),
    ErrorClass.REFUSED: (AuthFailedError, SASLException, SessionClosedRequireSaslError),
    ErrorClass.DENIED: (NoAuthError,),
    ErrorClass.READ_ONLY: (NotReadOnlyCallError,),
}
_CREDENTIALS: Final = "user:password in the URL, auth_data or sasl_options"
_TEXTS: Final[dict[ErrorClass, tuple[type[StoreError], str, str | None]]] = {
    ErrorClass.CONNECTION: (
        StoreUnavailableError,
        "ZooKeeper at {where} can't be reached, or ended the connection, while {doing}.",
        (
            "check that it is running and that the address is right: `--url` or DUALWRITE_DATABASE_URL (or the client that you "
            "passed); then try again"
        ),
    ),
    ErrorClass.REFUSED: (
        StoreUnavailableError,
        "ZooKeeper at {where} refused the credentials while {doing}.",
        f"check the credentials: {_CREDENTIALS}",
    ),
    ErrorClass.DENIED: (
        StoreError,
        "ZooKeeper at {where} does not permit {doing}.",
        (
            f"grant READ, WRITE and CREATE on {STATE_ROOT} and the nodes in it, for pools also with DELETE on {LEASE_ROOT} "
            f"(getAcl and setAcl in zkCli.sh), or use other credentials: {_CREDENTIALS}"
        ),
    ),
    ErrorClass.READ_ONLY: (
        StoreUnavailableError,
        "ZooKeeper at {where} is read-only at the moment; {doing} failed.",
        "the server that we reached has no quorum; try again",
    ),
    ErrorClass.OTHER: (StoreError, "ZooKeeper at {where} failed while {doing}.", None),
}


def classify(error: BaseException) -> ErrorClass:
    """What the error means."""
    return next((kind for kind, errors in _KINDS.items() if isinstance(error, errors)), ErrorClass.OTHER)


def translated(error: BaseException, where: str, doing: str, transactional_id: str | None = None) -> StoreError:
    """Our error for kazoo's.

    Args:
        error: Kazoo's error.
        where: The address, for messages.
        doing: What was tried, to complete "… failed while <doing>".
        transactional_id: The id it was tried for.
    """
    found = classify(error)
    if isinstance(error, NotSentError) and "authentication failed" in str(error):
        found = ErrorClass.REFUSED
    kind, what, next_step = _TEXTS[found]
    return kind(
        what.format(where=where, doing=doing),
        transactional_id=transactional_id,
        cause=sentence(error),
        next_step=next_step,
    )


def sentence(error: BaseException) -> str:
    """The error's kind and text, to be used as a cause; most of kazoo's errors have no text."""
    text = " ".join(str(error).split())
    if isinstance(error, NotSentError | NoAnswerError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
