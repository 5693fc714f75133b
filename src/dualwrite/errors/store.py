"""The database's side."""

from __future__ import annotations

from dualwrite.errors.base import DualWriteError


class StoreError(DualWriteError):
    """An error on the database's side."""


class StoreUnavailableError(StoreError):
    """The database can't be reached or closed the connection, at a time when nothing was in doubt."""

    retriable = True


class StoreLockedError(StoreUnavailableError):
    """Another transaction held a lock for longer than the time limit, at a time when nothing was in doubt."""


class StateTableMissingError(StoreError):
    """The table `kafka_transaction_state` is missing or older than this release; the message names the command to run."""


class StoredStateError(StoreError):
    """A stored row can't be read: its prepared state does not parse. Attributes: `text`."""

    text: str


class StoreCopiedError(StoreError):
    """The database is a copy of the one in which its ids were made, or that database has moved. Nothing was changed.

    The original and the copy use the same ids at Kafka, so each would abort what the other has committed. Attributes:
    `store_id`, `kept` and `found` (the database in which the ids were made, and the database that answers now).
    """

    store_id: str
    kept: str
    found: str


class NotResolvedError(StoreError):
    """The id still has something to recover or to acknowledge, so it can't be forgotten or moved."""


class PositionMovedError(StoreError):
    """A consumer's position is not where it was when its messages were read: another consumer has moved it since.

    The transaction has no effect on either side. Attributes: `group_id`, `topic`, `partition`, and the offsets `expected` and
    `found` (None: none was stored).
    """

    group_id: str
    topic: str
    partition: int
    expected: int | None
    found: int | None


class StoreCommitFailedError(StoreError):
    """The database did not commit: the transaction was rolled back completely and may be retried."""

    retriable = True


class StoreCommitUnknownError(StoreError):
    """COMMIT was sent and not answered: the database may or may not have committed. The outcome must be read, never guessed."""
