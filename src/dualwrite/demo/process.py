"""A worker's process, for its supervisor: starts it, reads its reports, releases, stops and kills it."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from dualwrite.demo.job import RELEASE, Job


class Stage(Enum):
    """The stage of a worker's process, according to its last report."""

    STARTING = "starting"
    OPENING = "opening"
    WORKING = "working"
    HOLDING = "holding"
    CLOSED = "closed"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Report:
    """A report from a process.

    Args:
        process: The process.
        facts: The report's fields; None at the end of the process's output.
    """

    process: WorkerProcess
    facts: Mapping[str, Any] | None


class WorkerProcess:
    """A process that does one job, in its own session, so that a Ctrl-C at the terminal does not reach it.

    It exits when its supervisor is gone, since its input ends then.

    Args:
        job: Its job.
        reports: The queue for its reports.
        log_file: The file to append its standard error to.
    """

    def __init__(self, job: Job, reports: queue.Queue[Report], log_file: Path) -> None:
        self.job = job
        self.stage = Stage.STARTING
        self.killed = False
        self.log_file = log_file
        self._reports = reports
        with log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "dualwrite.demo.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._send(job.to_json())
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def release(self) -> None:
        """Let the worker write its last flight and end."""
        self._send(RELEASE)

    def stop(self) -> None:
        """Ask the worker to end cleanly after its current transaction."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def kill(self) -> None:
        """Send SIGKILL. Does nothing if the process has ended."""
        self.killed = True
        self._process.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> bool:
        """Wait for its end, at most `timeout` seconds; returns whether it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        if self._process.returncode is None:
            return False
        self._listener.join()
        self.stop()
        return True

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # it has exited, which is reported separately
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                if line.endswith(b"\n"):  # a kill may leave an incomplete line
                    self._reports.put(Report(self, json.loads(line)))
        self._process.wait()
        self._reports.put(Report(self, None))
