"""The producers and databases that a writer test runs on: one of each unless the test asks for more.

The fixtures `producer`, `database` and `lanes` have one value each; a test gets others if it is parametrized with that name.
"""

from __future__ import annotations

from itertools import product

import pytest

from fixtures.tiers import thinned

NATIVE, LIBRDKAFKA = "native", "librdkafka"
PRODUCERS = (NATIVE, LIBRDKAFKA)
POSTGRESQL, SQLITE = "postgresql", "sqlite"
DATABASES = (POSTGRESQL, SQLITE)

both_producers = pytest.mark.parametrize("producer", thinned(PRODUCERS, quick=[NATIVE]))
"""For tests of what depends on the producer but not on the database."""

mostly_native = pytest.mark.parametrize("producer", thinned(PRODUCERS, kept=[NATIVE], quick=[NATIVE]))
"""For tests in which librdkafka only repeats what it does in others: `-m soak` runs it."""

both_databases = pytest.mark.parametrize("database", thinned(DATABASES, quick=[POSTGRESQL]))
"""For tests of what depends on the database but not on the producer."""

producers_and_databases = pytest.mark.parametrize(
    ("producer", "database"),
    thinned(
        product(PRODUCERS, DATABASES),
        kept=[(NATIVE, POSTGRESQL), (LIBRDKAFKA, SQLITE)],
        quick=[(NATIVE, POSTGRESQL)],
    ),
)
"""For tests of what depends on both; producers behave the same with all databases, so CI runs each of both once, soak all."""

native_on_postgresql = pytest.mark.parametrize(
    ("producer", "database"),
    thinned(product(PRODUCERS, DATABASES), kept=[(NATIVE, POSTGRESQL)], quick=[(NATIVE, POSTGRESQL)]),
)
"""For tests in which the other producer and the other database repeat what they do in others: `-m soak` runs them."""

three_lanes = pytest.mark.parametrize("lanes", [3])
"""For tests of writers that rotate their transactions over several ids."""
