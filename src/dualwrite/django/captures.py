"""`capture_messages`: what the blocks of a test have sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dualwrite.testing.sent import SentMessage

_open: list[tuple[str | None, list[SentMessage]]] = []


@contextmanager
def capture_messages(using: str | None = None) -> Iterator[list[SentMessage]]:
    """Collect the messages of the blocks that end in this one without an error, in their order.

    Under TestCase nothing is sent to Kafka, so these are what would have been sent; under TransactionTestCase they have been.
    What a block has sent and then rolled back is not among them.

    Args:
        using: The alias of a database; None: all.
    """
    found: list[SentMessage] = []
    entry = (using, found)
    _open.append(entry)
    try:
        yield found
    finally:
        _open[:] = [each for each in _open if each is not entry]


def note(alias: str, sent: Sequence[SentMessage]) -> None:
    """Note what a block has sent."""
    for using, found in _open:
        if using in (None, alias):
            found.extend(sent)
