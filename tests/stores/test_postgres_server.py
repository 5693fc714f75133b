from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from dualwrite.testing.postgres import PostgresServer, PostgresStartError, bundled_binaries, installed_binaries
from dualwrite.testing.proxy import TcpProxy
from fixtures.pace import gone, until


def conninfo(url: str) -> str:
    return url.replace("+psycopg", "")


def test_programs_that_the_servers_account_can_not_reach_are_copied(tmp_path: Path) -> None:
    """As root the server runs as another user, which may not enter a virtual environment in a private folder."""
    binaries = bundled_binaries()
    assert binaries is not None
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    package = binaries.parent.parent
    shutil.copytree(binaries.parent, private / package.name / binaries.parent.name, symlinks=True)
    shutil.copytree(package.with_name(f"{package.name}.libs"), private / f"{package.name}.libs")
    with (
        PostgresServer(binaries=private / package.name / binaries.parent.name / "bin") as server,
        psycopg.connect(conninfo(server.url)) as connection,
    ):
        assert connection.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.parametrize("find", [installed_binaries, bundled_binaries])
def test_a_life(find: Callable[[], Path | None]) -> None:
    binaries = find()
    if binaries is None:
        pytest.skip(f"{find.__name__}: none on this machine")
    with PostgresServer(binaries=binaries) as server:
        with psycopg.connect(conninfo(server.url), autocommit=True) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 1")
        server.kill()
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(conninfo(server.url))
        server.start()
        server.restart()
        with psycopg.connect(conninfo(server.url)) as connection:
            assert connection.execute("SELECT * FROM kept").fetchone() == (1,)
            server.pause()
            began = time.monotonic()
            subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -CONT {' '.join(map(str, server._all_pids()))}"]).wait()
            assert connection.execute("SELECT 2").fetchone() == (2,)
            assert time.monotonic() - began > 0.25
        folder = server._folder
        assert folder is not None
    assert not folder.exists()
    server.stop()


def test_a_server_that_does_not_start_shows_its_log() -> None:
    server = PostgresServer(settings={"shared_buffers": "nonsense"})
    with pytest.raises(PostgresStartError, match="shared_buffers"), server:
        pass


def test_it_dies_with_its_parent() -> None:
    program = (
        "from dualwrite.testing.postgres import PostgresServer\n"
        "import time\n"
        "s = PostgresServer().start(); print(s._process.pid, s._folder, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, folder = parent.stdout.readline().split()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    until(lambda: gone(pid), f"the end of {pid}")
    subprocess.run(["rm", "-rf", folder], check=True)
    assert os.path.basename(folder).startswith("dualwrite-postgres-")  # noqa: PTH119  (a text from the other process)


# --- the proxy ------------------------------------------------------------------------------------------------------------


def test_the_proxy_forwards_and_cuts(postgres_server: PostgresServer, postgres_proxy: TcpProxy) -> None:
    with psycopg.connect(conninfo(postgres_server.url_at(postgres_proxy.port)), autocommit=True) as connection:
        size = connection.execute("SELECT length(%s)", ("x" * 1_000_000,)).fetchone()
        assert size == (1_000_000,)
        postgres_proxy.cut()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    psycopg.connect(conninfo(postgres_server.url_at(postgres_proxy.port))).close()


def test_the_proxy_resets() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        TcpProxy("127.0.0.1", listener.getsockname()[1]) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port)) as client,
    ):
        server, _ = listener.accept()
        with server:
            proxy.on_client_bytes(b"SELECT 42", lambda link: link.cut_with_reset())
            client.sendall(b"SELECT ")
            assert server.recv(100) == b"SELECT "
            client.sendall(b"42")
            for side in (client, server):
                with pytest.raises(ConnectionResetError):
                    side.recv(100)


@pytest.mark.parametrize("direction", ["client_to_server", "server_to_client", None])
def test_the_proxy_goes_silent(postgres_server: PostgresServer, postgres_proxy: TcpProxy, direction: Any) -> None:
    url = conninfo(postgres_server.url_at(postgres_proxy.port))
    with contextlib.closing(psycopg.connect(url, autocommit=True)) as connection:
        postgres_proxy.on_client_bytes(b"SELECT 42", lambda link: link.blackhole(direction))
        with pytest.raises(TimeoutError):
            _within(0.5, connection)
        postgres_proxy.cut()


def _within(seconds: float, connection: psycopg.Connection) -> None:
    def alarm(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        connection.execute("SELECT 42")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
