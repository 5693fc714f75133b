"""Forked processes behave like newly started ones, and share nothing with the process that forks them."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from fixtures.fork_server import ForkedProcess, ForkServer
from fixtures.pace import LIMIT

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    made = ForkServer()
    yield made
    made.close()


def forked(
    code: str,
    server: ForkServer,
    *,
    failpoints: str = "",
    environment: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
) -> ForkedProcess:
    return ForkedProcess(
        "forked_code",
        [code],
        failpoints=failpoints,
        environment=environment,
        folder=HERE,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        server=server,
    )


def ended(process: ForkedProcess) -> tuple[int, str, str]:
    """Its exit code and output."""
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        output, errors = process.stdout.read(), process.stderr.read()
        return process.wait(LIMIT), output, errors


def test_a_process_has_its_own_environment_folder_input_and_random_numbers(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DUALWRITE_FAILPOINTS", "after_begin=kill")
    code = """
import json, os, random, signal, sys, uuid
said = [dict(os.environ), os.getcwd(), sys.stdin.read(), signal.getsignal(signal.SIGINT) is signal.default_int_handler]
print(json.dumps([*said, [random.random(), uuid.uuid4().hex]]))
"""
    found = []
    for name in ("first", "second"):
        process = forked(code, server, environment={"NAME": name}, stdin=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(f"{name} says\nhello")
        process.stdin.close()
        found.append(json.loads(ended(process)[1]))
    for name, (environment, folder, read, interruptible, _) in zip(("first", "second"), found, strict=True):
        assert (environment, folder, read) == ({"NAME": name}, str(tmp_path), f"{name} says\nhello")
        assert interruptible
    assert not set(found[0][-1]) & set(found[1][-1])


def test_a_process_shares_no_descriptor_or_thread(server: ForkServer) -> None:
    code = """
import os
opened = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
print(sorted(link.partition(":")[0] for fd, link in opened.items()), len(os.listdir("/proc/self/task")))
"""
    with forked("import time; time.sleep(1000)", server) as another:
        assert ended(forked(code, server))[1] == "['/dev/null', 'pipe', 'pipe'] 1\n"
        another.kill()


def test_failpoints_are_armed_in_it_alone(server: ForkServer) -> None:
    code = "from dualwrite.failpoints import hit; hit('after_begin'); print('alive', flush=True); hit('after_begin')"
    assert ended(forked(code, server, failpoints="after_begin#2=kill"))[:2] == (-signal.SIGKILL, "alive\n")
    assert ended(forked(code, server))[:2] == (0, "alive\n")
