"""Objects that live in a process (or thread) of their own and do what they are told; kept over all measurements."""

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
    """One object elsewhere.

    Args:
        factory: Makes the object, there; it must be importable.
        arguments: For the factory.
        in_thread: In a thread of this process instead of a process of its own.
    """

    def __init__(self, factory: Callable[..., Any], *arguments: Any, in_thread: bool = False) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        run: threading.Thread | multiprocessing.process.BaseProcess
        if in_thread:
            run = threading.Thread(target=_serve, args=(theirs, factory, arguments), daemon=True)
            run.start()
            self.pid = os.getpid()
        else:
            # Not by fork: librdkafka's and psycopg's threads would not survive it.
            run = multiprocessing.get_context("spawn").Process(
                target=_serve_in_process, args=(theirs, factory, arguments), daemon=True
            )
            run.start()
            theirs.close()
            self.pid = int(run.pid or 0)
        self._run = run

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method there, without waiting; `answer` must follow."""
        self._connection.send((method, arguments))

    def answer(self) -> Any:
        """Wait for what the method called last returns.

        Raises:
            AgentError: It raised, or the process is gone.
        """
        try:
            well, result = self._connection.recv()
        except EOFError as error:
            raise AgentError(f"process {self.pid} is gone") from error
        if not well:
            raise AgentError(result)
        return result

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method there and wait for what it returns."""
        self.tell(method, *arguments)
        return self.answer()

    def stop(self, *, at_once: bool = False) -> None:
        """End it, when it has done what it was told last; or `at_once`, where it is a process."""
        if at_once and not isinstance(self._run, threading.Thread):
            self._run.terminate()
        with contextlib.suppress(OSError):  # it is gone already
            self._connection.send((_STOP, ()))
        self._run.join(_PATIENCE)
        self._connection.close()


def ask_all(agents: list[Agent], method: str, *arguments: Any) -> list[Any]:
    """Call a method of every agent at the same time, and wait for all."""
    for agent in agents:
        agent.tell(method, *arguments)
    return [agent.answer() for agent in agents]


def _serve_in_process(connection: Connection, factory: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which then stops us
    _serve(connection, factory, arguments)


def _serve(connection: Connection, factory: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    served = factory(*arguments)
    while True:
        try:
            method, given = connection.recv()
        except (EOFError, OSError):  # the main process is gone
            return
        if method == _STOP:
            return
        try:
            answer = (True, getattr(served, method)(*given))
        except BaseException:  # noqa: BLE001  (told to whoever asked)
            answer = (False, traceback.format_exc())
        connection.send(answer)
