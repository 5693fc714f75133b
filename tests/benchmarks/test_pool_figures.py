"""The pure parts of the pool's benchmark: statistics, phases, the order of measurements, the picture."""

import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree.ElementTree import fromstring

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.benchmark_process import ROOT

Import = Callable[[str], ModuleType]

POINTS = ("store.begin", "after_begin", "group_after_units", "after_prepare", "after_db_commit", "after_kafka_commit")


@pytest.fixture
def figures(benchmark_module: Import) -> Callable[..., Any]:
    """Makes the figures of one measurement."""
    made = benchmark_module("figures")
    conditions = benchmark_module("machine").Conditions

    def make(alternative: str, *, rate: float = 100.0, log: float = 1.0, client: float = 0.0, busy: float = 0.0) -> Any:
        latency = made.Latency(0.001, 0.002)
        return made.Figures(
            alternative=alternative,
            writers=8,
            units=int(rate * 10),
            seconds=10.0,
            call=latency,
            visible=latency,
            after_call=latency,
            delivered=None,
            backlog=0,
            drained=0.0,
            transactions=1.0,
            rows=1.0,
            log=log,
            cpu_writers=client,
            cpu_relay=None,
            cpu_database=0.0002,
            cpu_kafka=None,
            verified=5,
            conditions=conditions(busy, 0.01, 1.5),
        )

    return make


@pytest.fixture
def point(benchmark_module: Import) -> Any:
    return benchmark_module("pool_cases").Point("threads", "psycopg", 8)


# --- what is measured ---------------------------------------------------------------------------------------------------------


def test_alternatives_take_turns_at_being_first(benchmark_module: Import) -> None:
    rotated = benchmark_module("cases").rotated

    assert [list(rotated("abc", by)) for by in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]


def test_writers_are_measured_with_few_threads_only(benchmark_module: Import, point: Any) -> None:
    obstacle = benchmark_module("pool_cases").obstacle

    assert obstacle(point, "writers", most_writers=8) is None
    assert "--most-writers" in obstacle(point, "writers", most_writers=7)
    assert "thread" in obstacle(replace(point, kind="asyncio"), "writers", most_writers=8)
    assert obstacle(replace(point, kind="asyncio"), "pool", most_writers=8) is None


def test_an_order_has_200_bytes_and_the_name_of_its_caller(benchmark_module: Import) -> None:
    order = benchmark_module("orders").Order(17, 12345)

    assert len(order.body.encode()) == 200
    assert benchmark_module("workload").place_of(order.body.encode()) == (17, 12345)


def test_plain_commits_have_a_connection_per_caller_or_some_numbers_of_connections(
    benchmark_module: Import, point: Any
) -> None:
    connections_of = benchmark_module("pool").connections_of

    assert connections_of(point, "plain", None) == [8]
    assert connections_of(point, "plain", [16, 2, 8]) == [2, 8]
    assert connections_of(point, "pool", [2]) == [8]


def test_the_best_plain_commits_of_a_round_count(benchmark_module: Import, figures: Callable[..., Any], point: Any) -> None:
    pool = benchmark_module("pool")
    place = ("--callers", "8", "--callers-kind", "threads", "--handles", "psycopg")
    options = pool.arguments(
        [*place, "--alternatives", "plain,pool", "--plain-connections", "2,4,8", "--no-phases", "--rounds", "2"]
    )
    rates = {2: 100.0, 4: 300.0, 8: 200.0}
    measured = []

    class Bench:
        writers = (SimpleNamespace(call=lambda method: {"pool_size": 4}[method]),)

        def measure(self, case: Any, seconds: float) -> Any:
            del seconds
            measured.append((case.alternative, case.connections))
            return figures(case.alternative, rate=rates[case.connections])

    results = benchmark_module("pool_figures").Results(pool.Schedule(Bench(), options).rounds())

    assert len(measured) == 2 * 4
    assert results.at(point, "plain").spread(lambda each: each.rate).median == 300
    assert results.connections(point) == [4, 4]
    assert results.of_plain(point, "pool").median == 200 / 300
    assert results.writers(point, "pool").median == 4
    assert results.writers(point, "plain") is None


def test_points_are_measured_at_each_distance(benchmark_module: Import) -> None:
    pool = benchmark_module("pool")
    place = ("--callers", "1", "--callers-kind", "threads", "--handles", "core")

    near, far = (point for point, _ in pool.cases(pool.arguments([*place, "--rtt", "0,0.5"])))

    assert (str(near), near.round_trip) == ("threads, core, 1 caller", 0.0)
    assert (str(far), far.round_trip) == ("threads, core, 1 caller, 0.5 ms away", 0.0005)
    assert benchmark_module("pool_cases").PoolCase.of(far, "pool", pool_size=None).round_trip == 0.0005
    assert pool.arguments(place).pool_size is None, "the pool chooses"


