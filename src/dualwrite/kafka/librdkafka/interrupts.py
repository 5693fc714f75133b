"""Protection from signals for calls of confluent-kafka that would swallow a KeyboardInterrupt."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def undisturbed(call: Callable[[], T]) -> T:
    """Run `call` in a separate thread and wait for it, since Python raises KeyboardInterrupt in the main thread only.

    Some C functions of confluent-kafka run Python code (they import a class, or read an attribute) or check for signals
    where nothing can be raised (in a destructor). They turn a KeyboardInterrupt that arrives meanwhile into an ImportError,
    a TypeError, or a SystemError at some later call. Here the interrupt arrives while the main thread waits, and is raised.

    Uses `_thread`, since `threading.Thread.start` and `concurrent.futures` wait in Python code, where an interrupt surfaces
    as "cannot release un-acquired lock".
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    results: list[T] = []
    errors: list[BaseException] = []
    running = _thread.allocate_lock()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001  (raised again in the waiting thread)
            errors.append(error)
        finally:
            running.release()

    running.acquire()
    _thread.start_new_thread(run, ())
    running.acquire()
    if errors:
        raise errors.pop()
    return results.pop()
