"""How dualwrite was called: settings, ids, and calls at a time when they are not allowed."""

from __future__ import annotations

from dualwrite.errors.base import DualWriteError


class ConfigurationError(DualWriteError, ValueError):
    """A setting is missing, unknown, or contradicts another; nothing was opened."""


class MissingDependencyError(ConfigurationError):
    """An optional package is not installed; the message gives the pip command."""


class InvalidTransactionalIdError(ConfigurationError):
    """A transactional id is empty, too long, or contains a reserved character (`#`, `~`) or a control character."""


class UsageError(DualWriteError, RuntimeError):
    """A method was called at a time when it is not allowed; the call changed nothing."""


class InvalidTransitionError(UsageError):
    """A producer's method was called in a state that does not allow it. Attributes: `state`, `allowed` (method names)."""

    state: str
    allowed: tuple[str, ...]


class NestedTransactionError(UsageError):
    """`transaction()` was called inside another transaction of the same writer, or a pool was called from one of its units."""


class ConcurrentUseError(UsageError):
    """A second thread used a writer while the first was using it. A writer can be used by one thread at a time.

    Also raised if the thread that looks after idle writers has been using the writer for two minutes.
    """


class WriterClosedError(UsageError):
    """The writer is closed or was never opened, or the transaction has ended."""


class TransactionControlError(UsageError):
    """The user's block tried to end or replace the transaction that the writer owns (commit, rollback, close, BEGIN)."""

    call: str
