"""Reads single keys from a terminal, without waiting for Enter and without an echo, and restores the terminal at the end."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dualwrite.cli.options import refuse

try:
    import termios
    import tty
except ImportError:  # Windows
    termios = tty = None  # type: ignore[assignment]


@contextmanager
def pressed_keys() -> Iterator[Callable[[float], str | None]]:
    """Yield a function that waits some seconds for a key; it returns None if no key was pressed, and `q` at the end of input.

    Ctrl-C still interrupts.
    """
    if termios is None:
        refuse("On this platform single keys can't be read from the terminal. Use `dualwrite stuck` instead.")
    descriptor = sys.stdin.fileno()

    def next_key(seconds: float) -> str | None:
        if not select.select([descriptor], [], [], seconds)[0]:
            return None
        read = os.read(descriptor, 1)
        return read.decode("latin-1") if read else "q"

    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield next_key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
