from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pymysql
import pytest
import sqlalchemy as sa

from dualwrite.devcluster.mariadb_programs import MariaDBPrograms, downloaded_programs, installed_programs
from dualwrite.errors import MissingDependencyError
from dualwrite.testing.mariadb import MariaDBServer, MariaDBStartError
from fixtures.pace import gone, until


def connected(url: str, **options: Any) -> pymysql.Connection[Any]:
    address = sa.make_url(url)
    return pymysql.connect(
        host="127.0.0.1",
        port=address.port or 0,
        user=address.username,
        database=address.database,
        autocommit=True,
        **options,
    )


def asked(connection: pymysql.Connection[Any], sql: str) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchone()


@pytest.mark.parametrize("find", [installed_programs, downloaded_programs])
def test_a_life(find: Callable[[], MariaDBPrograms | None]) -> None:
    programs = find()
    if programs is None:
        pytest.skip(f"{find.__name__}: none on this machine")
    with MariaDBServer(programs=programs) as server:
        with connected(server.url) as connection:
            asked(connection, "CREATE TABLE kept AS SELECT 1")
        server.kill()
        with pytest.raises(pymysql.OperationalError):
            connected(server.url)
        server.start()
        server.restart()
        with connected(server.url, read_timeout=0.3) as connection:
            assert asked(connection, "SELECT * FROM kept") == (1,)
            server.pause()
            with pytest.raises(pymysql.OperationalError, match="timed out"):
                asked(connection, "SELECT 2")
        server.resume()
        with connected(server.create_database("other`s")) as connection:
            assert asked(connection, "SELECT database()") == ("other`s",)
        folder = server._folder
        assert folder is not None
    assert not folder.exists()
    server.stop()


def test_it_is_as_durable_as_in_production(mariadb_server: MariaDBServer) -> None:
    with connected(mariadb_server.url) as connection:
        flush, doublewrite = asked(connection, "SELECT @@innodb_flush_log_at_trx_commit, @@innodb_doublewrite")
    assert flush == 1
    assert doublewrite in (1, "ON")


def test_a_paused_server_can_be_removed() -> None:
    with MariaDBServer() as server:
        server.pause()


def test_a_server_that_does_not_start_shows_its_log() -> None:
    server = MariaDBServer(settings={"innodb-no-such-option": "1"})
    with pytest.raises(MariaDBStartError, match="no-such-option"), server:
        pass
    assert server._folder is None


def test_a_program_that_can_not_be_run(tmp_path: Path, mariadb_server: MariaDBServer) -> None:
    broken = MariaDBPrograms(tmp_path / "mariadbd", mariadb_server._programs.share)
    with pytest.raises(MariaDBStartError, match="can't be run"), MariaDBServer(programs=broken):
        pass


def test_it_dies_with_its_parent() -> None:
    program = (
        "from dualwrite.testing.mariadb import MariaDBServer\n"
        "import time\n"
        "s = MariaDBServer().start(); print(s._process.pid, s._folder, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, folder = parent.stdout.readline().split()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    until(lambda: gone(pid), f"the end of {pid}")
    subprocess.run(["rm", "-rf", folder], check=True)


def test_another_platform_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(MissingDependencyError, match="riscv64") as caught:
        downloaded_programs()
    assert "install MariaDB" in str(caught.value.next_step)
