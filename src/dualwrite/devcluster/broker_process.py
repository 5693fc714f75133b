"""A broker's process: starts it, finds it again later, sends signals to it and ends it."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from dualwrite.devcluster import launcher
from dualwrite.devcluster.locations import DevClusterError

_STARTTIME = 19
"""Index of `starttime` among the fields of /proc/<pid>/stat that follow the program's name."""


@dataclass(frozen=True)
class BrokerProcess:
    """Identifies a process by id and start: after a reboot, the id alone may belong to another process."""

    pid: int
    started: str | None
    """When it was started, as text: on Linux the boot and the clock ticks from it, which don't change with the system clock.

    None for a process that had already ended: its log shows why.
    """

    @classmethod
    def running(cls, pid: int) -> Self:
        """The process that has this id now."""
        return cls(pid, _start_of(pid))

    def _find(self) -> psutil.Process | None:
        try:
            process = psutil.Process(self.pid)
            # its first thread may be a zombie while other threads still have its sockets and files open
            gone = process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1
        except psutil.Error:  # no such process, or it belongs to another user
            return None
        return process if self.started is not None and _start_of(self.pid) == self.started and not gone else None

    @property
    def alive(self) -> bool:
        """Whether it is still running; a paused process counts as running."""
        return self._find() is not None

    @property
    def paused(self) -> bool:
        """Whether it is stopped by SIGSTOP."""
        process = self._find()
        with suppress(psutil.Error):
            return process is not None and process.status() == psutil.STATUS_STOPPED
        return False

    def send(self, number: signal.Signals) -> bool:
        """Send a signal; False if the process is gone."""
        process = self._find()
        if process is None:
            return False
        try:
            process.send_signal(number)
        except psutil.Error:
            return False
        return True

    def pause(self, timeout: float = 10.0) -> bool:
        """Send SIGSTOP, and wait until every thread has stopped: on a busy machine some keep running for milliseconds.

        False if the process is gone.
        """
        if not self.send(signal.SIGSTOP):
            return False
        deadline = time.monotonic() + timeout
        while not self._has_stopped() and time.monotonic() < deadline:
            time.sleep(0.001)
        return True

    def _has_stopped(self) -> bool:
        threads = Path(f"/proc/{self.pid}/task")
        if not threads.is_dir():
            return self.paused
        with suppress(OSError):  # a thread has just ended: check again
            return all((t / "stat").read_text().rpartition(")")[2].split()[0] in "TtZX" for t in threads.iterdir())
        return False

    def wait(self, timeout: float) -> bool:
        """Wait until it is gone, for at most `timeout` seconds; returns whether it is."""
        deadline = time.monotonic() + timeout
        while self.alive:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        return True


def _start_of(pid: int) -> str | None:
    """When the process with this id was started; None if there is none."""
    try:
        if sys.platform != "linux":
            return str(psutil.Process(pid).create_time())
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return f"{_boot_id()} {fields[_STARTTIME]}"
    except (OSError, psutil.Error):
        return None


@functools.cache
def _boot_id() -> str:
    """Linux's random id of the current boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def stop(processes: Sequence[BrokerProcess], *, grace: float) -> None:
    """End several processes: with SIGTERM, and with SIGKILL those that are still running after `grace` seconds, or at once."""
    deadline = time.monotonic() + grace
    if grace > 0:
        for process in processes:
            process.send(signal.SIGTERM)
            process.send(signal.SIGCONT)
    for process in processes:
        if not process.wait(max(0.0, deadline - time.monotonic())):
            process.send(signal.SIGKILL)
    for process in processes:
        if not process.wait(10.0):
            raise DevClusterError(
                f"The process {process.pid} does not end, even after SIGKILL.",
                cause="it is blocked in the kernel, such as on a disk that does not respond",
                next_step="wait until it ends, then try again",
            )


class Launcher:
    """Starts brokers, and keeps track of the launchers of brokers that are bound to this process's lifetime.

    With a directory to purge, they end with this process, and it is removed then.
    """

    def __init__(self, purge: Path | None = None) -> None:
        self._purge = purge
        self._bound_launchers: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str | Path], *, log_file: Path, directory: Path) -> BrokerProcess:
        """Start a broker in its own session: a Ctrl-C at the caller's terminal does not reach it.

        Raises:
            DevClusterError: The command could not be run.
        """
        arguments = [str(os.getpid()), str(log_file), str(self._purge or ""), *map(str, command)]
        starter = subprocess.Popen(  # noqa: S603  (dualwrite's own launcher)
            [sys.executable, "-I", "-S", launcher.__file__, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=directory,
            start_new_session=True,
        )
        assert starter.stdout is not None
        assert starter.stderr is not None
        with starter.stdout, starter.stderr:
            first_line = starter.stdout.readline()
            message = starter.stderr.read() if not first_line else b""
        if not first_line:
            starter.wait()
            raise DevClusterError(
                f"{command[0]} could not be started.",
                cause=message.decode(errors="replace").strip().rpartition("\n")[2],
                next_step="check that this program exists and may be executed",
            )
        if self._purge is None:
            starter.wait()
        else:
            self._bound_launchers.append(starter)
        return BrokerProcess.running(int(first_line))

    def reap(self, timeout: float = 5.0) -> None:
        """Wait for the launchers of brokers that have exited."""
        for starter in self._bound_launchers:
            starter.wait(timeout)
        self._bound_launchers.clear()
