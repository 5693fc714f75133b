"""Verifies a measurement: compares what the writers did with the rows and with the messages, record by record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import islice
from typing import Any

from sqlalchemy import Engine

from dualwrite.testing.topics import read_committed
from records import VerificationError, compare
from workload import rows, spent, units, waiting_rows


def verify(name: str, database: Engine, kafka: Mapping[str, Any], topic: str, *, done: Mapping[int, int]) -> int:
    """Compare the writers' units, the rows and the messages.

    Args:
        name: The alternative.
        database: The database.
        kafka: Kafka's settings.
        topic: The measurement's topic.
        done: How many units each writer did, including the warm-up.

    Returns:
        How many committed messages there are.

    Raises:
        VerificationError: Anything differs.
    """
    expected = Counter(unit for writer, number in done.items() for unit in islice(units(writer), number))
    compare(name, "rows", expected, Counter(rows(database)))
    amounts = sum(unit.amount for unit in expected.elements())
    if spent(database) != amounts:
        raise VerificationError(f"{name}: the orders sum up to {amounts}, but the accounts were debited by {spent(database)}")
    waiting = waiting_rows(database)
    if waiting:
        raise VerificationError(f"{name}: {waiting} rows are still in the outbox")
    published = [message.value or b"" for message in read_committed(kafka, topic)]
    messages = Counter(unit.message for unit in expected.elements()) if name != "database" else Counter()
    compare(name, "messages", messages, Counter(published))
    return len(published)
