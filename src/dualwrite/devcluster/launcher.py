"""Starts one broker, detached from the caller or bound to the caller's lifetime. Run as a script; standard library only.

It is a separate process because `PR_SET_PDEATHSIG` on the broker is not enough: that signal is sent when the *thread* that
started the broker ends, so a broker started in a worker thread would die with the thread. This launcher has one thread. It
watches its parent *process* with `getppid`, which changes when the parent dies for whatever reason, and works on macOS too.
Between the launcher and its broker the signal is correct; it is for the case that the launcher itself is killed.

A detached broker is adopted by init, so the process that started it has no child to wait for.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.2


def _die_with_launcher() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(owner: int, log_file: str, purge: str, command: list[str]) -> int:
    """Start `command` and print its process id; if bound, wait until the command or the owner (a process id) ends.

    It is bound if there is a directory to `purge` after the owner's death. Returns the exit code: 1 if the caller ended before
    it could know the process; this was killed then.
    """
    bound = bool(purge)
    with open(log_file, "ab") as log:  # noqa: PTH123  (pathlib would double this script's start-up time)
        process = subprocess.Popen(  # noqa: S603  (dualwrite's own command)
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_die_with_launcher if bound and sys.platform == "linux" else None,  # noqa: PLW1509  (one thread)
        )
    known = _announce(process.pid)
    if known and not bound:
        return 0
    while known and os.getppid() == owner:
        try:
            process.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        return 0
    process.kill()
    process.wait()
    if purge:
        shutil.rmtree(purge, ignore_errors=True)
    return 0 if known else 1


def _announce(pid: int) -> bool:
    """Print the process id for the caller; False if the caller has ended, so that nobody would ever stop the process."""
    try:
        os.write(1, f"{pid}\n".encode())
        os.close(1)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    code = main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
    os._exit(code)  # skip the interpreter's cleanup: a detached broker keeps running