def test_a_block_has_a_writer_and_units_have_what_the_pool_chooses(benchmark_module: Import, point: Any) -> None:
    pool_size = benchmark_module("pool_cases").pool_size

    assert pool_size(point, "own", None, most_writers=32) == 8
    assert pool_size(replace(point, callers=128), "own", None, most_writers=32) == 32
    assert pool_size(point, "own", 3, most_writers=32) == 3
    assert pool_size(point, "pool", None, most_writers=32) is None
    assert pool_size(point, "pool", 3, most_writers=32) == 3


def test_every_alternative_is_warmed_up_where_it_has_most_callers(benchmark_module: Import, point: Any) -> None:
    pool = benchmark_module("pool")
    options = pool.arguments(["--callers", "8,128,32", "--callers-kind", "threads", "--handles", "psycopg"])

    found = {name: point.callers for point, name in pool.warm_ups(list(pool.cases(options)))}

    assert found == {**dict.fromkeys(options.alternatives, 128), "writers": 32}


# --- statistics ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.01, 1), (0.5, 5), (0.51, 6), (0.9, 9), (0.99, 10), (1.0, 10)])
def test_a_percentile_is_the_least_value_that_the_share_does_not_exceed(
    benchmark_module: Import, share: float, expected: int
) -> None:
    percentile = benchmark_module("figures").percentile

    assert percentile(range(10, 0, -1), share) == expected
    assert percentile([], share) is None


def test_ratios_are_taken_round_by_round(benchmark_module: Import, figures: Callable[..., Any], point: Any) -> None:
    module = benchmark_module("pool_figures")
    rates = {1: (100, 50), 2: (10, 20), 3: (200, 300)}
    measured = []
    for number, (plain, pool) in rates.items():
        both = [figures("plain", rate=plain), figures("pool", rate=pool)]
        measured += [module.Measured(number, point, each) for each in (both if number % 2 else reversed(both))]

    results = module.Results(measured)

    ratio = results.of_plain(point, "pool")
    assert (ratio.median, ratio.least, ratio.greatest) == (1.5, 0.5, 2.0)
    assert results.alternatives(point) == ["plain", "pool"]
    assert (results.rounds, results.are_few, results.verified) == (3, False, 30)
    assert results.log_of_outbox(point, "pool") is None, "there was no outbox"


def test_calls_are_compared_round_by_round_and_what_a_pool_ended_with_is_kept(
    benchmark_module: Import, figures: Callable[..., Any], point: Any
) -> None:
    module, latency = benchmark_module("pool_figures"), benchmark_module("figures").Latency
    measured = []
    for number, (plain, pool, writers) in {1: (0.001, 0.004, 2), 2: (0.002, 0.002, 8), 3: (0.001, 0.003, 4)}.items():
        measured += [
            module.Measured(number, point, replace(figures("plain"), call=latency(plain, 2 * plain)), 8),
            module.Measured(
                number, point, replace(figures("pool"), call=latency(pool, 3 * plain)), writers=writers, late=pool / 100
            ),
        ]

    results = module.Results(measured)

    assert results.call_of_plain(point, "pool", "p50").median == 3
    assert results.call_of_plain(point, "pool", "p99").median == 1.5
    assert (results.writers(point, "pool").median, results.writers(point, "pool").greatest) == (4, 8)
    assert results.late(point, "pool").median == 0.00003
    assert results.late(point, "plain") is None
    text = benchmark_module("pool_report").report(results, [], AROUND, notes=[])
    row = next(line for line in text.splitlines() if "| pool " in line)
    assert [cell.strip() for cell in row.split("|")][-4:-1] == ["4", "1.0", "30"], "writers, units a group, microseconds"


def test_tasks_are_also_compared_with_the_plain_commits_of_threads(
    benchmark_module: Import, figures: Callable[..., Any], point: Any
) -> None:
    module = benchmark_module("pool_figures")
    tasks = replace(point, kind="asyncio")
    rates = {(point, "plain"): 1000, (point, "pool"): 800, (tasks, "plain"): 500, (tasks, "pool"): 900}
    results = module.Results(module.Measured(1, at, figures(name, rate=rate)) for (at, name), rate in rates.items())

    assert results.of_plain(tasks, "pool").median == 1.8
    assert results.of_threads_plain(tasks, "pool").median == 0.9
    assert results.of_threads_plain(point, "pool") is None
    text = benchmark_module("pool_report").report(results, [], AROUND, notes=[])
    assert "900 |     1.80 | 1.80 … 1.80 | 0.90 (0.90 … 0.90) |" in text
    for baseline in ("AsyncConnections", "AsyncEngine", "synchronous connections"):
        assert baseline in text.replace("\n", " ")


