"""Finding the row that can't be sent: which errors say that a batch has one, and how many rows to try next."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from dualwrite.errors import (
    DualWriteError,
    InDoubtTransactionError,
    InvalidMessageError,
    MessageRefusedError,
    MessageTooLargeError,
    StoreUnavailableError,
    UnknownTopicError,
    causes_of,
)
from dualwrite.kafka.base import Message
from dualwrite.observability.outages import ErrorMeaning
from dualwrite.stores.base import TxnStateStore

_ABOUT_ROWS: Final = (InvalidMessageError, MessageRefusedError, MessageTooLargeError, UnknownTopicError)

_REMEMBERED_SECONDS: Final = 30.0
"""Seconds for which a topic counts as missing: each look at it takes the producer 5 s, during which nothing is published."""


def meaning_of(error: Exception, store: TxnStateStore) -> ErrorMeaning:
    """What an error means. Only errors that would come again with the same row, on any broker, are about rows."""
    if isinstance(error, InDoubtTransactionError):
        return ErrorMeaning.IN_DOUBT  # the table shows whether it has committed
    if isinstance(error, _ABOUT_ROWS):
        return ErrorMeaning.CONTENT
    if _is_passing(error, store) or (isinstance(error, DualWriteError) and error.retriable):
        return ErrorMeaning.LATER
    is_passing = not isinstance(error, DualWriteError) and any(_is_passing(each, store) for each in causes_of(error))
    return ErrorMeaning.LATER if is_passing else ErrorMeaning.STOP


def _is_passing(error: BaseException, store: TxnStateStore) -> bool:
    return isinstance(error, StoreUnavailableError) or store.passes(error)


class PoisonSearch:
    """How many rows to read next, after batches that have failed because of a row.

    A batch that fails because of one of its rows is tried again with fewer rows, in the same order: with half of them, or with
    those before the row with which the producer has failed. So a row is only blamed when it has failed alone, as the first of
    all, and no row overtakes another.
    """

    def __init__(self) -> None:
        self._within: int | None = None  # the row is among the first so many
        self._next = 0

    def limit(self, most: int) -> int:
        """How many rows to read, at most `most`."""
        return most if self._within is None else min(most, self._next)

    def failed(self, rows: int, *, suspect: int | None = None) -> None:
        """A batch of several rows has failed; `suspect` is the index of the row at which the producer has failed, if known."""
        smaller = rows - 1 if self._within is None else min(rows - 1, self._next)
        self._within = rows
        if suspect:
            self._within, self._next = suspect + 1, min(suspect, smaller)
        else:
            self._next = 1 if suspect == 0 else max(1, rows // 2)

    def succeeded(self, rows: int) -> None:
        """A batch of so many rows was published, or set aside."""
        if self._within is None:
            return
        self._within -= rows
        if self._within <= 0:
            self._within = None
        else:
            self._next = max(1, self._within // 2)


class MissingTopics:
    """The topics that were found missing lately, each with the error."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[float, DualWriteError]] = {}

    def add(self, topic: str, error: DualWriteError) -> None:
        """Remember that a topic is missing."""
        self._found[topic] = (time.monotonic() + _REMEMBERED_SECONDS, error)

    @property
    def are_known(self) -> bool:
        """Whether there are any."""
        return bool(self._found)

    def check(self, messages: Iterable[Message]) -> None:
        """Check that no message is for one of them.

        Raises:
            DualWriteError: The error for its topic.
        """
        for message in messages:
            until, error = self._found.get(message.topic, (0.0, None))
            if error is not None and time.monotonic() <= until:
                raise error
            self._found.pop(message.topic, None)
