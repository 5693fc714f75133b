"""The processes of a Spark application by role: its driver, its JVMs, and the kinds of Python workers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum

import psutil


class Role(StrEnum):
    """The role of a process in a Spark application."""

    DRIVER = "driver"
    """The Python process that runs the user's script."""
    JVM = "jvm"
    """Spark's driver; in local mode its executor, too."""
    EXECUTOR = "executor"
    """An executor's JVM, on a cluster."""
    CLUSTER = "cluster"
    """A standalone master or worker."""
    DAEMON = "daemon"
    """The process that forks Python workers of one kind."""
    PLANNER = "planner"
    """A Python worker that calls `writer()` or `streamWriter()`."""
    TASK = "task"
    """A Python worker that calls `write()`."""
    COMMIT = "commit"
    """A Python worker that calls `commit()` and `abort()`."""
    OTHER = "other"


_WORKERS = {
    "pyspark.worker": Role.TASK,
    "pyspark.sql.worker.write_into_data_source": Role.PLANNER,
    "pyspark.sql.worker.commit_data_source_write": Role.COMMIT,
    "pyspark.sql.worker.python_streaming_sink_runner": Role.COMMIT,
}
_JVMS = {
    "org.apache.spark.deploy.SparkSubmit": Role.JVM,
    "org.apache.spark.executor.CoarseGrainedExecutorBackend": Role.EXECUTOR,
    "org.apache.spark.deploy.master.Master": Role.CLUSTER,
    "org.apache.spark.deploy.worker.Worker": Role.CLUSTER,
}


@dataclass(frozen=True)
class SparkProcess:
    """One process; signals are sent only while the process id still belongs to it."""

    process: psutil.Process
    role: Role

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """`kill -9`; does nothing if the process has ended."""
        try:
            self.process.kill()
        except psutil.NoSuchProcess:
            return

    def resume(self) -> None:
        """Let a paused process continue."""
        self.process.resume()


def processes_of_session(session_id: int) -> list[SparkProcess]:
    """All running processes of a POSIX session, including orphans: what a Spark driver starts stays in its session."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session_id and process.status() != psutil.STATUS_ZOMBIE:
                found.append(SparkProcess(process, _role(process, session_id)))
        except (ProcessLookupError, PermissionError, psutil.NoSuchProcess, psutil.AccessDenied):  # ended, or not ours
            continue
    return found


def _role(process: psutil.Process, session_id: int) -> Role:
    if process.pid == session_id:
        return Role.DRIVER
    words = process.cmdline()
    for word in words:
        if word in _JVMS:
            return _JVMS[word]
    if "pyspark.daemon" not in words:
        return Role.OTHER
    if process.pid == os.getpgid(process.pid):  # a daemon leads its own process group, which includes the workers that it forks
        return Role.DAEMON
    return _WORKERS.get(words[-1], Role.OTHER)