def test_the_log_is_compared_with_that_of_the_outbox(benchmark_module: Import, figures: Callable[..., Any], point: Any) -> None:
    module = benchmark_module("pool_figures")
    results = module.Results(
        [module.Measured(1, point, figures("outbox", log=800.0)), module.Measured(1, point, figures("pool", log=300.0))]
    )

    assert results.log_of_outbox(point, "pool").median == 0.375
    assert results.of_plain(point, "pool") is None
    assert results.are_few
    (outbox, pool) = module.summary(results)
    assert (outbox["alternative"], outbox["log"], outbox["handle"]) == ("outbox", 800.0, "psycopg")
    assert pool["log of outbox"]["median"] == 0.375
    assert pool["relay"] is None
    assert pool["together"] == 0.0002, "what is unknown counts as 0"


# --- phases -------------------------------------------------------------------------------------------------------------------


def marks(module: ModuleType, thread: int, began: float, *, units: int, points: tuple[str, ...] = POINTS) -> list[Any]:
    """The marks of a group whose phases take 1, 2, 3, 4 and 5 seconds."""
    at = {point: began + sum(range(place + 1)) for place, point in enumerate(POINTS)}
    found = [module.Mark(thread, point, at[point]) for point in points]
    found += [module.Mark(thread, "group_after_unit", at["after_begin"] + 0.5) for _ in range(units)]
    return sorted(found, key=lambda mark: mark.at)


def test_groups_are_separated_by_thread(benchmark_module: Import) -> None:
    module = benchmark_module("phases")
    every = [*marks(module, 1, 0.0, units=2), *marks(module, 2, 3.0, units=4), *marks(module, 1, 20.0, units=1)]

    first, second, other = module.groups_of(sorted(every, key=lambda mark: mark.at))

    assert (first.units, second.units, other.units) == (2, 1, 4)
    assert list(first.seconds.values()) == [1, 2, 3, 4, 5]
    assert second.seconds[module.WAITING] == 5.0
    assert (other.began, other.ended) == (3.0, 18.0)


def test_a_failed_group_is_left_out(benchmark_module: Import) -> None:
    module = benchmark_module("phases")
    failed = marks(module, 1, 0.0, units=3, points=POINTS[:4])
    cut_off = marks(module, 1, -50.0, units=1, points=POINTS[1:])

    (found,) = module.groups_of([*cut_off, *failed, *marks(module, 1, 100.0, units=2)])

    assert (found.units, found.began) == (2, 100.0)


def test_the_means_of_groups(benchmark_module: Import) -> None:
    module = benchmark_module("phases")
    groups = list(module.groups_of([*marks(module, 1, 0.0, units=2), *marks(module, 1, 15.0, units=4)]))

    means = module.means(groups, [0.1, 0.3], writers=2)

    assert (means.groups, means.units, means.seconds) == (2, 3.0, 30.0)
    assert means.queued == pytest.approx(0.2)
    assert means.in_turn == pytest.approx(6 / 30)
    assert means.occupied == pytest.approx(0.5), "one of two writers has worked all the time"
    with pytest.raises(ValueError, match="no group"):
        module.means([], [], writers=2)


@pytest.mark.parametrize(
    ("client", "busy", "turn", "other", "binds"),
    [
        (0.9, 0.99, 0.99, 0.0, "Python"),
        (0.5, 0.99, 0.99, 0.0, "2 processors"),
        (0.5, 0.5, 0.9, 0.5, "SQL"),
        (0.5, 0.5, 0.5, 1.4, "2 writers"),
        (0.5, 0.5, 0.5, 0.5, "steps of a group"),
        (0.5, 0.5, 0.2, 0.2, "callers"),
    ],
)
def test_the_bottleneck_is_named(
    benchmark_module: Import,
    figures: Callable[..., Any],
    point: Any,
    client: float,
    busy: float,
    turn: float,
    other: float,
    binds: str,
) -> None:
    module, phases = benchmark_module("pool_figures"), benchmark_module("phases")
    mean = {phases.WAITING: 1.0, **dict.fromkeys(phases.PHASES, 0.0), phases.SQL: turn, "EndTxn": other}
    clocked = module.Clocked(
        point,
        phases.Phases(groups=10, units=5.0, seconds=10.0, writers=2, queued=0.1, mean=mean),
        figures("pool", rate=1000.0, client=client / 1000, busy=busy),
        processors=2,
    )

    assert binds in clocked.binds


# --- the surroundings ---------------------------------------------------------------------------------------------------------


def test_the_surroundings_have_what_figures_depend_on(benchmark_module: Import) -> None:
    module = benchmark_module("surroundings")

    around = module.without_database("4.2.2, our own", Namespace(rounds=3), {"other": "x"})

    assert datetime.fromisoformat(around["date"]).tzinfo == UTC
    assert around["dualwrite"].endswith(f"commit {module.commit(ROOT)}")
    assert {"psycopg", "SQLAlchemy", "confluent-kafka", "librdkafka", "machine", "kafka", "other"} <= set(around)
    assert "producer" not in around
    assert "rounds" not in module.line(around)


