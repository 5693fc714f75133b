"""Errors for a block that would end its own transaction, or use it after its end; the same on every database."""

from __future__ import annotations

from dualwrite.errors import TransactionControlError, WriterClosedError


def control_refused(call: str, transactional_id: str, *, savepoints: str | None = None) -> TransactionControlError:
    """The error for a call that would end or replace the transaction in the block.

    Args:
        call: The call.
        transactional_id: The writer's id.
        savepoints: How to make savepoints, if the database has them.
    """
    allowed = "" if savepoints is None else f"savepoints ({savepoints}) are allowed; "
    return TransactionControlError(
        f"{call} is not possible inside the block: the writer ends the transaction, on both sides together.",
        transactional_id=transactional_id,
        cause="a commit or rollback here would end the database's side without Kafka's",
        next_step="leave the block to commit, raise an exception to roll back; "
        f"{allowed}the transaction is still open and usable",
        call=call,
    )


def batch_ended(transactional_id: str) -> WriterClosedError:
    """The error for a batch that is used after its transaction."""
    return WriterClosedError("The transaction that this batch belonged to has ended.", transactional_id=transactional_id)
