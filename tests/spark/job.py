"""A Spark driver in a separate process, which a test can kill as a whole or in part."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from fixtures.pace import TimeLimitError, joined, limit, until
from spark.processes import Role, SparkProcess, processes_of_session
from spark.session import NOT_OURS, WARM

TESTS = Path(__file__).parents[1]
LIMIT = limit(120)
"""Seconds that anything may take before the test fails."""

_PR_SET_PDEATHSIG = 1


class SparkJob:
    """A running script that opens a Spark session; as a context manager it leaves no process behind.

    It has its own POSIX session, in which everything that Spark starts stays: so orphans can be found after the driver's
    death. If this process dies without cleanup, the kernel kills the driver, its JVM ends at the end of its input, and the
    Python workers end with it.

    Attributes:
        lines: What the script, the JVM and the Python workers have written so far. A worker's stdout and stderr both arrive
            on the JVM's stderr, so the two streams are not separated.
    """

    def __init__(
        self,
        script: Path,
        arguments: Sequence[str | Path] = (),
        *,
        environment: Mapping[str, str],
    ) -> None:
        """Start the script.

        Args:
            script: The driver's script; it can import modules from tests/.
            arguments: Its arguments.
            environment: Variables in addition to this process's own; at least those of the fixture `spark_environment`. Python
                workers inherit them with a `local` master (on a cluster use `spark.executorEnv.*`).
        """
        environ = {name: value for name, value in os.environ.items() if name not in {*NOT_OURS, "DUALWRITE_FAILPOINTS"}}
        self.process = subprocess.Popen(
            [sys.executable, script, *arguments],
            env={**environ, "PYTHONUNBUFFERED": "1", **environment, "PYTHONPATH": os.pathsep.join(map(str, (WARM, TESTS)))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509  (one prctl, no lock)
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.lines: list[str] = []
        self._ended = 0
        self._new: queue.Queue[str | None] = queue.Queue()
        self._threads = [
            threading.Thread(target=self._read, args=(stream,), daemon=True)
            for stream in (self.process.stdout, self.process.stderr)
        ]
        for thread in self._threads:
            thread.start()

    # --- looking ----------------------------------------------------------------------------------------------------------

    @property
    def output(self) -> str:
        """All lines so far: the script's output and traceback, and Spark's log."""
        return "\n".join(self.lines)

    def wait_for(self, beginning: str, seconds: float = LIMIT) -> str:
        """Wait for a line with this beginning and return it; each line is returned only once."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._new.get(timeout=max(deadline - time.monotonic(), 0.01))
            except queue.Empty:
                raise TimeLimitError(f"no {beginning!r} in {seconds:.0f} s; {self._told()}") from None
            if line is None:  # one of the two streams has ended
                self._ended += 1
                assert self._ended < len(self._threads), f"ended before it said {beginning!r}; {self._told()}"
            elif line.startswith(beginning):
                return line

    def processes(self, role: Role | None = None) -> list[SparkProcess]:
        """The job's running processes, of one role or all."""
        return [one for one in processes_of_session(self.process.pid) if role is None or one.role is role]

    # --- ending -----------------------------------------------------------------------------------------------------------

    def wait(self, seconds: float = LIMIT) -> int:
        """Wait until the script has ended and no process of the application is left; return the script's exit code."""
        try:
            code = self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise TimeLimitError(f"still running after {seconds:.0f} s; {self._told()}") from None
        self.wait_until_gone(seconds)
        return code

    def wait_until_gone(self, seconds: float = LIMIT) -> None:
        """Wait until no process of the application is left."""
        until(lambda: self.process.poll() is not None and not self.processes(), self._told, seconds=seconds, pause=0.05)
        for thread in self._threads:  # the pipes end with the last process that holds them
            joined(thread, seconds=seconds)

    def kill(self, role: Role) -> list[int]:
        """`kill -9` all running processes with that role; return their ids."""
        killed = self.processes(role)
        for process in killed:
            process.kill()
        return [process.pid for process in killed]

    def kill_all(self) -> None:
        """`kill -9` all processes at once, as when the machine fails: none can react to the end of another."""
        for process in self.processes():  # none of them can react then
            if process.role is not Role.DRIVER:
                _signal(process, signal.SIGSTOP)
        until(self._kill_what_is_left, self._told, seconds=LIMIT)
        for thread in self._threads:
            joined(thread, seconds=LIMIT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill_all()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    # --- inside -----------------------------------------------------------------------------------------------------------

    def _kill_what_is_left(self) -> bool:
        """Kill what is left; return whether nothing was."""
        left = self.processes()
        for process in left:
            process.kill()
        return not left and self.process.poll() is not None

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self.lines.append(line.rstrip("\n"))
            self._new.put(line.rstrip("\n"))
        self._new.put(None)

    def _told(self) -> str:
        living = ", ".join(f"{process.role} {process.pid}" for process in self.processes())
        return f"living: {living or 'none'}\noutput: {self.output[-4000:]}"


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal(process: SparkProcess, number: signal.Signals) -> None:
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return
