"""The events of one transaction for `dualwrite.observability`, from the steps of its lane."""

from __future__ import annotations

import itertools
from time import perf_counter
from typing import Final, Literal

from dualwrite.errors import InDoubtTransactionError, LostTransactionError, UnverifiedTransactionError
from dualwrite.observability.events import (
    DatabaseCommitted,
    MessagesDelivered,
    StateRecorded,
    Steps,
    TransactionBegun,
    TransactionCommitted,
    TransactionInDoubt,
    TransactionLost,
    TransactionRolledBack,
)
from dualwrite.observability.observers import notify
from dualwrite.recipe.phases import Event

_numbers: Final = itertools.count(1)


class TransactionReport:
    """Makes the events of one transaction.

    Args:
        has_database: False if it is on Kafka alone.

    Attributes:
        number: The transaction's number in this process.
        messages: How many messages were delivered.
        has_ended: Whether its outcome was reported, or that it is in doubt.
    """

    __slots__ = (
        *("_began", "_durations", "_has_database", "_lane", "_last", "_transactional_id"),
        *("has_ended", "messages", "number"),
    )

    def __init__(self, transactional_id: str, lane: str, *, has_database: bool = True) -> None:
        self.number = next(_numbers)
        self.messages = 0
        self.has_ended = False
        self._transactional_id = transactional_id
        self._lane = lane
        self._has_database = has_database
        self._durations: list[float] = []
        self._began = self._last = perf_counter()
        notify(TransactionBegun(transactional_id, lane, self.number, has_database))

    def entered(self, event: Event) -> None:
        """A step has ended; what comes after it is not reported here: `committed` or `failed`."""
        if event is Event.PREPARE:  # the user's code has ended
            self._step()
        elif event is Event.PREPARED:
            notify(MessagesDelivered(*self._name, self.messages, self._step()))
        elif event is Event.RECORDED:
            notify(StateRecorded(*self._name, self._step()))
        elif event is Event.DATABASE_COMMITTED:
            notify(DatabaseCommitted(*self._name, self._step()))

    def committed(self, outcome: Literal["published", "journaled"], *, was_in_doubt: bool = False) -> None:
        """Both sides are committed."""
        if self.has_ended:
            return
        self.has_ended = True
        if not self._has_database:
            self._durations += [0.0, 0.0]  # neither `record` nor `database_commit`
        self._step()
        steps = Steps(*self._durations[: len(Steps._fields)])
        notify(TransactionCommitted(*self._name, outcome, self.messages, self._seconds, steps, was_in_doubt))

    def failed(self, error: BaseException, *, is_in_doubt: bool = False) -> None:
        """The transaction has ended with an error, which says what its outcome is; or that is unknown.

        It changes nothing if the outcome was reported.
        """
        if self.has_ended:
            return
        self.has_ended = True
        kind: type[TransactionRolledBack | TransactionInDoubt | TransactionLost]
        if is_in_doubt or isinstance(error, InDoubtTransactionError):
            kind = TransactionInDoubt
        elif isinstance(error, LostTransactionError | UnverifiedTransactionError):
            kind = TransactionLost
        else:
            kind = TransactionRolledBack
        notify(kind(*self._name, error, self._seconds))

    @property
    def _name(self) -> tuple[str, str, int]:
        return self._transactional_id, self._lane, self.number

    @property
    def _seconds(self) -> float:
        return perf_counter() - self._began

    def _step(self) -> float:
        now = perf_counter()
        seconds, self._last = now - self._last, now
        self._durations.append(seconds)
        return seconds
