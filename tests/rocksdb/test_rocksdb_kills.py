"""A writer killed by SIGKILL at random moments: the user's data and the row always agree, and nothing acknowledged is lost."""

from __future__ import annotations

import random
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
from rocksdb_scene import ID, stored

from dualwrite.stores.rocksdb import RocksDBStore
from fixtures.fork_server import ForkedProcess
from fixtures.pace import ended

HERE = Path(__file__).parent
KILLS = 25
FAMILIES = ("default", "orders", "customers")


def started(path: Path) -> ForkedProcess:
    return ForkedProcess("killed_writer", [str(path)], folder=HERE, stdout=subprocess.PIPE)


def write_until_killed(path: Path, after: float) -> tuple[int, int, int] | None:
    """Run a writer for so many seconds after its first commit; return the last number it reported as committed."""
    process = started(path)
    assert process.stdout is not None
    lines = [process.stdout.readline()]
    kill = threading.Timer(after, process.kill)
    kill.start()
    lines += process.stdout.readlines()
    kill.join()
    assert ended(process) == -9
    process.stdout.close()
    whole = [line for line in lines if line.endswith("\n")]
    return tuple(map(int, whole[-1].split())) if whole else None  # type: ignore[return-value]


def agreed(path: Path) -> tuple[int, int, int]:
    """Fence, number and total, on which the row and all column families must agree."""
    with RocksDBStore(path) as store:
        row = store.read(ID)
        assert row is not None
        kept = {tuple(int(stored(store, key, family) or 0) for key in (b"claim", b"in claim", b"total")) for family in FAMILIES}
        assert len(kept) == 1
        claim, number, total = kept.pop()
        if row.transaction_number:
            assert (claim, number) == (row.fence, row.transaction_number)
            assert (row.prepared_state.producer_id, row.prepared_state.epoch) == (claim, number)  # type: ignore[union-attr]
        else:  # killed between its claim and its first commit
            assert claim < row.fence
        return row.fence, row.transaction_number, total


@pytest.mark.slow
def test_a_writer_killed_repeatedly(path: Path, tmp_path: Path) -> None:
    chance = random.Random(939)
    total = transactions = 0
    for kill in range(KILLS):
        said = write_until_killed(path, chance.uniform(0, 0.15))
        copy = tmp_path / "copy"
        shutil.copytree(path, copy)  # what the kill left, before recovery
        found = agreed(copy)
        assert agreed(path) == found
        shutil.rmtree(copy)
        assert found[0] == kill + 1  # nothing of a claim was lost
        assert said is not None
        assert found[:2] == said[:2] or (found[0], found[1]) == (said[0], said[1] + 1)  # at most the one in commit
        assert found[2] == total + found[1]
        total = found[2]
        transactions = total
    print(f"{KILLS} kills, {transactions} transactions, all agreed")  # noqa: T201  (the number is what the test is for)


def seconds_to_the_first_commit(path: Path) -> float:
    """On an empty folder, on this machine."""
    began = time.monotonic()
    with started(path) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.kill()
    return time.monotonic() - began


@pytest.mark.soak
def test_a_writer_killed_while_it_opens(path: Path, tmp_path: Path) -> None:
    """Without waiting for a commit: the kill may come while the database and its column families are being created."""
    chance = random.Random(8)
    seconds_to_the_first_commit(tmp_path / "first")  # this one waits for the process that forks
    opening = seconds_to_the_first_commit(tmp_path / "second")
    for _ in range(40):
        with started(path) as process:
            time.sleep(chance.uniform(0, opening))
            process.kill()
        assert process.returncode == -9
        with RocksDBStore(path, column_families={"orders": None, "customers": None}) as store:
            store.check()
            if store.read(ID) is not None:
                agreed(path)
