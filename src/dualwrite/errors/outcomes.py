"""Transactions that are in doubt, lost or unverified, and recoveries that did not finish."""

from __future__ import annotations

from typing import Any

from dualwrite.errors.base import DualWriteError


class AfterCommitError(DualWriteError):
    """The transaction committed, and a listener of the ORM session's `after_commit` event raised an error.

    Don't repeat the transaction. The listener's error is the `__cause__`.
    """


class InDoubtTransactionError(DualWriteError):
    """This process does not know whether the transaction committed on both sides. Recovery, here or elsewhere, resolves it.

    Don't repeat the transaction without checking in your data whether it committed. Attributes: `state` (text of the
    PreparedTxnState, or ""), `database_committed` (True, or None if unknown).
    """

    state: str
    database_committed: bool | None


class LostTransactionError(DualWriteError):
    """The database committed and Kafka provably aborted: the messages of the transaction are lost.

    Without two-phase commit a prepared transaction can time out; with it, only an operator, or a writer or recovery on another
    copy of the database, can abort one. Attributes: `state`, `generation`, `delivery`.
    """

    state: str
    generation: int
    delivery: Any  # a Delivery, or None; importing it here would be circular


class UnverifiedTransactionError(DualWriteError):
    """The database committed, and Kafka no longer has evidence of the messages' outcome.

    Attributes: `state`, `generation`, `delivery`.
    """

    state: str
    generation: int
    delivery: Any  # a Delivery, or None; importing it here would be circular


class RecoveryError(DualWriteError):
    """Recovery of at least one id did not finish; the report shows which. Attributes: `report`."""

    report: Any  # a RecoveryReport; importing it here would be circular

    retriable = True
