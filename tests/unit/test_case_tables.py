"""A table of cases as one test: every case runs, and all that fail are shown."""

from __future__ import annotations

import pytest

from fixtures.tables import table


def test_every_case_runs_and_all_failures_are_shown() -> None:
    seen: list[int] = []

    @table(("number", "square"), [(1, 1), (2, 5), (3, 9), (4, 0)])
    def is_square(unit: int, number: int, square: int) -> None:
        seen.append(number)
        if number == 4:
            pytest.fail("four")
        assert unit * number**2 == square

    with pytest.raises(BaseExceptionGroup, match="2 of 4 cases") as caught:
        is_square(unit=1)
    assert seen == [1, 2, 3, 4]
    assert [error.__notes__ for error in caught.value.exceptions] == [["case 2: (2, 5)"], ["case 4: (4, 0)"]]
