"""Which processes end with which others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dualwrite.devcluster import DevCluster, launcher
from fixtures.pace import LIMIT, ended, gone, until

TEMPORARY = """
import time
from dualwrite.devcluster import DevCluster
with DevCluster.temporary() as cluster:
    print(cluster.status().nodes[0].pid, cluster.data_dir, flush=True)
    time.sleep(600)
"""

INTERRUPTED = "import sys, dualwrite.cli as cli; sys.exit(cli.main(['dev', 'up']))"


@pytest.mark.slow
def test_a_temporary_broker_ends_with_its_owner_however_that_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", TEMPORARY], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid, data_dir = owner.stdout.readline().split()
        assert not gone(pid)
        owner.kill()
    until(lambda: gone(pid))
    until(lambda: not Path(data_dir).exists())


@pytest.mark.soak
def test_a_temporary_broker_ends_with_its_launcher() -> None:
    with DevCluster.temporary() as cluster:
        pid = cluster.status().nodes[0].pid or -1
        psutil.Process(pid).parent().kill()  # type: ignore[union-attr]
        until(lambda: gone(pid))


@pytest.mark.soak
def test_ctrl_c_while_starting_leaves_no_broker(state_dir: Path) -> None:
    for step in ("kafka.tools.StorageTool", "kafka.Kafka"):  # while it imports, Python may lose a SIGINT in a callback
        with subprocess.Popen(
            [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as starter:
            until(lambda step=step: commands(state_dir, step))
            starter.send_signal(signal.SIGINT)
            output = starter.communicate(timeout=LIMIT)
        assert starter.returncode == 130, output
        until(lambda: not commands(state_dir))  # a program that was killed ends soon after


@pytest.mark.parametrize("purge", ["", "purge"], ids=["detached", "bound"])
def test_a_broker_that_its_starter_never_knew_of_is_killed(tmp_path: Path, purge: str) -> None:
    """The starter was killed between the start of the launcher and the end of its pipe."""
    program = [sys.executable, "-c", "import time; time.sleep(600)", str(tmp_path)]
    arguments = [str(os.getpid()), str(tmp_path / "log"), purge and str(tmp_path / purge), *program]
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen([sys.executable, "-I", "-S", launcher.__file__, *arguments], stdout=writer) as starting:
        os.close(writer)
        assert ended(starting) == 1
    assert not commands(tmp_path)


def commands(state_dir: Path, word: str = "") -> list[list[str]]:
    """The running programs with an argument in this directory, and with this word as one of their arguments."""
    found = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in found if any(str(state_dir) in each for each in line) and (not word or word in line)]


@pytest.mark.soak
def test_a_detached_broker_outlives_its_starter(state_dir: Path) -> None:
    code = "from dualwrite.devcluster import DevCluster; DevCluster('c').up()"
    subprocess.run([sys.executable, "-c", code], check=True, start_new_session=True)
    assert DevCluster("c").status().ready