def test_a_folder_that_is_no_checkout_has_no_commit(benchmark_module: Import, tmp_path: Path) -> None:
    assert benchmark_module("surroundings").commit(tmp_path) == "unknown"


# --- the report and the picture -----------------------------------------------------------------------------------------------

AROUND = {
    "postgresql": {"server_version": "18", "fsync": "on", "synchronous_commit": "on"},
    "machine": "2 processors",
    "options": {"secret": "x"},
}


def test_the_report_has_every_alternative_and_its_warnings(
    benchmark_module: Import, figures: Callable[..., Any], point: Any
) -> None:
    module = benchmark_module("pool_figures")
    measured = [module.Measured(1, point, figures(name, rate=rate)) for name, rate in (("plain", 1000), ("pool", 1100))]
    around = {**AROUND, "postgresql": {**AROUND["postgresql"], "fsync": "off"}}

    text = benchmark_module("pool_report").report(module.Results(measured), [], around, notes=["Not measured: x."])

    assert "| threads     | psycopg | 8       | pool         | 1,100 |     1.10 | 1.10 … 1.10 | –" in text  # noqa: RUF001  (no value)
    for expected in ("fewer than 3 rounds", "not durable", "load average up to 1.5", "1.0% at most", "Not measured: x."):
        assert expected in text
    assert "secret" not in text


def test_the_picture_shows_each_ratio(benchmark_module: Import, figures: Callable[..., Any], point: Any) -> None:
    module = benchmark_module("pool_figures")
    measured = [
        module.Measured(1, replace(point, callers=callers, kind=kind), figures(name, rate=rate))
        for kind in ("threads", "asyncio", "uvloop")
        for callers in (1, 32)
        for name, rate in (("plain", 1000), ("naive", 50), ("pool", 1500))
        if not (name == "naive" and callers == 1)
    ]

    root = fromstring(benchmark_module("pool_report").picture(module.Results(measured), AROUND))

    drawn = [element for element in root.iter() if element.tag.endswith("rect") and "translate" not in element.attrib]
    naive, pool = ([bar for bar in drawn if bar.get("class") == series] for series in ("s0", "s1"))
    assert (len(naive), len(pool)) == (1 + 3, 1 + 6), "one in the legend, the others in three panels"
    heights = {float(bar.attrib["height"]) for bar in pool[1:]}
    assert len(heights) == 1
    assert heights.pop() > float(naive[1].attrib["height"])
    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    for expected in ("pool", "commit, then produce", "threads, psycopg", "uvloop, psycopg", "32", "1.5", ".05"):
        assert expected in words


def test_the_picture_has_a_panel_for_each_distance(benchmark_module: Import, figures: Callable[..., Any], point: Any) -> None:
    module = benchmark_module("pool_figures")
    names = [name for name in benchmark_module("pool_cases").ALTERNATIVES if name != "plain"]
    measured = [
        module.Measured(1, replace(point, round_trip=round_trip), figures(name))
        for round_trip in (0.0, 0.0002)
        for name in ("plain", *names)
    ]

    root = fromstring(benchmark_module("pool_report").picture(module.Results(measured), AROUND))

    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"threads, psycopg", "threads, psycopg, round trip 0.2 ms"} <= set(words)
    labels = [
        float(element.attrib["x"]) for element in root.iter() if element.tag.endswith("text") and element.get("y") == "68"
    ]
    assert len(labels) == len(names)
    assert labels[-1] < 920 - 100, "there is room for the last label"


def test_text_in_a_picture_is_escaped(benchmark_module: Import) -> None:
    chart = benchmark_module("chart")
    spread = benchmark_module("figures").Spread(1.0, 1.0, 1.0)
    panels = [chart.Panel("<p>", {"1 < 2": {"a": spread}})]

    drawn = chart.Chart("a & b", '"', "x", {"a": "<&>"}, "one", panels).svg()

    words = [element.text for element in fromstring(drawn).iter() if element.tag.endswith("text")]
    assert {"a & b", '"', "<p>", "1 < 2", "<&>"} <= set(words)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(values=st.lists(st.floats(0, 1e4), max_size=5))
def test_an_axis_shows_all_values_with_few_round_numbers(benchmark_module: Import, values: list[float]) -> None:
    chart = benchmark_module("chart")

    top = chart.scale_top(values)
    shown = chart.ticks(top)

    assert top > max([1.0, *values])
    assert shown[0] == 0
    assert math.isclose(shown[-1], top)
    assert 2 <= len(shown) <= 7
