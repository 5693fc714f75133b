"""Objects that run in their own process or thread and are called by messages. They are kept for all measurements."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final

_STOP: Final = "stop"
_PATIENCE: Final = 10.0


class AgentError(RuntimeError):
    """An agent failed; the message is its traceback."""


class Agent:
    """An object in another process.

    Args:
        factory: Creates the object in that process; it must be importable.
        arguments: Arguments of the factory.
        in_thread: Use a thread of this process instead of a separate process.
    """

    def __init__(self, factory: Callable[..., Any], *arguments: Any, in_thread: bool = False) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        run: threading.Thread | multiprocessing.process.BaseProcess
        if in_thread:
            run = threading.Thread(target=_serve, args=(theirs, factory, arguments), daemon=True)
            run.start()
            self.pid = os.getpid()
        else:
            # Not fork: the threads of librdkafka and psycopg would not survive it.
            run = multiprocessing.get_context("spawn").Process(
                target=_serve_in_process, args=(theirs, factory, arguments), daemon=True
            )
            run.start()
            theirs.close()
            self.pid = int(run.pid or 0)
        self._run = run

    def start(self, method: str, *arguments: Any) -> None:
        """Call a method there without waiting; then call `result`."""
        self._connection.send((method, arguments))

    def result(self) -> Any:
        """Wait for the result of the last method called with `start`.

        Raises:
            AgentError: The method raised, or the process has ended.
        """
        try:
            is_ok, result = self._connection.recv()
        except EOFError as error:
            raise AgentError(f"process {self.pid} has ended") from error
        if not is_ok:
            raise AgentError(result)
        return result

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method there and wait for its result."""
        self.start(method, *arguments)
        return self.result()

    def stop(self, *, at_once: bool = False) -> None:
        """End the process or thread after its current call; with `at_once`, a process is terminated."""
        if at_once and not isinstance(self._run, threading.Thread):
            self._run.terminate()
        with contextlib.suppress(OSError):  # it has ended already
            self._connection.send((_STOP, ()))
        self._run.join(_PATIENCE)
        self._connection.close()


def call_all(agents: list[Agent], method: str, *arguments: Any) -> list[Any]:
    """Call a method of every agent at the same time, and wait for all results."""
    for agent in agents:
        agent.start(method, *arguments)
    return [agent.result() for agent in agents]


def _serve_in_process(connection: Connection, factory: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which then stops us
    _serve(connection, factory, arguments)


def _serve(connection: Connection, factory: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    served = factory(*arguments)
    while True:
        try:
            method, given = connection.recv()
        except (EOFError, OSError):  # the main process has ended
            return
        if method == _STOP:
            return
        try:
            result = (True, getattr(served, method)(*given))
        except BaseException:  # noqa: BLE001  (reported to the caller)
            result = (False, traceback.format_exc())
        connection.send(result)
