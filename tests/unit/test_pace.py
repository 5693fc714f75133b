"""The tests' time limits, and which tests are rerun because of them."""

from __future__ import annotations

import importlib
import itertools
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from dualwrite.testing import limits
from fixtures import pace
from fixtures.reruns import PROPERTY, is_time_limit

pytest_plugins = ["pytester"]

Run = Callable[..., pytest.RunResult]


@pytest.mark.parametrize(("text", "found"), [("1", 1.0), ("2.5", 2.5), ("", None)])
def test_the_pace_can_be_set(monkeypatch: pytest.MonkeyPatch, text: str, found: float | None) -> None:
    monkeypatch.setenv(pace.VARIABLE, text)
    assert pace.from_environment() == found


@pytest.mark.parametrize("text", ["0.5", "-1", "0", "inf", "nan", "fast"])
def test_a_pace_below_one_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(pace.VARIABLE, text)
    with pytest.raises(ValueError, match=pace.VARIABLE):
        pace.from_environment()


def test_the_conformance_suites_follow_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are shipped, and know the setting only."""
    assert limits.PACE_VARIABLE == pace.VARIABLE
    try:
        found = []
        for text in ("", "1", "2.5"):
            monkeypatch.setenv(pace.VARIABLE, text)
            found.append(importlib.reload(limits).TIMEOUT)
        assert found == [30, 30, 75]
    finally:
        monkeypatch.undo()
        importlib.reload(limits)


def test_the_measured_pace_is_at_least_one() -> None:
    assert pace.measure() >= 1


def test_until_checks_once_more_at_the_limit() -> None:
    answers = iter([0, None, "there"])
    assert pace.until(lambda: next(answers), pause=0) == "there"


def test_until_raises_a_time_limit_error() -> None:
    waiting = threading.Thread(target=(release := threading.Event()).wait)
    waiting.start()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        for wait in (
            lambda: pace.until(lambda: 0, "it", seconds=0),
            lambda: pace.take(queue.Queue(), "it", seconds=0.01),
            lambda: pace.happened(threading.Event(), "it", seconds=0),
            lambda: pace.joined(waiting, seconds=0.01),
            lambda: pace.ended(process, seconds=0.01),
        ):
            with pytest.raises(pace.TimeLimitError) as caught:
                wait()
            assert is_time_limit(caught.value)
    finally:
        release.set()
        process.communicate()


@pytest.mark.parametrize(
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
    with pytest.raises(AssertionError, match=r"missing after .* 1 of 2.*the rows of id-1") as caught:
        pace.until_received(lambda: [1], "the rows of id-1", at_least=2, seconds=0.01, pause=0.02)
    assert not is_time_limit(caught.value)


def test_records_that_still_come_at_the_limit_are_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    numbers = itertools.count()
    with pytest.raises(pace.TimeLimitError, match="missing after 10 s"):
        pace.until_recorded(lambda: range(next(numbers)), range(1000), seconds=10, pause=0)
    with pytest.raises(pace.TimeLimitError, match="missing after 10 s"):
        pace.until_received(lambda: range(next(numbers)), at_least=1000, seconds=10, pause=0)


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


def test_an_unrelated_timeout_is_not_a_time_limit() -> None:
    for error in (TimeoutError("a socket's"), queue.Empty(), AssertionError("wrong"), pytest.fail.Exception("Timeout")):
        assert not is_time_limit(error)


# --- the plugin, in a pytest of its own -----------------------------------------------------------------------------------

SLOW_ONCE = """
    import logging
    import pytest
    from fixtures.pace import TimeLimitError
    runs = []
    def test_it(record_property):
        record_property("of the test", len(runs))
        runs.append(1)
        logging.getLogger("it").warning("logged in run %d", len(runs))
        if len(runs) == 1:
            raise TimeLimitError("not within 60 s: the first run")
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Run:
    """Runs the text of a test file as in CI; in a separate process if options are given."""
    monkeypatch.setenv("PYTHONPATH", str(request.config.rootpath / "tests"))
    monkeypatch.setenv("CI", "1")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # others take longer to load than all of this
    monkeypatch.setenv(pace.VARIABLE, "1")

    def runs(text: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(text)
        start = pytester.runpytest_subprocess if options else pytester.runpytest_inprocess
        return start("-p", "pytest_timeout", "-p", "xdist", "-p", "fixtures.reruns", *options)

    return runs


@pytest.mark.slow
@pytest.mark.parametrize("options", [("-n", "0"), ("-n", "1")], ids=["one process", "xdist"])
def test_a_test_that_fails_by_a_time_limit_runs_once_more_and_is_reported(
    run: Run, pytester: pytest.Pytester, options: tuple[str, ...]
) -> None:
    result = run(SLOW_ONCE, "--junitxml=junit.xml", *options)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["!*1 FAILED BY A TIME LIMIT AND RAN ONCE MORE*", "*::test_it*", "*the first run*", "*logged in run 1*"]
    )
    junit = (pytester.path / "junit.xml").read_text()
    assert f'name="{PROPERTY}"' in junit
    assert "the first run" in junit
    assert junit.count('name="of the test"') == 1


