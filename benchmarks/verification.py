"""Verifies a measurement: compares what was written with what was published, record by record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from sqlalchemy import Engine

from dualwrite.testing.topics import read_committed
from workload import Unit, rows, spent, waiting_rows

T = TypeVar("T")

_SHOWN: Final = 5


class VerificationError(RuntimeError):
    """Database and topic don't have what the writers wrote: the figures are not valid."""


def verify(name: str, database: Engine, kafka: Mapping[str, Any], topic: str, *, done: int) -> int:
    """Compare the writers' count, the rows and the messages.

    Args:
        name: The alternative.
        database: The database.
        kafka: Kafka's settings.
        topic: The measurement's topic.
        done: How many units the writers did, including the warm-up.

    Returns:
        How many committed messages there are.

    Raises:
        VerificationError: Anything differs.
    """
    written = rows(database)
    if len(written) != done:
        raise VerificationError(f"{name}: the writers did {done} units, but there are {len(written)} rows")
    amounts = sum(unit.amount for unit in written)
    if spent(database) != amounts:
        raise VerificationError(f"{name}: the orders sum up to {amounts}, but the accounts were debited by {spent(database)}")
    waiting = waiting_rows(database)
    if waiting:
        raise VerificationError(f"{name}: {waiting} rows are still in the outbox")
    published = [Unit.parse(message.value or b"") for message in read_committed(kafka, topic)]
    compare(name, Counter([] if name == "database" else written), Counter(published))
    return len(published)


def compare(name: str, expected: Counter[T], found: Counter[T]) -> None:
    """Compare what should be in the topic with what is.

    Raises:
        VerificationError: Something is missing, or there are messages that should not be there.
    """
    lost, extra = expected - found, found - expected
    if lost or extra:
        raise VerificationError(
            f"{name}: {lost.total()} messages are missing ({list(lost)[:_SHOWN]}), "
            f"{extra.total()} are unexpected ({list(extra)[:_SHOWN]})"
        )
