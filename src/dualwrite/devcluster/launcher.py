"""Starts one broker, detached from the caller or bound to the caller's life. Run as a script; standard library only.

Why a process of its own and not `PR_SET_PDEATHSIG` on the broker: that signal comes when the *thread* that started the
broker ends, so a broker started in a worker thread would die with it. This launcher has one thread, watches its parent
*process* by `getppid`, which changes when that is gone however it died, and works on macOS too. The signal is set between
the launcher and its broker, where it is right, for the case that the launcher itself is killed.

A detached broker is adopted by init, so that its starter has no child to wait for.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys

DETACHED = "detached"
BOUND = "bound"
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.2


def _die_with_launcher() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(mode: str, owner: int, log_file: str, purge: str, command: list[str]) -> int:
    """Start `command`, print its process id, and when bound stay until it ends or the owner does.

    Args:
        mode: `detached` or `bound`.
        owner: Process id of the caller.
        log_file: Where the command's output is appended.
        purge: Directory to remove after the owner's death; empty for none.
        command: What to run.
    """
    bound = mode == BOUND
    with open(log_file, "ab") as log:  # noqa: PTH123  (pathlib would double this script's start-up time)
        process = subprocess.Popen(  # noqa: S603  (the command that dualwrite itself put together)
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_die_with_launcher if bound and sys.platform == "linux" else None,  # noqa: PLW1509  (one thread)
        )
    os.write(1, f"{process.pid}\n".encode())
    os.close(1)
    if not bound:
        return 0
    while os.getppid() == owner:
        try:
            process.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        return 0
    process.kill()
    process.wait()
    if purge:
        shutil.rmtree(purge, ignore_errors=True)
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:])
    os._exit(code)  # a detached broker lives on: there is nothing to tidy up for