def test_outside_of_ci_no_test_runs_once_more(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI")
    run(SLOW_ONCE).assert_outcomes(failed=1)


def test_a_second_time_limit_is_a_failure(run: Run) -> None:
    result = run("""
        from fixtures.pace import TimeLimitError
        runs = []
        def test_it():
            runs.append(1)
            raise TimeLimitError(f"run {len(runs)}")
    """)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*TimeLimitError: run 2", "!*1 FAILED BY A TIME LIMIT*", "*run 1*"])
    result.stdout.no_fnmatch_line("*run 3*")


@pytest.mark.parametrize(
    "failure",
    [
        "assert [1] == [1, 2]",
        "raise TimeoutError",
        "pytest.fail('no')",
        "until_recorded(lambda: [1, 1], [1])",
        "raise ExceptionGroup('', [TimeLimitError(), AssertionError()])",
    ],
)
def test_a_wrong_record_never_runs_again(run: Run, failure: str) -> None:
    result = run(f"""
        import pytest
        from fixtures.pace import TimeLimitError, until_recorded
        runs = []
        def test_it():
            runs.append(1)
            if len(runs) == 1:
                {failure}
    """)
    result.assert_outcomes(failed=1)
    result.stdout.no_fnmatch_line("*RAN ONCE MORE*")


def test_a_time_limit_beside_another_failure_never_runs_again(run: Run) -> None:
    result = run("""
        import pytest
        from fixtures.pace import TimeLimitError
        runs = []
        @pytest.fixture
        def checked():
            yield
            assert len(runs) == 2
        def test_it(checked):
            runs.append(1)
            if len(runs) == 1:
                raise TimeLimitError("in the test")
    """)
    result.assert_outcomes(failed=1, errors=1)
    result.stdout.no_fnmatch_line("*RAN ONCE MORE*")


def test_fixtures_are_set_up_again_for_the_second_run(run: Run) -> None:
    result = run("""
        import pytest
        from fixtures.pace import TimeLimitError
        made = []
        @pytest.fixture(scope="session")
        def server():
            made.append("server")
            if made.count("server") == 1:
                raise TimeLimitError("the server did not start")
        @pytest.fixture
        def table(server):
            made.append("table")
        def test_it(table):
            assert made == ["server", "server", "table"]
        def test_next(table):
            assert made == ["server", "server", "table", "table"]
    """)
    result.assert_outcomes(passed=2)


@pytest.mark.slow
def test_a_test_that_hangs_runs_once_more_with_a_time_limit_of_its_own(run: Run) -> None:
    result = run(
        """
        import pytest, time
        runs = []
        @pytest.mark.timeout(0.5)
        def test_once():
            runs.append(1)
            if len(runs) == 1:
                time.sleep(60)
        @pytest.mark.timeout(0.5)
        def test_always():
            time.sleep(60)
    """,
        "-n",
        "0",
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["!*2 FAILED BY A TIME LIMIT*"])


def test_the_limit_of_a_whole_test_follows_the_pace(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pace.VARIABLE, "3")
    result = run(
        """
        import pytest
        @pytest.mark.timeout(7, method="thread")
        def test_marked(request):
            marker = request.node.get_closest_marker("timeout")
            assert (marker.args, marker.kwargs) == ((21,), {"method": "thread"})
        def test_by_the_setting(request):
            assert request.node.get_closest_marker("timeout").args == (300,)
    """,
        "-o",
        "timeout=100",
    )
    result.assert_outcomes(passed=2)


def test_skipped_tests_and_expected_failures_are_not_run_again(run: Run) -> None:
    result = run("""
        import pytest
        from fixtures.pace import TimeLimitError
        def test_skipped():
            pytest.skip("not here")
        @pytest.mark.xfail(raises=TimeLimitError, strict=True)
        def test_expected():
            raise TimeLimitError
    """)
    result.assert_outcomes(skipped=1, xfailed=1)
