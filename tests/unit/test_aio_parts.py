"""Parts of dualwrite.aio by themselves: messages that wait to be sent, and coroutines that are notified."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dualwrite import aio
from dualwrite.errors import InvalidMessageError, UnknownTopicError

# --- messages ---------------------------------------------------------------------------------------------------------


class Sent:
    """Stands for the transaction in the thread: what was sent.

    Args:
        error: What the first attempt to send raises.
    """

    def __init__(self, error: Exception | None = None) -> None:
        self.values: list[bytes | None] = []
        self._error = error

    def send_messages(self, messages: list[Any]) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
        self.values += [message.value for message in messages]


def coroutine_transaction(sent: Sent) -> aio.AsyncTransaction:
    transaction: Any = sent
    thread: Any = SimpleNamespace(check=lambda: None)
    return aio.AsyncTransaction(transaction, thread)


def first_then(act: Callable[[], None], *values: str) -> Iterator[str]:
    for value in values:
        yield value
        act()


def test_a_message_made_while_the_thread_sends_the_others_is_sent_too() -> None:
    """As in the thread's `run_sync` for another task, while `send` checks its arguments."""
    tx = coroutine_transaction(sent := Sent())
    tx.send("t", "1")
    tx.send("t", "2", headers=((name, b"") for name in first_then(tx.hand_over_messages, "h")))
    tx.hand_over_messages()
    assert sent.values == [b"1", b"2"]


def test_messages_made_while_the_thread_sends_the_others_are_sent_once() -> None:
    tx = coroutine_transaction(sent := Sent())
    tx.send("t", "1")
    tx.send_many("t", first_then(tx.hand_over_messages, "2", "3", "4"))
    tx.send("t", "5")
    tx.hand_over_messages()
    assert sent.values == [b"1", b"2", b"3", b"4", b"5"]


def test_of_many_messages_none_is_sent_if_one_is_invalid() -> None:
    tx = coroutine_transaction(sent := Sent())
    values: Any = ["1", 2]
    with pytest.raises(InvalidMessageError):
        tx.send_many("t", values)
    tx.hand_over_messages()
    assert sent.values == []


def test_after_a_message_that_could_not_be_sent_the_transaction_can_not_end_well() -> None:
    """A coroutine may catch the error of the `run_sync` that sends its messages; those behind it would be missing."""
    tx = coroutine_transaction(sent := Sent(UnknownTopicError("no topic")))
    tx.send("typo", "1")
    tx.send("t", "2")
    for _ in range(2):
        with pytest.raises(UnknownTopicError):
            tx.hand_over_messages()
    assert sent.values == []
