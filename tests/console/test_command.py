"""`dualwrite console`: it prints an address with a token, serves the page on this machine, and ends at Ctrl-C."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dualwrite.cli.console import _is_loopback
from fixtures.command import output_of
from fixtures.fork_server import ForkedProcess
from fixtures.pace import LIMIT, ended, until
from fixtures.tables import table


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[ForkedProcess, str]]:
    """The command, and the address that it has printed."""
    words = ["console", "--port", "0", *arguments]
    with ForkedProcess("dualwrite.cli", words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        found = re.fullmatch(r"The console: (http://\S+)\n", process.stdout.readline())
        assert found is not None
        yield process, found[1]
        process.send_signal(signal.SIGINT)
        assert ended(process) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def opened(address: str) -> str:
    """The page, opened by a browser that keeps cookies."""
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    return str(browser.open(address, timeout=LIMIT).read().decode())


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "role"), [((), "operator"), (("--read-only",), "viewer")])
def test_the_address_opens_the_page(sqlite_url: str, arguments: tuple[str, ...], role: str) -> None:
    with serving("--url", sqlite_url, "--kafka", "127.0.0.1:1", *arguments) as (_, address):
        assert address.startswith("http://127.0.0.1:")
        page = until(lambda: opened(address), "the page")
        assert f"<dd>{role}</dd>" in page
        with pytest.raises(urllib.error.HTTPError, match="401"):
            opened(address.partition("?")[0])


def test_a_port_in_use_is_a_usage_error(sqlite_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        code, out, err = output_of(capsys, "console", "--url", sqlite_url, "--port", port)
    assert (code, out) == (2, "")
    assert f"can't listen on 127.0.0.1:{port}" in err


def test_without_a_database_and_kafka_the_error_says_how_to_give_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DUALWRITE_DATABASE_URL", raising=False)
    monkeypatch.delenv("DUALWRITE_KAFKA_BOOTSTRAP_SERVERS", raising=False)
    code, _, err = output_of(capsys, "console", "--port", "0")
    assert (code, "Neither a database nor Kafka is given" in err) == (1, True)


@table(("host", "expected"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("ops", False)])
def test_what_only_this_machine_can_reach(host: str, expected: bool) -> None:
    assert _is_loopback(host) is expected
