"""Time limits: numbers of seconds above 0."""

from __future__ import annotations

from typing import Any

import pytest

from dualwrite.errors import ConfigurationError
from dualwrite.settings import Timeouts


def test_the_defaults_are_valid() -> None:
    assert Timeouts() == Timeouts(claim=30.0, kafka=60.0, delivery=60.0)


@pytest.mark.parametrize("name", ["claim", "kafka", "delivery"])
@pytest.mark.parametrize("bad", [0, -1, -0.5, float("nan"), "5", None, True, [], b"1"])
def test_anything_but_a_positive_number_is_refused_by_name(name: str, bad: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"'{name}'"):
        Timeouts(**{name: bad})


@pytest.mark.parametrize("good", [0.001, 1, 3600])
def test_positive_numbers_are_accepted(good: float) -> None:
    assert Timeouts(claim=good, kafka=good, delivery=good).kafka == good
