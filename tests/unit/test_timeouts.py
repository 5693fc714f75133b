"""Time limits: numbers of seconds above 0, at most eleven days."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from dualwrite import PoolOptions
from dualwrite.errors import ConfigurationError
from dualwrite.processor.options import ProcessorOptions
from dualwrite.settings import Settings, Timeouts
from fixtures.tables import table


def test_the_defaults_are_valid() -> None:
    assert Timeouts() == Timeouts(claim=30.0, kafka=60.0, delivery=None)
    assert (Timeouts().for_delivery, Timeouts().in_pool().for_delivery) == (60.0, 20.0)


def test_a_limit_that_was_given_is_kept_in_a_pool() -> None:
    given = Timeouts(delivery=60.0)
    assert given.in_pool() == given


@table(
    ("name", "bad"),
    [
        *product(["claim", "kafka", "delivery"], [0, -1, -0.5, float("nan"), "5", True, [], b"1"]),
        ("claim", None),
        ("kafka", None),
    ],
)
def test_anything_but_a_positive_number_is_refused_by_name(name: str, bad: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"'{name}'"):
        Timeouts(**{name: bad})


@table("bad", [math.inf, 1e11, 1_000_001, 10**400], ids=["inf", "1e11", "1000001", "10**400"])
@table(
    "give",
    [
        lambda seconds: Timeouts(claim=seconds),
        lambda seconds: Timeouts(kafka=seconds),
        lambda seconds: Timeouts(delivery=seconds),
        lambda seconds: PoolOptions(timeout=seconds),
        lambda seconds: PoolOptions(lease=seconds),
        lambda seconds: ProcessorOptions(pause=seconds),
        lambda seconds: ProcessorOptions(longest_pause=seconds),
    ],
    ids=["claim", "kafka", "delivery", "pool timeout", "lease", "pause", "longest_pause"],
)
def test_a_limit_that_is_too_long_for_a_wait_is_refused(give: Callable[[float], object], bad: float) -> None:
    with pytest.raises(ConfigurationError, match="up to 1000000"):
        give(bad)


def test_a_variable_with_an_infinite_limit_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'kafka'"):
        Settings.from_environment({"DUALWRITE_TIMEOUT_KAFKA": "inf"})


@pytest.mark.parametrize("good", [0.001, 1, 3600, 1_000_000])
def test_positive_numbers_are_accepted(good: float) -> None:
    assert Timeouts(claim=good, kafka=good, delivery=good).kafka == good
