"""A PgBouncer of its own before a PostgreSQL server of the tests: started, killed, paused and restarted at will.

The program: an installed one, else the one of Debian's package, which is downloaded into the cache once, without root and
without being installed.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self

from dualwrite.devcluster.locations import cache_dir
from dualwrite.errors import DualWriteError, MissingDependencyError
from dualwrite.testing.postgres import PostgresServer, server_account
from dualwrite.testing.server_process import ServerProcess, free_port

PoolMode = Literal["session", "transaction", "statement"]

_PACKAGE: Final = "pgbouncer"
_LIBRARIES: Final = re.compile(r"^\s*Depends: (lib(?:c-?ares|event-)\S*)$", re.MULTILINE)
_INSTALLED: Final = (Path("/usr/sbin/pgbouncer"), Path("/usr/local/sbin/pgbouncer"))
_DOWNLOAD_TIMEOUT: Final = 120.0
_START_TIMEOUT: Final = 30.0


class PgBouncerStartError(DualWriteError):
    """It did not start; the message ends with its log."""


@dataclass(frozen=True)
class Program:
    """A program, and where its shared libraries are.

    Args:
        path: The program.
        libraries: A folder for LD_LIBRARY_PATH, or None where the system has them.
    """

    path: Path
    libraries: Path | None = None

    def copied(self, to: Path) -> Program:
        """A copy in a folder, for an account that may not look into ours."""
        to.mkdir()
        shutil.copy(self.path, to)
        if self.libraries is not None:
            for library in self.libraries.glob("*.so*"):
                shutil.copy(library, to)
        return Program(to / self.path.name, to)

    def environment(self) -> dict[str, str]:
        """What it is run with."""
        return {} if self.libraries is None else {"LD_LIBRARY_PATH": str(self.libraries)}


def find_program() -> Program:
    """An installed PgBouncer, one that was downloaded before, or else one that is downloaded now.

    Raises:
        MissingDependencyError: There is none, and none can be had.
    """
    on_path = shutil.which(_PACKAGE)
    for path in (*([Path(on_path)] if on_path else []), *_INSTALLED):
        if os.access(path, os.X_OK):
            return Program(path)
    folder = cache_dir() / _PACKAGE
    if not (folder / "usr/sbin/pgbouncer").is_file():
        _download(folder)
    libraries = sorted(folder.glob("usr/lib/*/libcares.so*"))
    return Program(folder / "usr/sbin/pgbouncer", libraries[0].parent if libraries else None)


def _download(folder: Path) -> None:
    """Debian's package and its libraries, unpacked; several processes may do it at once."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise MissingDependencyError(
            "No PgBouncer was found, neither on PATH nor in /usr/sbin.", next_step="install the package pgbouncer"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{_PACKAGE}-", dir=folder.parent) as temporary:
        packages, unpacked = Path(temporary, "packages"), Path(temporary, "unpacked")
        packages.mkdir()
        try:
            try:
                _apt_download(packages)
            except subprocess.CalledProcessError:
                if os.geteuid() != 0:
                    raise
                _run("apt-get", "-qq", "update")  # a fresh machine has no lists yet
                _apt_download(packages)
            for package in packages.glob("*.deb"):
                _run("dpkg-deb", "-x", str(package), str(unpacked))
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise MissingDependencyError(
                "No PgBouncer was found, and Debian's package can't be downloaded.",
                cause=str(getattr(error, "stderr", None) or error).strip(),
                next_step="apt-get install pgbouncer",
            ) from error
        with suppress(OSError):  # another process was faster
            unpacked.rename(folder)


def _apt_download(to: Path) -> None:
    depends = _run("apt-cache", "depends", _PACKAGE)
    _run("apt-get", "-q", "download", _PACKAGE, *_LIBRARIES.findall(depends), cwd=to)


def _run(*command: str, cwd: Path | None = None) -> str:
    return subprocess.run(  # noqa: S603  (our own arguments)
        command,
        cwd=cwd,
        env={**os.environ, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=True,
        timeout=_DOWNLOAD_TIMEOUT,
    ).stdout


class PgBouncer(ServerProcess):
    """One PgBouncer on a free port of the loopback; see ServerProcess for its life.

    It runs as the account that the server runs as, since it refuses root.

    Args:
        server: Before which server.
        pool_mode: When a server's connection goes back to the pool.
        pool_size: How many connections to the server it makes for each database and user.
        server_port: The port to connect to, where it is not the server's own (a proxy's).
        settings: More settings for the section `[pgbouncer]` of its configuration.
        program: The program; found by `find_program` if not given.
    """

    def __init__(
        self,
        server: PostgresServer,
        *,
        pool_mode: PoolMode = "transaction",
        pool_size: int = 5,
        server_port: int | None = None,
        settings: Mapping[str, str] | None = None,
        program: Program | None = None,
    ) -> None:
        super().__init__()
        self._program = find_program() if program is None else program
        self._server = server
        self._server_port = server_port
        self._settings = {
            "listen_addr": "127.0.0.1",
            "unix_socket_dir": "",
            "auth_type": "trust",
            "pool_mode": pool_mode,
            "default_pool_size": str(pool_size),
            "max_client_conn": "200",
            "server_login_retry": "0.1",  # seconds; the 15 of its own would outlast the tests of a server that restarts
            **(settings or {}),
        }
        self._account = server_account()

    @property
    def url(self) -> str:
        """SQLAlchemy's URL of the server's database, through here."""
        return self._server.url_at(self.port)

    def url_of(self, database: str) -> str:
        """The URL of another database, through here."""
        return self._server.url_at(self.port, database)

    # --- life -------------------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Run it, and wait until it takes connections.

        Raises:
            PgBouncerStartError: It does not.
        """
        if self._folder is None:
            self.port = free_port()
            self._folder = self._make_folder()
        self._run(
            [self._program.path, self._folder / "pgbouncer.ini"],
            environment=self._program.environment(),
            account=self._account,
        )
        self._wait_until_ready()
        return self

    # --- inside -----------------------------------------------------------------------------------------------------------

    def _make_folder(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="dualwrite-pgbouncer-"))
        folder.chmod(0o755)
        if self._account is not None:
            self._program = self._program.copied(folder / "program")
        users, configuration = folder / "users", folder / "pgbouncer.ini"
        users.write_text('"dualwrite" ""\n')
        settings = {**self._settings, "listen_port": str(self.port), "auth_file": str(users)}
        port = self._server_port or self._server.port
        configuration.write_text(
            "\n".join(
                [
                    "[databases]",
                    f"* = host=127.0.0.1 port={port}",
                    "[pgbouncer]",
                    *(f"{name} = {value}" for name, value in settings.items()),
                    "",
                ]
            )
        )
        return folder

    def _wait_until_ready(self) -> None:
        def ask() -> None:
            socket.create_connection(("127.0.0.1", self.port), timeout=2).close()

        failure = self._becomes_ready(ask, timeout=_START_TIMEOUT, not_yet=(OSError,))
        if failure is not None:
            raise PgBouncerStartError(
                f"PgBouncer ({self._program.path}) did not start on port {self.port}.", cause=self.log()[-4000:]
            ) from failure
