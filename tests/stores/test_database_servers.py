"""The PostgreSQL server of the kit: its programs, its lifecycle, and that it ends with the process that started it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
import sqlalchemy as sa

from dualwrite.testing.postgres import PostgresServer, PostgresStartError, bundled_binaries, installed_binaries
from fixtures.pace import gone, until


def conninfo(url: str) -> str:
    return url.replace("+psycopg", "")


def asked(url: str, sql: str) -> Any:
    """The first row of the answer, over a separate connection."""
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.pool.NullPool)
    with engine.connect() as connection:
        result = connection.exec_driver_sql(sql)
        return tuple(result.one()) if result.returns_rows else None


def is_stopped(pid: int | None) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.slow
@pytest.mark.parametrize("find", [installed_binaries, bundled_binaries], ids=["installed", "bundled"])
def test_a_server_is_started_killed_restarted_and_paused(find: Callable[[], Path | None]) -> None:
    programs = find()
    if programs is None:
        pytest.skip(f"{find.__name__}: none on this machine")
    with PostgresServer(binaries=programs) as server:
        asked(server.url, "CREATE TABLE kept AS SELECT 1 AS one")
        server.kill()
        with pytest.raises(sa.exc.OperationalError):
            asked(server.url, "SELECT 1")
        server.start()
        server.restart()
        assert asked(server.url, "SELECT * FROM kept") == (1,)
        server.pause()
        until(lambda: is_stopped(server.pid), "the server stops")
        server.resume()
        assert asked(server.create_database('other"s'), "SELECT 2") == (2,)
        folder = server._folder
        assert folder is not None
    assert not folder.exists()
    server.stop()


@pytest.mark.slow
def test_pausing_postgresql_stops_all_of_its_processes() -> None:
    with PostgresServer() as server, psycopg.connect(conninfo(server.url)) as connection:
        server.pause()
        pids = [server.pid, *(child.pid for child in psutil.Process(server.pid).children())]
        assert connection.info.backend_pid in pids
        # a backend that was just ending is gone: its server, which is stopped, can't wait for it
        until(lambda: all(is_stopped(pid) or gone(pid) for pid in pids), "the server and its backends stop")
        assert is_stopped(connection.info.backend_pid)
        server.resume()
        assert connection.execute("SELECT 2").fetchone() == (2,)


@pytest.mark.slow
def test_a_paused_server_can_be_removed() -> None:
    with PostgresServer() as server:
        server.pause()


@pytest.mark.slow
def test_a_server_that_does_not_start_shows_its_log() -> None:
    server = PostgresServer(settings={"shared_buffers": "nonsense"})
    with pytest.raises(PostgresStartError, match="shared_buffers"), server:
        pass
    assert server._folder is None


@pytest.mark.slow
def test_a_server_ends_with_its_parent() -> None:
    program = (
        "from dualwrite.testing.postgres import PostgresServer\n"
        "import time\n"
        "s = PostgresServer().start(); print(s.pid, s._folder, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, folder = parent.stdout.readline().split()
        parent.send_signal(signal.SIGKILL)
    until(lambda: gone(pid), f"the end of {pid}")
    shutil.rmtree(folder)
    assert Path(folder).name.startswith("dualwrite-")


# --- PostgreSQL ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_programs_that_the_server_account_cannot_reach_are_copied(tmp_path: Path) -> None:
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
