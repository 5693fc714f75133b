"""Each benchmark runs, measures everything that it has, and verifies it: one short run of each command."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.benchmark_process import environment_without_settings, run_benchmark
from dualwrite.devcluster import DevCluster
from spark.session import NOT_OURS, SUBMITTED

ROUND_TRIP = 0.001
OUTBOXES = ("outbox", "outbox-dualwrite", "outbox-notified")
POOLS = ("own", "pool", "pool-journaled", "joined", "joined-journaled")
ROUND_TRIPS = {"naive": 3, **dict.fromkeys(("plain", "writers", *OUTBOXES, *POOLS), 2)}
"""How often a call waits for the servers, at least; a caution against a way around the proxy."""

PACKAGES = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.0.0,org.postgresql:postgresql:42.7.7"
NO_PACKAGES = 3
NO_JARS = 3


def rows_of(output: str, columns: int) -> dict[str, list[str]]:
    """The tables' rows with so many columns: the cells after the first, by the first."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in output.splitlines() if line.startswith("| ")]
    return {first: cells for first, *cells in lines if len(cells) == columns - 1 and not first.startswith(("-", "producer"))}


def number(cell: str) -> float:
    return float(cell.replace(",", "").partition(" ")[0])


@pytest.mark.soak  # it starts its own broker; in CI: without a network, below
def test_the_pool_and_its_alternatives_with_a_network_in_between(postgres_url: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    short = ("--quick", "--seconds", 0.2, "--callers", 2, "--handles", "psycopg", "--callers-kind", "threads")

    done = run_benchmark("pool.py", *short, "--rtt", ROUND_TRIP * 1000, "--url", postgres_url, "--json", file, seconds=270)

    assert done.returncode == 0, done.stderr
    found = {each["case"]["alternative"]: each for each in json.loads(file.read_text())["rounds"]}
    assert set(found) == set(ROUND_TRIPS)
    for name, figures in found.items():
        assert figures["rate"] > 0
        assert (figures["verified"] > 0) == (name != "plain")
        assert (figures["writers"] is not None) == (name in POOLS)
        assert figures["call"]["p50"] >= ROUND_TRIPS[name] * ROUND_TRIP, name
        assert figures["late"] >= 0
    assert done.stdout.count("| plain commit ") == 1


@pytest.mark.soak
@pytest.mark.parametrize(("handle", "kind"), [("psycopg", "asyncio"), ("core", "threads")])
def test_tasks_and_sqlalchemy(broker: DevCluster, postgres_url: str, handle: str, kind: str) -> None:
    servers = ("--url", postgres_url, "--kafka", broker.bootstrap_servers)
    short = ("--quick", "--seconds", 0.2, "--callers", 2, "--handles", handle, "--callers-kind", kind)

    done = run_benchmark("pool.py", *short, *servers)

    assert done.returncode == 0, done.stderr
    for title in ("plain commit", "commit, then produce", "outbox + relay", "pool"):
        assert re.search(
            rf"^\| 0 +\| {kind} +\| {handle} +\| 2 +\| {re.escape(title)} +\| +[\d,]+ \|", done.stdout, re.MULTILINE
        )


@pytest.mark.soak  # in CI: the pool
def test_what_metrics_cost(broker: DevCluster, postgres_url: str) -> None:
    short = ("--quick", "--seconds", 0.2, "--callers", 2, "--url", postgres_url, "--kafka", broker.bootstrap_servers)

    done = run_benchmark("observability.py", *short)

    assert done.returncode == 0, done.stderr
    rows = rows_of(done.stdout, 5)
    for title in ("nothing", "an observer that counts", "metrics, Prometheus", "metrics, OpenTelemetry"):
        assert number(rows[title][0]) > 0


@pytest.mark.soak  # in CI: the pool, which shares all but the processes and the accounts
def test_the_recipe_and_its_alternatives(broker: DevCluster, postgres_url: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    short = ("--no-warm-up", "--seconds", 0.2, "--rounds", 1, "--writers", "1,2", "--json", file)

    done = run_benchmark("recipe.py", *short, "--url", postgres_url, "--kafka", broker.bootstrap_servers)

    assert done.returncode == 0, done.stderr
    found = [(each["case"]["alternative"], each["case"]["processes"]) for each in json.loads(file.read_text())["rounds"]]
    assert sorted(found) == sorted((name, writers) for name in ("plain", "naive", "outbox", "writers") for writers in (1, 2))


@pytest.mark.soak  # in CI: the pool and the processor
def test_the_producers(broker: DevCluster) -> None:
    short = ("--seconds", 0.1, "--rounds", 1, "--ids", 2, "--bulk", 1000, "--bulk-transactions", 2)

    done = run_benchmark("producer.py", *short, "--kafka", broker.bootstrap_servers)

    assert done.returncode == 0, done.stderr
    latencies, rates = rows_of(done.stdout, 7), rows_of(done.stdout, 3)
    assert set(latencies) == {"confluent-kafka", "native, plain", "native, 2PC"}
    assert all(number(cells[0]) > 0 for cells in (*latencies.values(), *rates.values()))
    assert set(rates) == {*latencies, "native, 2PC, send_many", "confluent-kafka, produce_batch"}
    assert done.stdout.count("### ") == 6


@pytest.mark.soak
def test_the_processor_and_its_alternatives(broker: DevCluster, postgres_url: str) -> None:
    short = ("--messages", 200, "--batches", 100, "--members", 2, "--rounds", 1)

    done = run_benchmark("processor.py", *short, "--kafka", broker.bootstrap_servers, "--url", postgres_url)

    assert done.returncode == 0, done.stderr
    assert "Batches of 100: 200 messages, 2 members" in done.stdout
    found = rows_of(done.stdout, 3)
    assert len(found) == 5, "four and the head"
    assert all(number(cells[0]) > 0 for name, cells in found.items() if name != "alternative")


@pytest.mark.soak  # in CI: the processor
def test_the_relay_and_one_that_is_at_least_once(broker: DevCluster, postgres_url: str) -> None:
    short = ("--rows", 2000, "--batches", 500, "--seconds", 0.5, "--rounds", 1)

    done = run_benchmark("relay.py", *short, "--kafka", broker.bootstrap_servers, "--url", postgres_url)

    assert done.returncode == 0, done.stderr
    found = rows_of(done.stdout, 7)
    assert set(found) == {"relay", "dualwrite.Relay, exactly once", "polling relay, at least once"}
    assert all(number(cells[0]) > 0 for name, cells in found.items() if name != "relay")


@pytest.mark.soak  # in CI: the pool
def test_the_journal_while_kafka_is_down(postgres_url: str) -> None:
    short = ("--callers", 2, "--pool-size", 1, "--seconds", 0.2, "--rounds", 1, "--drain", 1000, "--broker-warm-up", 0)

    done = run_benchmark("journal.py", *short, "--url", postgres_url)

    assert done.returncode == 0, done.stderr
    found = rows_of(done.stdout, 4)
    names = {"pool", "pool with a journal", "pool with a journal, Kafka down"}
    assert names <= set(found)
    assert all(number(found[name][0]) > 0 for name in names)
    assert found["alone, a warm broker"][0] == "1,000"


@pytest.mark.soak  # in CI: the relay, without Debezium's 70 jars
def test_the_relay_and_debezium(broker: DevCluster) -> None:
    short = ("--rows", 2000, "--warm-up-rows", 2000, "--singles", 20, "--rounds", 1, "--kills", 1)

    done = run_benchmark("debezium.py", *short, "--kafka", broker.bootstrap_servers)

    if done.returncode == NO_JARS:  # also in CI: its package registry need not have them
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    measured, killed = rows_of(done.stdout, 9), rows_of(done.stdout, 4)
    assert len(measured) == 4, "three and the head"
    assert all(number(cells[0]) > 0 for name, cells in measured.items() if name != "relay")
    assert [cells[:2] for name, cells in killed.items() if name != "relay"] == [["0", "0"]] * 2, "doubled, missing"


@pytest.mark.soak  # it starts its own servers, whose log has the statements
def test_connect_and_create_pool() -> None:
    done = run_benchmark("connect.py", "--rtt", "0,1", "--rounds", 1, "--lanes", 1, "--broker-warm-up", 0, "--statements")

    assert done.returncode == 0, done.stderr
    found = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith(("| connect(", "| create_pool("))]
    assert [cells[1].strip() for cells in found] == ["0", "1"] * 4
    for *_, waited, statements, _, exchanges, connections, requests in found:
        assert int(statements) >= int(exchanges) / 2 > 0
        assert 0 < int(connections) <= int(requests)
        assert waited.strip()
    assert re.search(r"^ +\d+  COMMIT$", done.stdout, re.MULTILINE)


@pytest.mark.soak
def test_calls_and_round_trips() -> None:
    """The limits are there to be lowered: a change that needs more calls than before says why it is worth them."""
    done = run_benchmark("counts.py")

    assert done.returncode == 0, done.stderr
    found = {name: [int(cell) for cell in cells] for name, cells in rows_of(done.stdout, 7).items() if name != "call"}
    calls, functions, files, *waits = found["with writer.transaction()"]
    assert 0 < files < functions < calls < 425
    assert files < 46
    assert all(0 < each <= limit for each, limit in zip(waits, (2, 2, 2), strict=True)), "database, Kafka, requests"
    without = found["pool.run(unit), alone in its group"]
    assert 0 < without[0] < 560
    journaled = found["pool.run(unit), with a journal"]
    assert journaled[0] - without[0] < 80, "calls that a journal costs; its thread may look at the gate meanwhile"
    assert journaled[3:] == without[3:], "round trips and requests: it costs none"
    assert 0 < found["connect(lanes=3), known id"][3] < 25


@pytest.mark.soak
def test_lines_of_each_folder_and_package() -> None:
    done = run_benchmark("lines.py")

    lines = {name: [number(cell) for cell in cells] for name, cells in rows_of(done.stdout, 4).items() if name != "folder"}
    assert {"src", "src, generated", "migrations", "tests", "tools", "benchmarks"} <= set(lines)
    assert all(0 < files < code < every for files, every, code in lines.values())
    limits = {name: cells for name, cells in rows_of(done.stdout, 3).items() if name != "package"}
    assert all(0 <= number(code) <= number(limit) for code, limit in limits.values())


@pytest.mark.soak
@pytest.mark.parametrize("sinks", ["read,dualwrite", "dualwrite,spark"])
def test_the_spark_sinks(broker: DevCluster, postgres_url: str, spark_environment: dict[str, str], sinks: str) -> None:
    ours = {name: value for name, value in environment_without_settings().items() if name not in NOT_OURS}
    environment = {**ours, **spark_environment, "PYSPARK_SUBMIT_ARGS": SUBMITTED}
    small = ("--rows", 1000, "--rounds", 1, "--partitions", 2, "--memory", "768m", "--sinks", sinks, "--packages", PACKAGES)
    servers = ("--url", postgres_url, "--kafka", broker.bootstrap_servers)

    done = run_benchmark("spark.py", *small, *servers, environment=environment)

    if done.returncode == NO_PACKAGES:  # also in CI: its package registry need not have them
        pytest.skip(f"Spark's resolver does not find the packages of Spark's own sinks: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    assert "| this sink" in done.stdout
    assert f"Verified: {1000 if 'read' in sinks else 2000:,} rows" in done.stdout


@pytest.mark.parametrize(
    ("script", "arguments", "why"),
    [
        ("pool", ("--alternatives", "pool,magic"), "magic: choose from"),
        ("pool", ("--callers", "8,0"), "must be at least 1"),
        ("pool", ("--rtt", "0,-1"), "must be at least 0"),
        ("pool", ("--rtt", "0,1", "--kafka", "127.0.0.1:9092"), "a broker of our own"),
        ("pool", ("--callers-kind", "asyncio", "--alternatives", "own"), "nothing to measure"),
        ("spark", ("--sinks", "magic"), "magic: choose from"),
    ],
)
def test_options_that_cannot_be_measured_are_refused(
    benchmark_module: Callable[[str], ModuleType],
    capsys: pytest.CaptureFixture[str],
    script: str,
    arguments: tuple[str, ...],
    why: str,
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        benchmark_module(script).arguments(arguments)

    assert why in capsys.readouterr().err
