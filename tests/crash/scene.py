"""The scene of a crash test: one database, one broker, one id, one topic; start, kill, recover, compare record by record."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

import dualwrite
from crash import worker
from crash.events import Events, SqlEvents
from dualwrite.kafka.base import ListedTransaction
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.state import TransactionDescription, TransactionStatus
from dualwrite.stores.base import StateRow
from dualwrite.stores.identity import StoreIdentity
from dualwrite.testing.topics import read_committed
from dualwrite.transactional_id import TransactionalId
from fixtures.fork_server import ForkedProcess
from fixtures.pace import LIMIT, TimeLimitError, ended, joined, take, until


class Worker:
    """A worker process and the lines that it prints."""

    def __init__(self, arguments: list[str], failpoints: str = "", *, module: str = "crash.worker", **environment: str) -> None:
        self.process = ForkedProcess(
            module,
            arguments,
            failpoints=failpoints,
            environment={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.lines: list[str] = []
        self._new: queue.Queue[str | None] = queue.Queue()
        self._errors: list[str] = []
        self._threads = [
            threading.Thread(target=self._read_output, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            self._new.put(line.rstrip("\n"))
        self._new.put(None)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self._errors.extend(self.process.stderr)

    def tell(self, line: str) -> None:
        """Send a line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def next_line(self, what: str = "a line") -> str | None:
        """Wait for the next line; None when it has ended."""
        return take(self._new, what)

    def wait_for(self, prefix: str) -> str:
        """Wait for a line that begins with `prefix`."""
        while True:
            line = self.next_line(prefix)
            assert line is not None, f"ended before it said {prefix!r}: {self.lines} {''.join(self._errors)[-2000:]}"
            if line.startswith(prefix):
                return line

    def wait_until_stopped(self, *, or_says: bool = False) -> bool:
        """Wait until the process is stopped by SIGSTOP, or has said something else; whether it is stopped."""
        status = Path(f"/proc/{self.process.pid}/status")

        def stopped() -> str | None:
            if or_says and not self._new.empty():
                return "says"
            assert self.process.poll() is None, f"ended instead: {self.lines} {self.errors[-2000:]}"
            return "is stopped" if "State:\tT" in status.read_text() else None

        return until(stopped, lambda: f"it is stopped: {self.lines} {self.errors[-2000:]}", pause=0.01) == "is stopped"

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> int:
        """Wait until the process has ended, and return its exit code."""
        try:
            code = ended(self.process)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            for thread in self._threads:
                thread.join(LIMIT)
            for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
                if stream is not None:
                    stream.close()
        return code

    def killed(self) -> None:
        """Wait until a failpoint has killed it."""
        code = self.end()
        if self.last().startswith("error TransactionTimeoutError"):
            raise TimeLimitError(f"the transaction was too old before the failpoint was reached: {self.lines}")
        assert code == -signal.SIGKILL, f"ended with {code} instead: {self.lines} {self.errors[-2000:]}"

    def kill(self) -> None:
        self.process.kill()
        self.end()

    @property
    def errors(self) -> str:
        return "".join(self._errors)

    def last(self) -> str:
        return self.lines[-1] if self.lines else ""


