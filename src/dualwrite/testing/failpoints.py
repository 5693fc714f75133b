"""Failpoints: named points in the writer and in recovery at which a test makes the process raise, stop or end.

In this process::

    with failpoints.armed("after_db_commit", failpoints.raises(RuntimeError("crash"))):
        ...

In a process that a test starts: set `DUALWRITE_TESTING=1` and `DUALWRITE_FAILPOINTS` in its environment. The latter is a list
of `name=action`, separated by `;`, where the action is one of

| action | what happens at the point |
| --- | --- |
| `exit` or `exit:CODE` | `os._exit(CODE)`, 70 without a code: no cleanup runs |
| `kill` | SIGKILL to itself |
| `stop` | SIGSTOP to itself: paused until it gets SIGCONT |
| `raise` | `FailpointError` is raised |
| `interrupt` | KeyboardInterrupt is raised |
| `sleep:SECONDS` | it sleeps |
| `touch:PATH` | the file is created: lets a test wait for the point |

`name#N=action` acts only when the point is reached for the N-th time (from 1). Without `#N` it acts every time.
The variables are read when `dualwrite` is imported. Without the first one the second does nothing (a writer that opens logs a
warning), so that a variable left in a production environment does no harm; `arm_from_environment` does not need the first one.

`DUALWRITE_FAILPOINTS=@PATH` is for processes that are not the test's own children and live longer than one test (Spark's Python
workers): each time a point is reached, the file is read, which contains one entry, `name=action`. The first process that
reaches the named point deletes the file and acts.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dualwrite import failpoints as _points
from dualwrite.errors import ConfigurationError

ENVIRONMENT_VARIABLE: Final = _points.ENVIRONMENT_VARIABLE
SWITCH: Final = _points.SWITCH
NAMES: Final = _points.NAMES
EXIT_CODE: Final = 70
_SECONDS: Final = re.compile(r"[0-9]+(\.[0-9]+)?", re.ASCII)

Action = Callable[[], None]


class FailpointError(RuntimeError):
    """Raised by an armed `raise`. Not a DualWriteError: it simulates a defect or a dying process."""


def raises(error: BaseException) -> Action:
    """An action that raises `error`."""

    def action() -> None:
        raise error

    return action


def exits(code: int = EXIT_CODE) -> Action:
    """An action that ends the process at once, without any cleanup."""

    def action() -> None:
        os._exit(code)

    return action


def sends_itself(signal_number: int) -> Action:
    """An action that sends the signal to its own process, and returns only if the process survives it, or continues.

    The signal is addressed to the thread that reached the failpoint, so that this one goes no further. One to the process may
    be received by any of its threads, and a stopping process has other threads run on for milliseconds on a busy machine.
    """

    def action() -> None:
        signal.pthread_kill(threading.get_ident(), signal_number)

    return action


def only_at(count: int, action: Action) -> Action:
    """An action that runs `action` only when the point is reached for the `count`-th time (from 1)."""
    reached = 0

    def counted() -> None:
        nonlocal reached
        reached += 1
        if reached == count:
            action()

    return counted


def arm(name: str, action: Action) -> None:
    """Arm a point until `disarm`; several actions at one point run in the order in which they were armed.

    Raises:
        ConfigurationError: There is no point of that name.
    """
    if name not in NAMES:
        raise ConfigurationError(f"There is no failpoint {name!r}.", next_step=f"use one of: {', '.join(NAMES)}")
    earlier = _points.armed.get(name)

    def both() -> None:
        if earlier is not None:
            earlier()
        action()

    _points.armed[name] = both


def disarm(name: str | None = None) -> None:
    """Disarm one point, or all of them."""
    if name is None:
        _points.armed.clear()
    else:
        _points.armed.pop(name, None)


@contextmanager
def armed(name: str, action: Action) -> Iterator[None]:
    """Arm a point during a `with` block; what was armed there before is restored afterwards."""
    earlier = _points.armed.get(name)
    arm(name, action)
    try:
        yield
    finally:
        disarm(name)
        if earlier is not None:
            _points.armed[name] = earlier


def arm_from_file(path: Path) -> None:
    """From now on, read an entry from a file at every point; see the module's docstring."""

    def look(name: str) -> None:
        try:
            entry = path.read_text().strip()
        except FileNotFoundError:
            return
        point, _, what = entry.partition("=")
        if point != name:
            return
        try:
            path.unlink()
        except FileNotFoundError:  # another process was faster
            return
        _action(what, entry)()

    for name in NAMES:
        arm(name, functools.partial(look, name))


def arm_from_text(text: str) -> None:
    """Arm the points in a value of `DUALWRITE_FAILPOINTS`; see the module's docstring.

    Raises:
        ConfigurationError: An entry can't be parsed.
    """
    if text.startswith("@"):
        arm_from_file(Path(text[1:]))
        return
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        point, _, what = entry.partition("=")
        name, counted, count = point.partition("#")
        action = _action(what, entry)
        if counted:
            if not count.isdecimal() or int(count) < 1:
                raise ConfigurationError(f"The failpoint {entry!r} needs a count of at least 1 after '#'.")
            action = only_at(int(count), action)
        arm(name, action)


def arm_from_environment() -> None:
    """Arm the points in `DUALWRITE_FAILPOINTS`, regardless of the switch; does nothing if it is not set."""
    text = os.environ.get(ENVIRONMENT_VARIABLE)
    if text:
        arm_from_text(text)


def _action(what: str, entry: str) -> Action:  # noqa: PLR0911  (one return per action)
    kind, _, argument = what.partition(":")
    match kind:
        case "exit" if not argument or argument.isdecimal():
            return exits(int(argument or EXIT_CODE))
        case "kill" if not argument:
            return sends_itself(signal.SIGKILL)
        case "stop" if not argument:
            return sends_itself(signal.SIGSTOP)
        case "raise" if not argument:
            return raises(FailpointError(f"failpoint {entry}"))
        case "interrupt" if not argument:
            return raises(KeyboardInterrupt())
        case "sleep" if _SECONDS.fullmatch(argument):
            seconds = float(argument)
            return lambda: time.sleep(seconds)
        case "touch" if argument:
            path = Path(argument)
            return path.touch
        case _:
            raise ConfigurationError(
                f"The failpoint {entry!r} has an unknown action.",
                next_step="use exit[:CODE], kill, stop, raise, interrupt, sleep:SECONDS or touch:PATH",
            )
