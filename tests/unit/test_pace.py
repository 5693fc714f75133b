"""The tests' time limits, and which tests are rerun because of them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from dualwrite import testing
from fixtures import pace
from fixtures.reruns import PROPERTY, is_time_limit
from fixtures.tables import table

pytest_plugins = ["pytester"]


def test_the_conformance_suites_follow_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are shipped, and know the setting only."""
    assert testing.PACE_VARIABLE == pace.VARIABLE
    try:
        found = []
        for text in ("", "1", "2.5"):
            monkeypatch.setenv(pace.VARIABLE, text)
            found.append(importlib.reload(testing).TIMEOUT)
        assert found == [30, 30, 75]
    finally:
        monkeypatch.undo()
        importlib.reload(testing)


@table(
    ("reads", "error"),
    [
        ([[], [1], [2, 1]], None),
        ([{"a": 1}, {"a": 3, "b": 0}], None),
        ([[1], [1, 1], [1, 2]], "more than expected"),  # a duplicate is not waited away
        ([{"a": 4}, {"a": 3}], "more than expected"),
        ([[3]], "more than expected"),
        ([[1]], "missing"),  # nothing comes any more: it is lost
        ([[]], "missing"),
    ],
)
def test_a_wrong_record_is_not_a_time_limit(reads: list[Any], error: str | None) -> None:
    expected: Any = {"a": 3} if isinstance(reads[0], dict) else [1, 2]
    coming = iter(reads)
    last: Any = []

    def read() -> Any:
        nonlocal last
        last = next(coming, last)
        return last

    if error is None:
        return pace.until_recorded(read, expected, pause=0)
    with pytest.raises(AssertionError, match=error) as caught:
        pace.until_recorded(read, expected, seconds=0.01, pause=0.02)
    assert not is_time_limit(caught.value)
    return None


def test_a_lost_record_is_not_a_time_limit() -> None:
    coming = iter([[], [1], [1, 2], [1, 2, 3]])
    assert pace.until_received(lambda: next(coming), at_least=2, pause=0) == [1, 2]
    with pytest.raises(AssertionError, match=r"(?s)missing after .* 1 of 2.*the rows of id-1") as caught:
        pace.until_received(lambda: [1], "the rows of id-1", at_least=2, seconds=0.01, pause=0.02)
    assert not is_time_limit(caught.value)


def test_an_error_that_hides_a_wrong_record_is_not_a_time_limit() -> None:
    def hidden() -> None:
        try:
            raise AssertionError("[1] == [1, 2]")
        finally:
            raise pace.TimeLimitError("clean-up took too long")

    with pytest.raises(pace.TimeLimitError) as caught:
        hidden()
    assert not is_time_limit(caught.value)
    assert not is_time_limit(ExceptionGroup("both", [pace.TimeLimitError("a"), AssertionError("b")]))
    assert is_time_limit(ExceptionGroup("both", [pace.TimeLimitError("a"), pace.TimeLimitError("b")]))


# --- the plugin, in a pytest of its own -----------------------------------------------------------------------------------

TEXT = """
    import logging
    import time
    import pytest
    from collections import Counter
    from fixtures.pace import TimeLimitError, until_recorded

    runs = Counter()

    def first(name):
        runs[name] += 1
        logging.getLogger("it").warning("%s in run %d", name, runs[name])
        return runs[name] == 1

    @pytest.fixture(scope="session")
    def server():
        if first("server"):
            raise TimeLimitError("the server did not start")

    @pytest.fixture
    def checked():
        yield
        assert False, "what the test has left"

    def test_passes_in_its_second_run(record_property):
        record_property("of the test", runs["slow once"])
        if first("slow once"):
            raise TimeLimitError("not within 60 s: the first run")

    def test_passes_once_its_server_has_started(server):
        assert runs["server"] == 2

    @pytest.mark.timeout(0.5)
    def test_hangs_once():
        if first("hanging"):
            time.sleep(60)

    @pytest.mark.timeout(7, method="thread")
    def test_has_a_limit_by_the_pace(request):
        marker = request.node.get_closest_marker("timeout")
        assert (marker.args, marker.kwargs) == ((14,), {"method": "thread"})

    @pytest.mark.xfail(raises=TimeLimitError, strict=True)
    def test_is_expected_to_fail():
        raise TimeLimitError

    def test_fails_in_each_run():
        first("slow twice")
        raise TimeLimitError("always")

    def test_leaves_something_wrong(checked):
        if first("beside another failure"):
            raise TimeLimitError("in the test")

    def wrong():
        until_recorded(lambda: [1, 1], [1])

    def failing():
        pytest.fail("no")

    def grouped():
        raise ExceptionGroup("", [TimeLimitError(), AssertionError()])

    def unrelated():
        raise TimeoutError

    @pytest.mark.parametrize("fail", [wrong, failing, grouped, unrelated])
    def test_never_runs_again(fail):
        if first(fail.__name__):
            fail()
"""


def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, *options: str, ci: str) -> pytest.RunResult:
    """The test file above in a pytest of its own."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # others take longer to load than all of this
    monkeypatch.setenv(pace.VARIABLE, "2")
    pytester.makepyfile(TEXT)
    return pytester.runpytest_subprocess("-p", "pytest_timeout", "-p", "xdist", "-p", "fixtures.reruns", *options)


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["0", "1"])
def test_what_fails_only_by_a_time_limit_runs_once_more_and_is_reported(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, processes: str
) -> None:
    """A wrong record never does."""
    result = run(pytester, monkeypatch, "-n", processes, "--junitxml=junit.xml", ci="1")
    result.assert_outcomes(passed=4, xfailed=1, failed=6, errors=1)
    result.stdout.fnmatch_lines(["!*4 FAILED BY A TIME LIMIT AND RAN ONCE MORE*", "*::test_*", "*the first run*"])
    result.stdout.fnmatch_lines(["*slow once in run 1*"])
    for name in ("wrong", "failing", "grouped", "unrelated", "beside another failure"):
        result.stdout.no_fnmatch_line(f"*{name} in run 2*")
    result.stdout.no_fnmatch_line("*slow twice in run 3*")
    junit = (pytester.path / "junit.xml").read_text()
    assert f'name="{PROPERTY}"' in junit
    assert junit.count('name="of the test"') == 1
