"""Starts the workers, kills them according to the plan, restarts them, and sums up their reports."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Final

from dualwrite.deadline import Deadline
from dualwrite.demo.worker import RELEASE, STOP, Job, WorkerEvent
from dualwrite.errors import DualWriteError

MAX_DELAY_SECONDS: Final = 0.02
"""Seconds. A transaction takes milliseconds, so a kill hits each step with a probability proportional to its duration."""

MAX_POOL_DELAY_SECONDS: Final = 0.1
"""The same for a pool: a full group takes tens of milliseconds, and its flights are all reported at its end."""

MAX_OPENING_DELAY_SECONDS: Final = 0.1
OPENING_SHARE: Final = 0.25

STALL_SECONDS: Final = 180.0
"""Seconds without any report after which the demo gives up: more than the recipe's timeouts for one step."""

STOP_SECONDS: Final = 20.0
MAX_ERRORS: Final = 5


class DemoError(DualWriteError):
    """The demo can't continue: a worker does not start, or there is no progress. Attribute: `log_file`, or the logs' folder."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill.

    Args:
        after: Wait until all workers together have done this many transactions.
        delay: Then wait this many more seconds.
        choice: Selects one of the workers that can be killed, as a fraction of their number, from 0 to below 1.
        while_opening: Instead, kill the last killed worker again, `delay` seconds after it begins to reopen its writer.
    """

    after: int
    delay: float
    choice: float
    while_opening: bool


def plan_kills(kills: int, transactions: int, seed: int, *, max_delay: float) -> list[Kill]:
    """Divide the run's progress into one part per kill, with the kill at a random place in its part.

    A quarter of the kills, at least one but never the first, hit a worker that is recovering from the last kill. `transactions`
    is how many the workers complete while kills are pending: each worker delays its last one.
    """
    rng = random.Random(seed)  # noqa: S311  (not a secret)
    later = range(1, kills)
    again = set(rng.sample(later, min(len(later), max(1, int(kills * OPENING_SHARE)))))
    plan = []
    for number in range(kills):
        after = int((number + rng.random()) / kills * transactions)
        while_opening = number in again
        delay = rng.uniform(0, MAX_OPENING_DELAY_SECONDS if while_opening else max_delay)
        plan.append(Kill(after, delay, rng.random(), while_opening))
    return plan


@dataclass
class Tally:
    """The workers' reports so far, summed up.

    Attributes:
        done: Flights by worker, as counted in the database.
        kills: SIGKILLs that ended a process.
        kills_while_opening: The kills that hit a worker while it was opening its writer or its pool.
        openings: Seconds of each opening.
        outcomes: How often recovery had each outcome, by name.
        took: Microseconds of each flight, from its start to its result.
        commits: Transactions of these flights: in a pool, several flights share one.
        errors: Errors that ended workers. None are expected.
        unacknowledged: The largest number of lost or unverified transactions that a worker found recorded.
        seconds: From the first opened writer to the end.
    """

    done: dict[int, int] = field(default_factory=dict)
    kills: int = 0
    kills_while_opening: int = 0
    openings: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    took: list[int] = field(default_factory=list)
    commits: int = 0
    errors: list[str] = field(default_factory=list)
    unacknowledged: int = 0
    seconds: float = 0.0

    @property
    def transactions(self) -> int:
        """The sum over all workers."""
        return sum(self.done.values())


