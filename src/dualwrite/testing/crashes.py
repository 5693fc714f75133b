"""`crash_at`: run a function in another process, and kill the process at a failpoint.

For example::

    @pytest.mark.parametrize("failpoint", UNDECIDED + DECIDED)
    def test_a_killed_service_recovers(failpoint, dualwrite_postgres, dualwrite_kafka, sent):
        crash_at(failpoint, service.place_order, dualwrite_postgres, dualwrite_kafka, "lamp")
        dualwrite.recover(dualwrite_postgres, kafka=dualwrite_kafka, prefix="shop")
        assert len(sent("orders")) == (failpoint in DECIDED)
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final, ParamSpec

from dualwrite.errors import UsageError
from dualwrite.testing import TIMEOUT, failpoints

P = ParamSpec("P")

UNDECIDED: Final = ("after_begin", "after_send", "after_prepare", "after_record", "before_db_commit")
"""Failpoints of a transaction before the database's commit: after a crash at one of them, recovery rolls both sides back."""

DECIDED: Final = ("after_db_commit", "before_kafka_commit", "after_kafka_commit")
"""Failpoints of a transaction after the database's commit: after a crash at one of them, both sides are committed, the latest
by recovery."""

_SEE_STDERR: Final = "Its standard error says why. If its module can't be imported there, add the module's folder to sys.path."


def crash_at(failpoint: str, function: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> None:
    """Run a function in a new process until it reaches a failpoint, where the process is killed (SIGKILL).

    What the process has left behind is then as after a crash. Recover it as your service does: open the writer or the pool
    again, or call `dualwrite.recover`.

    Args:
        failpoint: The failpoint's name, or `name#N`: the N-th time that it is reached, from 1.
        function: The function. The process imports it, so it must be defined at the top level of a module.
        *args: Its arguments, which must be picklable.
        **kwargs: Its keyword arguments, likewise.

    Raises:
        AssertionError: The function has ended, by itself or with an error, or has waited for `dualwrite.testing.TIMEOUT`
            seconds, without reaching the failpoint.
        ConfigurationError: There is no such failpoint.
        UsageError: The function or an argument can't be pickled.
    """
    name = failpoint.partition("#")[0]
    with failpoints.armed(name, lambda: None):  # checks the name
        pass
    context = multiprocessing.get_context("spawn")
    report, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, f"{failpoint}=kill", function, args, kwargs))
    with report, theirs:
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UsageError(
                f"{_name(function)} can't be run in another process: {error}.",
                next_step="define it at the top level of a module, and pass plain values such as the database's URL",
            ) from error
        theirs.close()
        try:
            process.join(TIMEOUT)
            ended = process.exitcode
        finally:
            process.kill()
            process.join()
        if ended == -signal.SIGKILL:
            return
        error_text = _received(report)
    what = f"{_name(function)} has not reached the failpoint {failpoint!r}"
    if ended == 0:
        raise AssertionError(f"{what}, and has returned.")
    if ended is None and not error_text:
        raise AssertionError(f"{what} within {TIMEOUT:g} s.")
    raise AssertionError(f"{what}: its process has failed.\n{error_text or _SEE_STDERR}")


def _run(
    report: Connection, armed: str, function: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """In the new process."""
    failpoints.arm_from_text(armed)
    try:
        function(*args, **kwargs)
    except BaseException:  # noqa: BLE001  (the test gets it as text)
        report.send_bytes(traceback.format_exc().encode(errors="replace"))
        sys.exit(1)


def _received(report: Connection) -> str:
    try:
        return report.recv_bytes().decode() if report.poll() else ""
    except EOFError:  # it has sent nothing
        return ""


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
