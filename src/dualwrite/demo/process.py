"""One worker's process as its supervisor sees it: started, listened to, released, asked to stop, killed."""

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
    """Where a worker's process stands, by its last report."""

    STARTING = "starting"
    OPENING = "opening"
    WORKING = "working"
    HOLDING = "holding"
    CLOSED = "closed"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Report:
    """What came from a process; `facts` is None at the end of its output.

    Args:
        process: Which process.
        facts: What it said.
    """

    process: WorkerProcess
    facts: Mapping[str, Any] | None


class WorkerProcess:
    """A process that does one job, in a session of its own, so that a Ctrl-C at the terminal does not reach it.

    It ends by itself when its supervisor is gone, since its input ends then.

    Args:
        job: Its job.
        reports: Where its reports go.
        log_file: What it prints to standard error is added here.
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
        self._say(job.to_json())
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def release(self) -> None:
        """Let it do its last flight and end."""
        self._say(RELEASE)

    def stop(self) -> None:
        """Ask it to end after its transaction, cleanly."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def kill(self) -> None:
        """SIGKILL it; nothing happens if it has ended."""
        self.killed = True
        self._process.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> bool:
        """Wait for its end, `timeout` seconds at most; whether it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        if self._process.returncode is None:
            return False
        self._listener.join()
        self.stop()
        return True

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # it is gone; its end is reported
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                if line.endswith(b"\n"):  # a kill may leave half a line
                    self._reports.put(Report(self, json.loads(line)))
        self._process.wait()
        self._reports.put(Report(self, None))