class WorkerProcess:
    """A process that does one job, in its own session, so that a Ctrl-C at the terminal does not reach it.

    It exits when its supervisor is gone, since its connection ends then.

    Attributes:
        reports: The connection through which its reports come; it ends with the process.
        stage: The last event that it reported, except DONE; None until it has started.
        error: The error that it reported.
        ended: Whether its reports have ended, and the process with them.
        killed: Whether it was sent SIGKILL.
    """

    def __init__(self, job: Job, log_file: Path) -> None:
        self.job = job
        self.log_file = log_file
        self.stage: WorkerEvent | None = None
        self.error: str | None = None
        self.ended = False
        self.killed = False
        self.reports, theirs = Pipe()
        with theirs, log_file.open("ab") as log:
            code = "from dualwrite.demo.worker import main; main()"
            self._process = subprocess.Popen(  # noqa: S603  (our own code)
                [sys.executable, "-W", "ignore", "-c", code, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.tell(job)

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def tell(self, what: object) -> None:
        """Send it its job, RELEASE or STOP; nothing happens if it has ended."""
        with suppress(OSError):
            self.reports.send(what)

    def kill(self) -> None:
        """Send SIGKILL. Does nothing if the process has ended."""
        self.killed = True
        self._process.send_signal(signal.SIGKILL)

    def received(self) -> tuple[WorkerEvent, Mapping[str, Any]] | None:
        """Its next event with its facts; None at the end."""
        try:
            event, facts = self.reports.recv()
        except (EOFError, OSError):  # a kill may leave an incomplete report
            self.end()
            return None
        return event, facts

    def end(self) -> None:
        """Wait for the end of the process, which has closed its connection, or was killed."""
        self._process.wait()
        self.reports.close()
        self.ended = True


class Supervisor:
    """Runs the workers to the end of their jobs, and kills them according to the plan.

    The workers' logs go into `folder`; `progress` is called with the tally after each report.
    """

    def __init__(self, jobs: Sequence[Job], kills: Sequence[Kill], folder: Path, progress: Callable[[Tally], None]) -> None:
        self.tally = Tally()
        self._jobs = jobs
        self._plan = list(kills)
        self._folder = folder
        self._progress = progress
        self._workers: dict[int, WorkerProcess] = {}
        self._last_killed: int | None = None
        self._began: float | None = None
        self._errors_in_a_row: Counter[int] = Counter()

    def run(self) -> None:
        """Run to the end. After an exception, including Ctrl-C, the workers are stopped before it propagates.

        Raises:
            DemoError: A worker fails repeatedly, or there is no progress.
        """
        try:
            for job in self._jobs:
                self._start(job)
            while self._running():
                reporting = self._reporting(STALL_SECONDS)
                if not reporting:
                    raise DemoError(
                        f"No worker has reported anything for {STALL_SECONDS:g} s.",
                        next_step=f"see the workers' logs in {self._folder}",
                        log_file=self._folder,
                    )
                for worker in reporting:
                    self._add_report(worker)
                    if worker.ended:
                        self._ended(worker)
                self._progress(self.tally)
                self._kill_if_due()
        finally:
            self._stop()
            if self._began is not None:
                self.tally.seconds = time.monotonic() - self._began

    def _start(self, job: Job) -> None:
        self._workers[job.worker] = WorkerProcess(job, self._folder / f"worker-{job.worker}.log")
        if not self._plan:
            for worker in self._running():
                worker.tell(RELEASE)

    def _running(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers.values() if not worker.ended]

    def _reporting(self, seconds: float) -> list[WorkerProcess]:
        """The workers whose next report, or end, has come; none after so many seconds."""
        running = self._running()
        ready = wait([worker.reports for worker in running], seconds)
        return [worker for worker in running if worker.reports in ready]

    def _add_report(self, worker: WorkerProcess) -> None:
        report = worker.received()
        if report is None:
            return
        (event, facts), tally, number = report, self.tally, worker.job.worker
        if event is WorkerEvent.DONE:
            tally.took += facts["took"]
            tally.commits += facts["commits"]
            self._errors_in_a_row[number] = 0
        else:
            worker.stage = event
        if event is WorkerEvent.ERROR:
            worker.error = facts["text"]
        elif event is WorkerEvent.OPEN:
            self._began = self._began or time.monotonic()
            tally.openings.append(facts["seconds"])
            tally.outcomes.update(facts["outcomes"])
            tally.unacknowledged = max(tally.unacknowledged, facts["unacknowledged"])
        if "done" in facts:
            tally.done[number] = facts["done"]

    def _ended(self, worker: WorkerProcess) -> None:
        if worker.killed:
            self.tally.kills += 1
            self.tally.kills_while_opening += worker.stage is WorkerEvent.OPENING
            self._last_killed = worker.job.worker
        elif worker.stage is WorkerEvent.CLOSED:
            return
        else:
            self._count_error(worker)
        self._start(worker.job)

    def _count_error(self, worker: WorkerProcess) -> None:
        number = worker.job.worker
        error = worker.error
        if error is None:
            lines = worker.log_file.read_text(encoding="utf-8", errors="replace").splitlines()
            error = f"ended with exit code {worker.exit_code}{f': {lines[-1]}' if lines else ''}"
        self.tally.errors.append(f"worker {number}: {error}")
        self._errors_in_a_row[number] += 1
        if self._errors_in_a_row[number] >= MAX_ERRORS:
            raise DemoError(
                f"Worker {number} failed {MAX_ERRORS} times in a row.",
                cause=self.tally.errors[-1],
                next_step=f"see its log {worker.log_file}",
                log_file=worker.log_file,
            )

    def _kill_if_due(self) -> None:
        if not self._plan or any(worker.killed for worker in self._running()):
            return  # the end of the last killed worker is not reported yet
        victim = self._victim(self._plan[0])
        if victim is None:
            return
        time.sleep(self._plan[0].delay)
        if victim.exit_code is None:  # else it had already ended with an error
            del self._plan[0]
            victim.kill()

    def _victim(self, kill: Kill) -> WorkerProcess | None:
        if kill.while_opening:
            assert self._last_killed is not None
            worker = self._workers[self._last_killed]
            if not worker.ended:
                return None if worker.stage is None else worker
            # it had no flights left, so it has ended by itself; the others may all be waiting for the last kill
        elif self.tally.transactions < kill.after:
            return None
        able = [each for each in self._running() if each.stage is WorkerEvent.OPEN]
        return able[int(kill.choice * len(able))] if able else None

    def _stop(self) -> None:
        """Ask all workers to end after their current transaction; kill those that don't."""
        deadline = Deadline(STOP_SECONDS)
        try:
            for worker in self._running():
                worker.tell(STOP)
            while self._running() and not deadline.expired:
                for worker in self._reporting(deadline.left):
                    self._add_report(worker)
        finally:
            for worker in self._running():
                worker.kill()
                worker.end()
