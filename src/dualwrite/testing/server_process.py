"""The base of our test servers: one process, with its own folder, on a free port of the loopback interface."""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Self

from dualwrite.errors import DualWriteError

_PR_SET_PDEATHSIG: Final = 1
_START_TIMEOUT: Final = 60.0
_END_TIMEOUT: Final = 30.0
_PORT_ATTEMPTS: Final = 3
_LOG_LENGTH: Final = 4000
"""How many characters of the log's end an error shows."""


class ServerProcess(ABC):
    """A server that can be started, killed, paused and restarted; as a context manager it is started and removed.

    On Linux it ends with the thread that started it (PR_SET_PDEATHSIG belongs to a thread): start it from a thread that lives
    as long as it is needed.

    Attributes:
        port: The TCP port; it stays the same over restarts.
    """

    _stopped_by: ClassVar[signal.Signals] = signal.SIGTERM
    """The signal for an orderly shutdown."""
    _ends_with_parent_by: ClassVar[signal.Signals] = signal.SIGKILL
    """The signal for an end at once, with which it leaves nothing behind."""
    _kind: ClassVar[str]
    """What it is, for the folder's name and for messages."""
    _start_error: ClassVar[type[DualWriteError]]

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._account: pwd.struct_passwd | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def pid(self) -> int | None:
        """The server's process id, or None while it is not running."""
        return None if self._process is None else self._process.pid

    @property
    def url(self) -> str:
        """Its URL: SQLAlchemy's for a database, `store_from_url`'s for ZooKeeper."""
        return self.url_at(self.port)

    @abstractmethod
    def url_at(self, port: int) -> str:
        """The URL through another port (a proxy's)."""

    # --- lifecycle --------------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Create its folder at the first start, run the server, and wait until it has answered.

        Raises:
            DualWriteError: The server did not start; the message ends with its log.
        """
        attempts = _PORT_ATTEMPTS if self._folder is None else 1  # another process may take a port that was free
        folder = self._folder = self._folder or self._make_folder()
        while True:
            attempts -= 1
            self.port = self.port or free_port()
            self._run(self._server_command(folder))
            failure = self._wait_until_ready()
            if failure is None:
                return self
            self.kill()
            if not attempts or "ddress already in use" not in self.log():
                raise self._start_error(
                    f"{self._title} did not start on port {self.port}.", cause=self.log()[-_LOG_LENGTH:]
                ) from failure
            self.port = 0

    def stop(self) -> None:
        """Shut the server down in order; connections are closed. Does nothing if it is not running."""
        self._end(self._stopped_by)

    def kill(self) -> None:
        """`kill -9` the server and all its processes at once: like a crash of the machine, except for the disk cache."""
        process = self._process
        if process is not None:
            self._signal_all(signal.SIGKILL)
            self._process = None
            process.wait(timeout=_END_TIMEOUT)

    def restart(self) -> None:
        """Stop it if it is running, then start it with the same port and data; after `kill` it recovers from its log first."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Stop all its processes (SIGSTOP): connections stay open and nothing answers, until `resume`."""
        if self._process is not None:
            self._signal_all(signal.SIGSTOP)
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # until its last thread has stopped

    def resume(self) -> None:
        """Let a paused server continue."""
        self._signal_all(signal.SIGCONT)

    def remove(self) -> None:
        """End the server at once and delete its data."""
        self._end(self._ends_with_parent_by)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def log(self) -> str:
        """The server's log."""
        return "" if self._folder is None else (self._folder / "log").read_text(errors="replace")

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.remove()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()

    # --- what a kind of server defines ------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def _title(self) -> str:
        """What did not start, for messages."""

    @abstractmethod
    def _fill(self, folder: Path) -> None:
        """Create the server's data in a new folder.

        Raises:
            DualWriteError: It could not be created.
        """

    @abstractmethod
    def _server_command(self, folder: Path) -> Sequence[str | Path]:
        """The command that runs the server in its folder, on its port."""

    @abstractmethod
    def _ping(self) -> None:
        """Ask the server once; raises one of `_not_ready_errors` while it is not ready."""

    @abstractmethod
    def _not_ready_errors(self) -> tuple[type[Exception], ...]:
        """What `_ping` raises while the server is not ready."""

    # --- inside -----------------------------------------------------------------------------------------------------------

    def _make_folder(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix=f"dualwrite-{self._kind.lower()}-"))
        try:
            self._fill(folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    def _run(self, command: Sequence[str | Path]) -> None:
        """Start the process in its folder, with its output in the file `log` there."""
        assert self._folder is not None
        death = self._ends_with_parent_by

        def die_with_parent() -> None:  # runs after the change of user, which would clear the setting
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(death))

        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603  (our own arguments)
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                start_new_session=True,  # Ctrl-C in the terminal is for pytest
                preexec_fn=die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509  (one prctl, no lock)
                **as_account(self._account),
            )

    def _wait_until_ready(self) -> Exception | None:
        """Ping the server until it answers, and return None; or return the last failure if it ended, or at the timeout."""
        assert self._process is not None
        deadline = time.monotonic() + _START_TIMEOUT
        while True:
            try:
                self._ping()
            except self._not_ready_errors() as failure:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    return failure
            else:
                return None
            time.sleep(0.02)

    def _end(self, with_signal: signal.Signals) -> None:
        process = self._process
        if process is None:
            return
        process.send_signal(with_signal)  # does nothing once it has ended
        self.resume()  # a paused server could not end
        try:
            process.wait(timeout=_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def _signal_all(self, number: signal.Signals) -> None:
        """Send a signal to the server and its children; it is stopped meanwhile, so that it does not start another one."""
        if self._process is None or self._process.poll() is not None:  # its process id may already be another's
            return
        self._process.send_signal(signal.SIGSTOP)
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)  # noqa: S607  (PATH)
        pairs = [line.split() for line in listed.stdout.splitlines()]
        for pid in (self._process.pid, *(int(pid) for pid, parent in pairs if int(parent) == self._process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def as_account(account: pwd.struct_passwd | None) -> dict[str, Any]:
    """Arguments of `subprocess` for running as an account; None: our own."""
    if account is None:
        return {}
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}


def free_port() -> int:
    """A TCP port of the loopback interface on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class DatabaseServer(ServerProcess):
    """A server with an empty database; see ServerProcess for its lifecycle."""

    @abstractmethod
    def create_database(self, name: str) -> str:
        """Create an empty database and return its URL."""
