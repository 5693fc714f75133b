"""A database server for tests: its folder is created at the first start; it is ready once it has answered a query."""

from __future__ import annotations

import pwd
import shutil
import tempfile
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final, Self

from dualwrite.errors import DualWriteError
from dualwrite.testing.server_process import ServerProcess, free_port

_START_TIMEOUT: Final = 60.0
_LOG_LENGTH: Final = 4000
"""How many characters of the log's end an error shows."""


class DatabaseServer(ServerProcess):
    """A server on a free port of the loopback interface, with an empty database; see ServerProcess for its lifecycle."""

    _kind: ClassVar[str]
    """The database, for the folder's name and for messages."""
    _start_error: ClassVar[type[DualWriteError]]

    def __init__(self) -> None:
        super().__init__()
        self._account: pwd.struct_passwd | None = None

    @property
    def url(self) -> str:
        """SQLAlchemy's URL of the database."""
        return self.url_at(self.port)

    @abstractmethod
    def url_at(self, port: int) -> str:
        """The URL through another port (a proxy's)."""

    @abstractmethod
    def create_database(self, name: str) -> str:
        """Create an empty database and return its URL."""

    def start(self) -> Self:
        """Create the data folder at the first start, run the server, and wait until it has answered a query.

        Raises:
            DualWriteError: The server did not start; the message ends with its log.
        """
        if self._folder is None:
            self._folder = self._make_folder()
            self.port = free_port()
        self._run(self._server_command(self._folder), account=self._account)
        failure = self._wait_until_ready(self._ping, timeout=_START_TIMEOUT, not_yet=self._connection_errors())
        if failure is not None:
            raise self._start_error(
                f"The {self._kind} server {self._program} did not start on port {self.port}.", cause=self.log()[-_LOG_LENGTH:]
            ) from failure
        return self

    def _make_folder(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix=f"dualwrite-{self._kind.lower()}-"))
        try:
            self._fill(folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    @property
    @abstractmethod
    def _program(self) -> Path:
        """The server's program, for messages."""

    @abstractmethod
    def _fill(self, folder: Path) -> None:
        """Create the data folder, with the system tables, in a new folder.

        Raises:
            DualWriteError: It could not be created.
        """

    @abstractmethod
    def _server_command(self, folder: Path) -> Sequence[str | Path]:
        """The command that runs the server in its folder, on its port."""

    @abstractmethod
    def _ping(self) -> None:
        """Connect to the server once; raises one of `_connection_errors` while it is not ready."""

    @abstractmethod
    def _connection_errors(self) -> tuple[type[Exception], ...]:
        """What the driver raises while the server is not ready."""
