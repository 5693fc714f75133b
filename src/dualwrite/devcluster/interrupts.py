"""Delays Ctrl-C and the signals that end a process, while it starts and records another one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def delayed() -> Iterator[None]:
    """Deliver a SIGINT, SIGTERM or SIGHUP that arrives inside the block when the block ends.

    Only the main thread can do that; in another thread, a signal that ends the process ends it at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[signal.Signals, FrameType | None]] = []
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    numbers = [number for number in ending if signal.getsignal(number) is not None]  # None: not set from Python

    def collect(number: int, frame: FrameType | None) -> None:
        arrived.append((signal.Signals(number), frame))

    before = {number: signal.signal(number, collect) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number, frame in arrived:
            handler = before[number]
            if callable(handler):
                handler(number, frame)
            else:  # the system's default, which ends the process, or SIG_IGN
                os.kill(os.getpid(), number)
