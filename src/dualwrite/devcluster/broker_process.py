"""A broker's process: starts it, finds it again later, sends signals to it and ends it."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

import psutil

from dualwrite.devcluster import launcher
from dualwrite.devcluster.locations import DevClusterError

_CLOCK_TOLERANCE = 5.0
"""Seconds by which a process's start time may appear to change when the system clock is adjusted, where only it is known."""

_STARTTIME = 19
"""Index of `starttime` among the fields of /proc/<pid>/stat that follow the program's name."""


@dataclass(frozen=True)
class BrokerProcess:
    """Identifies a process by id and start time: after a reboot, the id alone may belong to another process."""

    pid: int
    create_time: float
    """Seconds since the epoch, as psutil reports it. For a running process it changes when the system clock is set."""
    boot_id: str | None = None
    """The boot of the machine in which it was started; None if unknown (not Linux)."""
    start_ticks: int | None = None
    """Clock ticks from that boot to its start, which never change; None if unknown."""

    @classmethod
    def running(cls, pid: int) -> Self:
        """The process that has this id now. Raises psutil.NoSuchProcess if there is none."""
        ticks = _start_ticks(pid)
        return cls(pid, psutil.Process(pid).create_time(), None if ticks is None else _boot_id(), ticks)

    def _is(self, process: psutil.Process) -> bool:
        if self.boot_id is not None and self.start_ticks is not None and _boot_id() is not None:
            return self.boot_id == _boot_id() and self.start_ticks == _start_ticks(self.pid)
        return abs(process.create_time() - self.create_time) < _CLOCK_TOLERANCE

    def _find(self) -> psutil.Process | None:
        try:
            process = psutil.Process(self.pid)
            same = self._is(process)
            # its first thread may be a zombie while other threads still have its sockets and files open
            gone = process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1
        except psutil.Error:  # no such process, or it belongs to another user
            return None
        return process if same and not gone else None

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


@functools.cache
def _boot_id() -> str | None:
    """Linux's random id of the current boot; None on other systems."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def _start_ticks(pid: int) -> int | None:
    """Clock ticks from boot to the start of the process; None if there is no such process, or no /proc."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[_STARTTIME])
    except OSError:
        return None


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
        pid = int(first_line)
        try:
            return BrokerProcess.running(pid)
        except psutil.NoSuchProcess:
            return BrokerProcess(pid, 0.0)  # it exited immediately, and counts as dead; its log shows why

    def reap(self, timeout: float = 5.0) -> None:
        """Wait for the launchers of brokers that have exited."""
        for starter in self._bound_launchers:
            starter.wait(timeout)
        self._bound_launchers.clear()


@contextmanager
def delayed() -> Iterator[None]:
    """Deliver a SIGINT, SIGTERM or SIGHUP that arrives inside the block when the block ends.

    Only the main thread can do that; in another thread, a signal that ends the process ends it at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[signal.Signals, FrameType | None]] = []
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    numbers = [number for number in ending if signal.getsignal(number) is not None]  # None: not set from Python

    def collect(number: int, frame: FrameType | None) -> None:
        arrived.append((signal.Signals(number), frame))

    before = {number: signal.signal(number, collect) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number, frame in arrived:
            handler = before[number]
            if callable(handler):
                handler(number, frame)
            else:  # the system's default, which ends the process, or SIG_IGN
                os.kill(os.getpid(), number)
