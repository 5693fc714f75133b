"""The benchmark of `connect` and `create_pool`: what it reports, and that it counts what is sent."""

import re
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from benchmarks.benchmark_process import run_benchmark


@pytest.fixture
def connect(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("connect")


def test_round_trips_waited_for_are_what_the_distance_adds(
    connect: ModuleType, benchmark_module: Callable[[str], ModuleType]
) -> None:
    counts = benchmark_module("counts").Counts
    passed = benchmark_module("network").Passed(counts(connections=1, exchanges=20), counts(connections=2, exchanges=7))

    def line(round_trip: float, *durations: float) -> Any:
        opened = [connect.Opened(duration, passed) for duration in durations]
        return connect.Line("connect", round_trip, opened, Counter({"SELECT 1": 3, "BEGIN": 2}))

    near, far = line(0.0, 0.010, 0.020, 0.005), line(0.002, 0.040, 0.090, 0.050)

    *_, first, second = connect.report([near, far]).splitlines()
    cells = [[cell.strip() for cell in each.strip("|").split("|")] for each in (first, second)]
    assert cells[0] == ["connect", "0", "10.0", "5.0 … 20.0", "–", "5", "1", "20", "2", "7"]  # noqa: RUF001  (no value)
    assert cells[1] == ["connect", "2", "50.0", "40.0 … 90.0", "20.0", "5", "1", "20", "2", "7"]
    assert connect.statements_report(near).splitlines() == ["connect:", "   3  SELECT 1", "   2  BEGIN"]


@pytest.mark.soak  # it starts its own servers, whose log has the statements
def test_statements_and_exchanges_are_counted() -> None:
    done = run_benchmark("connect.py", "--rtt", 1, "--rounds", 1, "--lanes", 1, "--broker-warm-up", 0, "--statements")

    assert done.returncode == 0, done.stderr
    found = re.findall(
        r"^\| (connect|create_pool)\(.*\| +(\d+) \| +(\d+) \| +(\d+) \| +(\d+) \| +(\d+) \|$", done.stdout, re.MULTILINE
    )
    assert [name for name, *_ in found] == ["connect", "connect", "create_pool", "create_pool"]
    for _, *numbers in found:
        statements, _, exchanges, connections, requests = map(int, numbers)
        assert statements >= exchanges / 2 > 0
        assert 0 < connections <= requests
    assert re.search(r"^ +\d+  COMMIT$", done.stdout, re.MULTILINE)
