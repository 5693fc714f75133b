"""Runs a command while each core is taken away from it at random, for up to half a second: `python tests/perturb.py pytest`.

A race that a test meets once in a hundred runs on an idle machine comes within a few. It needs Linux and the right to set
real-time priorities (root, or CAP_SYS_NICE).
"""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import sys
import time

_TAKEN = (0.01, 0.05, 0.2, 0.5)
_LEFT = (0.001, 0.02, 0.1, 0.5)
"""Seconds for which a core is taken away, and left to others; brokers of the tests are fenced after two seconds of silence."""

_PACE = "4"


def main(command: list[str]) -> int:
    """The command's exit code."""
    if not command:
        sys.exit(f"usage: {sys.argv[0]} COMMAND [ARGUMENT ...]")
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    except PermissionError:
        sys.exit("This process may not set real-time priorities: run it as root, or with CAP_SYS_NICE.")
    for core in os.sched_getaffinity(0):
        multiprocessing.Process(target=_take, args=(core, os.getpid()), daemon=True).start()
    return subprocess.run(command, env={"DUALWRITE_TEST_PACE": _PACE, **os.environ}, check=False).returncode


def _take(core: int, parent: int) -> None:
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    chosen = random.Random()
    while os.getppid() == parent:  # it may have been killed
        end = time.monotonic() + chosen.choice(_TAKEN)
        while time.monotonic() < end:
            pass
        time.sleep(chosen.choice(_LEFT))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
