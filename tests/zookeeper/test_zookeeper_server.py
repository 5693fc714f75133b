"""The ZooKeeper server that the tests start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import jgo.util.http
import pytest
import requests
from kazoo.client import KazooClient
from kazoo.handlers.threading import KazooTimeoutError
from zookeeper_scene import until

from dualwrite.devcluster import DevClusterError, programs
from dualwrite.testing.zookeeper import ZOOKEEPER_VERSION, ZooKeeperServer, ZooKeeperStartError


@pytest.mark.slow
def test_a_server_answers_with_its_version(zookeeper_server: ZooKeeperServer) -> None:
    assert f"Zookeeper version: {ZOOKEEPER_VERSION}" in zookeeper_server.answer_to("srvr")
    assert "not in the whitelist" in zookeeper_server.answer_to("wchc")


@pytest.mark.slow
def test_acknowledged_writes_survive_a_kill(own_server: ZooKeeperServer) -> None:
    port = own_server.port
    client = KazooClient(own_server.hosts, connection_retry={"max_tries": -1, "max_delay": 0.2})
    client.start()
    client.create("/a", b"1")
    own_server.kill()
    assert own_server.answer_to("srvr") == ""
    own_server.start()
    assert own_server.port == port
    until(lambda: client.connected)
    assert client.retry(client.get, "/a")[0] == b"1"
    client.stop()
    client.close()


@pytest.mark.slow
def test_a_paused_server_does_not_answer_until_resumed(own_server: ZooKeeperServer) -> None:
    own_server.pause()
    client = KazooClient(own_server.hosts, timeout=1)
    with pytest.raises(KazooTimeoutError):
        client.start(timeout=0.5)
    own_server.resume()
    assert "standalone" in own_server.answer_to("srvr")


def test_a_server_that_cannot_start_shows_its_log() -> None:
    server = ZooKeeperServer(settings={"tickTime": "soon"})
    try:
        with pytest.raises(ZooKeeperStartError, match='NumberFormatException: For input string: "soon"'):
            server.start()
        assert server.pid is None
    finally:
        server.remove()


def test_jars_that_cannot_be_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_args: object, **_kwargs: object) -> None:
        raise requests.ConnectionError("no route to host")

    monkeypatch.setenv("M2_REPO", str(tmp_path / "empty"))
    monkeypatch.setattr(programs, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(programs, "_PAUSE", 0.0)
    monkeypatch.setattr(jgo.util.http, "request", offline)
    with pytest.raises(DevClusterError, match=r"jars of ZooKeeper 3\.9\.5 could not be downloaded.*no route to host"):
        ZooKeeperServer().start()


@pytest.mark.slow
def test_a_server_ends_with_its_parent() -> None:
    program = (
        "import os, sys, time\n"
        "from dualwrite.testing.zookeeper import ZooKeeperServer\n"
        "server = ZooKeeperServer().start()\n"
        "print(server.pid, server._folder, flush=True)\n"
        "time.sleep(100)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, folder = parent.stdout.readline().split()
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    until(lambda: not _runs(int(pid)))
    subprocess.run(["rm", "-r", folder], check=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123  (one line of /proc)
        return stat.read().rpartition(")")[2].split()[0] != "Z"
