"""Calls of confluent-kafka's that lose a KeyboardInterrupt, out of reach of signals."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def undisturbed(call: Callable[[], T]) -> T:
    """Run `call` in a thread of its own, since Python raises KeyboardInterrupt in the main thread only, and wait for it.

    Some C functions of confluent-kafka run Python code inside (they import a class, or ask for an attribute) or look for
    signals where nothing can be raised (a destructor), and make an ImportError, a TypeError, or at some later call a
    SystemError out of a KeyboardInterrupt that comes meanwhile. Here it comes while we wait, and goes through.

    By `_thread`, since `threading.Thread.start` and `concurrent.futures` wait in Python code, and an interrupt in it leaves
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
        except BaseException as error:  # noqa: BLE001  (it is raised again by the thread that waits)
            errors.append(error)
        finally:
            running.release()

    running.acquire()
    _thread.start_new_thread(run, ())
    running.acquire()
    if errors:
        raise errors.pop()
    return results.pop()
