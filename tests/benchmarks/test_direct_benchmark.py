"""benchmarks/direct.py compares this checkout with another one."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from benchmarks.benchmark_process import ROOT, run_benchmark
from crash.databases import Databases
from dualwrite.devcluster import DevCluster

Import = Callable[[str], ModuleType]

SHORT = ("--seconds", "0.1", "--rounds", "1", "--writers", "1,2", "--partitions", "1")
WRITER = "import sys; sys.stdin.read(); print(3); sys.exit(int(sys.argv[1]))"


@pytest.mark.soak  # in CI: the benchmarks of the pool and the processor
def test_this_checkout_is_compared_with_another_one(databases: Databases, broker: DevCluster) -> None:
    """Here with itself."""
    scene = databases.scene("postgresql", broker)
    servers = ("--url", scene.url, "--kafka", broker.bootstrap_servers)
    done = run_benchmark("direct.py", "--other", ROOT, *SHORT, *servers, seconds=60)
    assert done.returncode == 0, done.stderr
    for writers in (1, 2):
        assert re.search(rf"\| {writers} \| \d+ µs \| [\d.]+ \([\d. …]+\) \| \d+ \| [\d.]+ \(", done.stdout), done.stdout
    assert "rows and as many messages, one by one" in done.stdout


@pytest.mark.slow
def test_a_folder_without_the_code_is_refused(tmp_path: Path) -> None:
    done = run_benchmark("direct.py", "--other", tmp_path)
    assert (done.returncode, "has no src/dualwrite" in done.stderr) == (2, True)


# --- verification, with writers that report three committed transactions ------------------------------------------------------


@pytest.fixture
def verified(
    benchmark_module: Import, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[list[bytes], list[bytes], int], int]]:
    """Verifies these rows and messages of a writer with this exit code."""
    direct = benchmark_module("direct")
    monkeypatch.setattr(direct.subprocess, "run", lambda *_, **__: None)  # the migration
    made: list[Any] = []

    def verify(rows: list[bytes], messages: list[bytes], code: int = 0) -> int:
        url = f"sqlite:///{tmp_path}/{len(made)}.db"
        monkeypatch.setattr(direct, "_TABLE", "CREATE TABLE direct_orders (item text NOT NULL)")
        checkout = direct.Checkout(tmp_path, url, SimpleNamespace(kafka={}), "topic", "auto", {})
        made.append(checkout)
        engine = create_engine(url)
        with engine.begin() as connection:
            for row in rows:
                connection.execute(text("INSERT INTO direct_orders VALUES (:item)"), {"item": row.decode()})
        engine.dispose()
        monkeypatch.setattr(direct, "committed", lambda *_: [SimpleNamespace(value=lambda one=one: one) for one in messages])
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        checkout._writers.append(subprocess.Popen([sys.executable, "-c", WRITER, str(code)], **pipes))
        found: int = checkout.verify()
        return found

    yield verify
    for checkout in made:
        checkout.close()


def test_three_transactions_are_verified(benchmark_module: Import, verified: Any) -> None:
    contents = [benchmark_module("records").record(0, number) for number in range(3)]

    assert verified(contents, contents) == 3


@pytest.mark.parametrize("where", ["rows", "messages", "both"])
def test_damage_is_noticed(benchmark_module: Import, verified: Any, where: str) -> None:
    records = benchmark_module("records")
    contents = [records.record(0, number) for number in range(3)]
    for damaged in (contents[:2], [*contents, contents[1]], [*contents[:2], contents[2][:-1] + b"?"]):
        with pytest.raises(records.VerificationError):
            verified(*(damaged if where in (what, "both") else contents for what in ("rows", "messages")))


def test_a_writer_that_fails_at_its_end_is_noticed(benchmark_module: Import, verified: Any) -> None:
    contents = [benchmark_module("records").record(0, number) for number in range(3)]

    with pytest.raises(SystemExit, match=r"exit codes: \{0: 7\}"):
        verified(contents, contents, 7)
