"""Failpoints: arming, counting, other processes, and no cost."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from dualwrite import failpoints as points
from dualwrite.errors import ConfigurationError
from dualwrite.testing import failpoints
from dualwrite.testing.failpoints import FailpointError
from fixtures.pace import LIMIT
from fixtures.tables import table

POINT = "after_db_commit"


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.disarm()


def test_an_armed_point_acts_each_time_and_others_do_not() -> None:
    seen: list[int] = []
    assert points.armed == {}
    for name in (*failpoints.NAMES, "unknown"):
        points.hit(name)
    with failpoints.armed(POINT, lambda: seen.append(1)):
        points.hit(POINT)
        points.hit("after_begin")
        points.hit(POINT)
    points.hit(POINT)
    assert len(seen) == 2
    assert points.armed == {}


def test_raises_raises_the_given_error_and_the_point_is_disarmed() -> None:
    error = RuntimeError("crash")
    with pytest.raises(RuntimeError) as caught, failpoints.armed(POINT, failpoints.raises(error)):
        points.hit(POINT)
    assert caught.value is error
    assert points.armed == {}


def test_several_actions_run_in_the_order_in_which_they_were_armed() -> None:
    seen: list[str] = []
    failpoints.arm(POINT, lambda: seen.append("first"))
    failpoints.arm(POINT, lambda: seen.append("second"))
    points.hit(POINT)
    assert seen == ["first", "second"]
    failpoints.disarm(POINT)
    failpoints.disarm(POINT)
    points.hit(POINT)
    assert seen == ["first", "second"]


def test_leaving_an_inner_block_leaves_the_outer_one_armed() -> None:
    seen: list[str] = []
    with failpoints.armed(POINT, lambda: seen.append("outer")):
        with failpoints.armed(POINT, lambda: seen.append("inner")):
            points.hit(POINT)
        points.hit(POINT)
    points.hit(POINT)
    assert seen == ["outer", "inner", "outer"]


def test_only_at_acts_on_one_hit() -> None:
    seen: list[int] = []
    failpoints.arm(POINT, failpoints.only_at(2, lambda: seen.append(1)))
    for _ in range(4):
        points.hit(POINT)
    assert seen == [1]


def test_an_unknown_point_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)no failpoint 'nowhere'.*after_begin"):
        failpoints.arm("nowhere", lambda: None)


def test_one_text_arms_several_points(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    failpoints.arm_from_text(
        f" after_begin=raise ; {POINT}#2=touch:{touched} ;; after_send=interrupt; after_prepare=sleep:0.001;"
    )
    with pytest.raises(FailpointError, match="after_begin"):
        points.hit("after_begin")
    points.hit(POINT)
    assert not touched.exists()
    points.hit(POINT)
    assert touched.exists()
    points.hit("after_prepare")
    with pytest.raises(KeyboardInterrupt):
        points.hit("after_send")


@table(
    "text",
    [
        POINT,
        f"{POINT}=",
        f"{POINT}=explode",
        f"{POINT}=exit:soon",
        f"{POINT}=kill:9",
        f"{POINT}=stop:1",
        f"{POINT}=raise:x",
        f"{POINT}=interrupt:x",
        f"{POINT}=sleep",
        f"{POINT}=sleep:soon",
        f"{POINT}=sleep:-1",
        f"{POINT}=touch",
        f"{POINT}#0=raise",
        f"{POINT}#x=raise",
        f"{POINT}#-1=raise",
        f"{POINT}#=raise",
        "nowhere=raise",
        "=raise",
    ],
)
def test_an_invalid_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        failpoints.arm_from_text(text)


HITS = """
import dualwrite
from dualwrite.failpoints import hit
hit("after_begin")
print("alive", flush=True)
hit("after_begin")
print("still alive", flush=True)
"""


def process(armed: str | None, *, switch: str | None = "1", code: str = HITS) -> subprocess.Popen[str]:
    ours = {failpoints.ENVIRONMENT_VARIABLE: armed, failpoints.SWITCH: switch}
    environment = {k: v for k, v in os.environ.items() if k not in ours}
    environment.update({name: value for name, value in ours.items() if value is not None})
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ends(*started: subprocess.Popen[str]) -> list[tuple[int, str]]:
    """The exit code and the output of each, which run side by side."""
    found = []
    for each in started:
        with each:
            output, _ = each.communicate(timeout=LIMIT)
        found.append((each.returncode, output))
    return found


IN_A_THREAD = """
import os, threading
from dualwrite import failpoints

def hits():
    for _ in range(30):
        failpoints.hit("after_begin")
        os.write(1, b"x")

other = threading.Thread(target=hits)
other.start()
other.join()
"""


def test_the_environment_arms_another_process() -> None:
    cases: dict[str | None, tuple[int, str]] = {
        None: (0, "alive\nstill alive\n"),
        "": (0, "alive\nstill alive\n"),
        "after_begin=exit": (70, ""),
        "after_begin#2=exit:7": (7, "alive\n"),
        "after_begin#2=kill": (-signal.SIGKILL, "alive\n"),
        "after_begin=raise": (1, ""),
        "after_send=kill": (0, "alive\nstill alive\n"),
    }
    assert ends(*map(process, cases)) == [*cases.values()]


def test_a_variable_without_the_switch_kills_no_process() -> None:
    cases = [*product(["after_begin=kill", "nowhere=raise", "@/no/such/file"], [None, "", "0"])]
    found = ends(*(process(stray, switch=switch) for stray, switch in cases))
    assert found == [(0, "alive\nstill alive\n")] * len(cases)


def test_a_process_may_arm_itself_without_the_switch() -> None:
    armed_by_itself = f"from dualwrite.testing import failpoints\nfailpoints.arm_from_environment()\n{HITS}"
    assert ends(process("after_begin=kill", switch=None, code=armed_by_itself)) == [(-signal.SIGKILL, "")]


def test_importing_the_library_fails_with_an_invalid_variable() -> None:
    with process("nowhere=raise") as other:
        _, errors = other.communicate(timeout=LIMIT)
    assert other.returncode == 1
    assert "There is no failpoint 'nowhere'" in errors


def test_a_stopped_process_continues_after_sigcont(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    with process(f"after_begin#2=touch:{touched};after_begin#2=stop") as other:
        assert os.waitpid(other.pid, os.WUNTRACED)[1] == 0x7F | signal.SIGSTOP << 8
        assert touched.exists()
        other.send_signal(signal.SIGCONT)
        output, _ = other.communicate(timeout=LIMIT)
    assert (other.returncode, output) == (0, "alive\nstill alive\n")


def test_a_thread_that_stops_its_process_goes_no_further() -> None:
    """A signal to the process may be received by another thread, while this one runs on."""
    with process("after_begin=stop", code=IN_A_THREAD) as other:
        assert other.stdout is not None
        try:
            for _ in range(30):
                assert os.waitpid(other.pid, os.WUNTRACED)[1] == 0x7F | signal.SIGSTOP << 8
                assert not select.select([other.stdout], [], [], 0)[0], "it went on"
                other.send_signal(signal.SIGCONT)
                assert os.read(other.stdout.fileno(), 1) == b"x"
        finally:
            other.kill()
