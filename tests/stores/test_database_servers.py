"""The servers that tests start: their programs, their lifecycle, and that they end with the process that started them."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest
import sqlalchemy as sa

from dualwrite.devcluster import mariadb_programs
from dualwrite.devcluster.mariadb_programs import MariaDBPrograms, downloaded_programs, installed_programs
from dualwrite.errors import MissingDependencyError
from dualwrite.testing.mariadb import MariaDBServer, MariaDBStartError
from dualwrite.testing.postgres import PostgresServer, PostgresStartError, bundled_binaries, installed_binaries
from fixtures.pace import gone, until

Server = PostgresServer | MariaDBServer


@dataclass(frozen=True)
class Kind:
    """A server started with other settings."""

    server: type[Server]
    error: type[Exception]
    refused: dict[str, str]
    """A setting that it does not start with."""


POSTGRES = Kind(PostgresServer, PostgresStartError, {"shared_buffers": "nonsense"})
MARIADB = Kind(MariaDBServer, MariaDBStartError, {"innodb-no-such-option": "1"})
KINDS = [pytest.param(POSTGRES, id="postgresql"), pytest.param(MARIADB, id="mariadb")]


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
@pytest.mark.parametrize(
    ("find", "make"),
    [
        pytest.param(installed_binaries, lambda found: PostgresServer(binaries=found), id="postgresql installed"),
        pytest.param(bundled_binaries, lambda found: PostgresServer(binaries=found), id="postgresql bundled"),
        pytest.param(installed_programs, lambda found: MariaDBServer(programs=found), id="mariadb installed"),
        pytest.param(downloaded_programs, lambda found: MariaDBServer(programs=found), id="mariadb downloaded"),
    ],
)
def test_a_server_is_started_killed_restarted_and_paused(find: Callable[[], Any], make: Callable[[Any], Server]) -> None:
    programs = find()
    if programs is None:
        pytest.skip(f"{find.__name__}: none on this machine")
    with make(programs) as server:
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
        assert asked(server.create_database("other`s"), "SELECT 2") == (2,)
        folder = server._folder
        assert folder is not None
    assert not folder.exists()
    server.stop()


@pytest.mark.slow
def test_pausing_postgresql_stops_all_of_its_processes() -> None:
    with PostgresServer() as server, psycopg.connect(conninfo(server.url)) as connection:
        server.pause()
        pids = server._all_pids()
        assert connection.info.backend_pid in pids
        # a backend that was just ending is gone: its server, which is stopped, can't wait for it
        until(lambda: all(is_stopped(pid) or gone(pid) for pid in pids), "the server and its backends stop")
        assert is_stopped(connection.info.backend_pid)
        server.resume()
        assert connection.execute("SELECT 2").fetchone() == (2,)


@pytest.mark.slow
def test_a_paused_mariadb_does_not_answer_on_an_open_connection() -> None:
    with MariaDBServer() as server:
        address = sa.make_url(server.url)
        connection = pymysql.connect(host="127.0.0.1", port=server.port, user=address.username, read_timeout=0.3)
        with connection, connection.cursor() as cursor:
            server.pause()
            with pytest.raises(pymysql.OperationalError, match="timed out"):
                cursor.execute("SELECT 2")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_paused_server_can_be_removed(kind: Kind) -> None:
    with kind.server() as server:
        server.pause()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_does_not_start_shows_its_log(kind: Kind) -> None:
    server = kind.server(settings=kind.refused)
    (setting,) = kind.refused
    with pytest.raises(kind.error, match=setting.removeprefix("innodb-")), server:
        pass
    assert server._folder is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_ends_with_its_parent(kind: Kind) -> None:
    made = kind.server
    program = (
        f"from {made.__module__} import {made.__name__}\n"
        "import time\n"
        f"s = {made.__name__}().start(); print(s.pid, s._folder, flush=True); time.sleep(600)"
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


# --- MariaDB ------------------------------------------------------------------------------------------------------------------


def test_a_server_is_as_durable_as_in_production(mariadb_server: MariaDBServer) -> None:
    flush, doublewrite = asked(mariadb_server.url, "SELECT @@innodb_flush_log_at_trx_commit, @@innodb_doublewrite")
    assert flush == 1
    assert doublewrite in (1, "ON")


def test_a_program_that_cannot_be_run(tmp_path: Path, mariadb_server: MariaDBServer) -> None:
    broken = MariaDBPrograms(tmp_path / "mariadbd", mariadb_server._programs.share)
    with pytest.raises(MariaDBStartError, match="can't be run"), MariaDBServer(programs=broken):
        pass


def test_on_other_platforms_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(MissingDependencyError, match="riscv64") as caught:
        downloaded_programs()
    assert "install MariaDB" in str(caught.value.next_step)


def test_a_damaged_archive_is_removed_so_that_it_is_downloaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jar, name = tmp_path / "mariadb.jar", "mariadb/linux/bin/mariadbd"
    with zipfile.ZipFile(jar, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, bytes(10_000))
    damaged = bytearray(jar.read_bytes())
    damaged[zipfile.sizeFileHeader + len(name)] = 0xFF  # the compressed data begins with a type of block that does not exist
    jar.write_bytes(damaged)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(mariadb_programs, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(mariadb_programs, "artifact_jars", lambda *_: [jar])
    with pytest.raises(MissingDependencyError, match="while decompressing"):
        downloaded_programs()
    assert not jar.exists()
