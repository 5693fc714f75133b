"""Which producers and databases a writer test runs on: one of each unless it asks for more.

A fixture of the name (`producer`, `database`, `lanes`) has one value; a test that is parametrized with the name has others.
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
"""For what depends on the producer, and not on the database."""

both_databases = pytest.mark.parametrize("database", thinned(DATABASES, quick=[POSTGRESQL]))
"""For what depends on the database, and not on the producer."""

producers_and_databases = pytest.mark.parametrize(
    ("producer", "database"),
    thinned(
        product(PRODUCERS, DATABASES),
        kept=[(NATIVE, POSTGRESQL), (NATIVE, SQLITE), (LIBRDKAFKA, POSTGRESQL)],
        quick=[(NATIVE, POSTGRESQL)],
    ),
)
"""For what depends on both; what a producer does is the same with all databases, so that one of them is enough for a second."""
