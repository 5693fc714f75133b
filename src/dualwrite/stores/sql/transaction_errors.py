"""The errors of one transaction on a SQL database: fenced, ended by the user's block, not committed, or unknown."""

from __future__ import annotations

from typing import Any

from dualwrite.errors import (
    DualWriteError,
    FencedError,
    StoreCommitFailedError,
    StoreCommitUnknownError,
    StoreError,
    TransactionControlError,
    WriterClosedError,
)
from dualwrite.stores.rows import fenced
from dualwrite.stores.sql.dialect import driver_error
from dualwrite.stores.sql.errors import ErrorMap, address
from dualwrite.stores.sql.home import full_name
from dualwrite.stores.state_row import Claim


class TransactionErrors:
    """Makes the errors of one transaction.

    Args:
        errors: Translates the errors of the store's database.
        claim: The claim that the transaction runs under.
    """

    def __init__(self, errors: ErrorMap, claim: Claim) -> None:
        self._errors = errors
        self._claim = claim

    def translated(self, error: BaseException, doing: str) -> DualWriteError:
        """Our error for the driver's; see `ErrorMap.translated`."""
        return self._errors.translated(error, doing, self._claim.transactional_id)

    def fenced(self, current: Any) -> FencedError:
        """The error for a row with another fence.

        Args:
            current: A row with `fence` and `owner` of the newest claim; None if the id has no row.
        """
        return fenced(self._claim, *((None, None) if current is None else (current.fence, current.owner)))

    def row_not_found(self, current: Any, store_id: str) -> DualWriteError:
        """The error for a record that changed no row, although the transaction is still the marked one.

        Args:
            current: As for `fenced`.
            store_id: The store that the row belonged to when the transaction began.
        """
        if current is None or current.fence != self._claim.fence:
            return self.fenced(current)
        table = full_name(self._errors.engine)
        what = (
            f"The prepared state could not be recorded in {table}: there the block's transaction does not see the row that it "
            "began with. Nothing was committed."
        )
        if current.store_id != store_id:
            return StoreCommitFailedError(
                what,
                transactional_id=self._claim.transactional_id,
                cause=f"the row belonged to the store {store_id!r}, and now there is one of {current.store_id!r}: the store "
                "got a new id meanwhile, or the block has replaced the table",
                next_step="run the whole transaction again",
            )
        return StoreError(
            what,
            transactional_id=self._claim.transactional_id,
            cause="the block, or a statement in it, hides the row or has replaced the table: row-level security, a rule, a "
            "trigger, a temporary table of the same name (MariaDB, MySQL), ALTER TABLE",
            next_step=f"leave {table} out of these, for all roles that blocks use",
        )

    def not_found_in_encoding(self, changed: str) -> StoreError:
        """The error for an id that the database reads as another text, since the session's encoding was changed."""
        return StoreError(
            "The row of the id was not found, since the session's character set is no longer the driver's. Nothing was "
            "committed.",
            transactional_id=self._claim.transactional_id,
            cause=changed,
            next_step="leave the character set as it is in the block, or give it to the driver when it connects (charset=…)",
        )

    def ended(self) -> WriterClosedError:
        """The error for a use of the transaction after its end."""
        return WriterClosedError("The transaction has ended.", transactional_id=self._claim.transactional_id)

    def ended_by_block(self) -> TransactionControlError:
        """The error for a transaction that the user's block has ended itself."""
        return TransactionControlError(
            "The block ended the database's transaction itself: what it wrote before that may have been committed WITHOUT its "
            "messages, which are aborted now.",
            transactional_id=self._claim.transactional_id,
            cause="a COMMIT or ROLLBACK through the driver's own connection, a procedure, or a statement that ends the "
            "transaction implicitly, or removes its mark (PostgreSQL: RESET ALL; SQLite: ON CONFLICT ROLLBACK; MariaDB, "
            "MySQL: CREATE TABLE and the like bypassing tx.db, or a deadlock whose error the block ignored)",
            next_step="check what the block wrote; remove the commit or rollback from it (savepoints are allowed)",
        )

    def flush_failed(self) -> StoreError:
        """The error for a session that can't be used any more, since the block has ignored the error of a flush."""
        return StoreError(
            "The database's transaction can't be committed: a flush of the ORM session failed, and the block continued.",
            transactional_id=self._claim.transactional_id,
            next_step="let the error of the flush leave the block, or flush under a savepoint (session.begin_nested())",
        )

    def commit_failed(self, cause: str) -> StoreCommitFailedError:
        """The error for a COMMIT that certainly had no effect."""
        return StoreCommitFailedError(
            f"The database {address(self._errors.engine.url)} did not commit; nothing of the transaction was written.",
            transactional_id=self._claim.transactional_id,
            cause=cause,
            next_step="if the cause is a conflict with another transaction, run the whole transaction again",
        )

    def commit_unknown(self, error: BaseException) -> StoreCommitUnknownError:
        """The error for a COMMIT that may have had its effect."""
        return StoreCommitUnknownError(
            f"{address(self._errors.engine.url)} did not answer the COMMIT: it may or may not have committed.",
            transactional_id=self._claim.transactional_id,
            cause=str(driver_error(error)).strip(),
            next_step="claim the id again with the same expected fence and read the row",
        )