class InThread(threading.Thread):
    """Runs a function; `result()` returns its result or raises its exception."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._function = function
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._function()
        except BaseException as error:  # noqa: BLE001  (passed to the test)
            self._error = error

    def result(self) -> None:
        joined(self)
        if self._error is not None:
            raise self._error


@dataclass
class Scene:
    """One id with its own topic, on a database and a broker shared with other scenes."""

    events: Events
    bootstrap: str
    transactional_id: str = field(default_factory=lambda: f"w-{uuid.uuid4().hex[:12]}")
    kafka: Mapping[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.events.url

    @property
    def engine(self) -> sa.Engine:
        assert isinstance(self.events, SqlEvents)
        return self.events.engine

    def kafka_id(self, generation: int = 1) -> str:
        """The id that Kafka sees, even before a writer has opened. Read in this process, so no other may have the database."""
        with dualwrite.store_from_url(self.url) as store:
            while (identity := store.identity()) is None:
                store.set_identity(StoreIdentity.new(store.marks()), expected=None)
            return str(TransactionalId(self.transactional_id).at(generation, identity.store_id))

    @property
    def topic(self) -> str:
        return f"events-{self.transactional_id}"

    @property
    def settings(self) -> dict[str, Any]:
        """Kafka's settings."""
        return {"bootstrap.servers": self.bootstrap, **self.kafka}

    def _extra(self) -> list[str]:
        return [json.dumps(dict(self.kafka))] if self.kafka else []

    def write(self, first: int = 1, count: int = 1, failpoints: str = "", **environment: str) -> Worker:
        where = [self.url, self.bootstrap, self.transactional_id, self.topic]
        return Worker(["write", *where, str(first), str(count), *self._extra()], failpoints, **environment)

    def recovery(self, failpoints: str = "", **environment: str) -> Worker:
        where = [self.url, self.bootstrap, self.transactional_id]
        return Worker(["recover", *where, *self._extra()], failpoints, **environment)

    def recover(self, timeouts: dualwrite.Timeouts | None = None) -> dict[str, Any]:
        """Recover in this process with separate connections; return the report as a recovering process prints it."""
        limits = timeouts or worker.timeouts()
        report = dualwrite.recover(self.events.database, kafka=self.settings, ids=[self.transactional_id], timeouts=limits)
        return worker.as_json(report)

    def connect(self, database: Any = None, **changes: Any) -> dualwrite.DualWriter:
        """An open writer in this process; by default with time limits that don't expire."""
        options = {"transactional_id": self.transactional_id, "timeouts": worker.timeouts(), **changes}
        return dualwrite.connect(self.events.database if database is None else database, kafka=self.settings, **options)

    def event(self, writer: dualwrite.DualWriter, *numbers: int) -> None:
        """Write events with a writer of this process, each in its own transaction."""
        for number in numbers:
            worker.write_event(writer, self.topic, number)

    def write_here(self, number: int) -> None:
        """Open a writer in this process, write one event, close it."""
        with self.connect() as writer:
            self.event(writer, number)

    def recover_twice_at_once(self) -> list[dict[str, Any]]:
        """Recover in two processes at once, or one after another if only one can open the database; return both reports."""
        if self.events.one_process:
            return [report_of(self.recovery()), report_of(self.recovery())]
        return [report_of(w) for w in (self.recovery(), self.recovery())]

    def row(self) -> StateRow:
        """The row of the id. Read in this process, so no other may have the database."""
        with dualwrite.store_from_url(self.url) as store:
            row = store.read(self.transactional_id)
        assert row is not None
        return row

    def coordinator(self) -> closing[WireTransactionCoordinator]:
        """What the cluster knows about the id."""
        return closing(WireTransactionCoordinator(KafkaConfig.of(self.bootstrap), timeout=LIMIT))

    def described(self, generation: int = 1) -> TransactionDescription:
        """What the coordinator says of a generation, which it knows."""
        with self.coordinator() as coordinator:
            found = coordinator.describe(self.kafka_id(generation))
        assert found is not None
        return found

    def unfinished(self) -> list[str]:
        """The Kafka ids with an open transaction, once those that are being ended have their markers."""

        listed: list[ListedTransaction] = []

        def none_is_ending() -> bool:
            listed[:] = coordinator.list_transactions(self.transactional_id)
            return not any(found.status.is_ending for found in listed)

        with self.coordinator() as coordinator:
            until(none_is_ending, lambda: f"the markers of {listed}", pause=0.01)
        return [found.kafka_transactional_id for found in listed if found.status is TransactionStatus.ONGOING]

    def wait_until_unfinished(self) -> None:
        """Wait until Kafka knows the transaction of the current block: the producers send in the background."""
        until(self.unfinished, f"a transaction of {self.transactional_id}, of which Kafka has heard", pause=0.01)

    def assert_resolved(self) -> None:
        """Check that nothing is left to recover; no writer may be open."""
        report = self.recover()
        assert (report["error"], report["outcomes"], report["unacknowledged"]) == (None, [], [])

    def rows(self) -> list[int]:
        """The numbers in the database."""
        return self.events.numbers(self.transactional_id)

    def messages(self) -> list[int]:
        """The numbers that a read_committed consumer gets; empty if there is no topic yet, which the first send creates."""
        try:
            found = read_committed(self.settings, self.topic)
        except dualwrite.UnknownTopicError:
            return []
        return sorted(int(m.value or b"-1") for m in found)

    def agree(self) -> list[int]:
        """The numbers, after checking that both sides have the same ones, each once."""
        rows, messages = self.rows(), self.messages()
        assert Counter(rows) == Counter(messages), f"database {rows}, topic {messages}"
        assert len(set(rows)) == len(rows), f"duplicates: {rows}"
        return rows

    def assert_continues(self, there: list[int], number: int) -> None:
        """Check that both sides have these events, and that a writer that opens now writes another one."""
        assert self.agree() == there
        self.write_here(number)
        assert self.agree() == [*there, number]


def report_of(worker: Worker) -> dict[str, Any]:
    code = worker.end()
    assert code == 0, f"recovery ended with {code}: {worker.lines} {worker.errors[-3000:]}"
    report: dict[str, Any] = json.loads(worker.last())
    return report
