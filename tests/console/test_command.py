"""`dualwrite console`: it prints an address with a token, serves the page on this machine, and ends at Ctrl-C."""

from __future__ import annotations

import http.client
import itertools
import re
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import urlsplit

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

import dualwrite
from dualwrite.cli.console import _is_loopback
from dualwrite.console import console
from dualwrite.console.access import FORM_COOKIE
from dualwrite.console.app import TABS
from fixtures.command import output_of
from fixtures.fork_server import ForkedProcess
from fixtures.pace import LIMIT, ended, until
from fixtures.tables import table


@contextmanager
def serving(*arguments: str, logs: str = "Kafka at") -> Iterator[tuple[ForkedProcess, str]]:
    """The command, and the address that it has printed. On stderr are only lines that match `logs`."""
    words = ["console", "--port", "0", *arguments]
    with ForkedProcess("dualwrite.cli", words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        found = re.fullmatch(r"The console: (http://\S+)\n", process.stdout.readline())
        assert found is not None
        yield process, found[1]
        process.send_signal(signal.SIGINT)
        assert ended(process) == 0
        assert process.stderr is not None
        assert [line for line in process.stderr if not re.match(logs, line)] == []


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


class Proxy:
    """A small proxy that serves the console at /ops, as nginx does with its settings.

    Args:
        target: The console's host and port.
        strips: Whether it takes /ops away from the path.
        keeps_host: Whether it passes the header Host on, or replaces it, as nginx does by default.
    """

    def __init__(self, target: str, *, strips: bool, keeps_host: bool) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = (self.path.removeprefix("/ops") or "/") if strips else self.path
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                connection = http.client.HTTPConnection(target, timeout=LIMIT)
                headers = dict(self.headers.items()) | ({} if keeps_host else {"Host": target})
                connection.request(self.command, path, body, headers)
                answer = connection.getresponse()
                self.send_response(answer.status)
                for name, content in answer.getheaders():
                    self.send_header(name, content)
                self.end_headers()
                self.wfile.write(answer.read())
                connection.close()

            do_POST = do_GET  # noqa: N815  (its name in http.server)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self.origin = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(LIMIT)


@pytest.mark.soak
def test_the_page_works_at_a_path_of_a_proxy_and_beside_it(sqlite_url: str) -> None:
    """Whether the proxy keeps or strips the path, and keeps or replaces Host; the printed address needs no proxy."""
    given = ["--url", sqlite_url, "--kafka", "127.0.0.1:1", "--root-path", "ops/", "--origin", "http://ops.example.com/"]
    with serving(*given, logs="Kafka at|.* on nobody") as (_, address):
        found = urlsplit(address)
        assert found.path == "/ops/"
        assert "<dd>operator</dd>" in until(lambda: opened(address), "the page")
        for strips, keeps_host in itertools.product([True, False], [True, False]):
            with (
                Proxy(found.netloc, strips=strips, keeps_host=keeps_host) as proxy,
                httpx2.Client(base_url=proxy.origin, follow_redirects=True, timeout=LIMIT) as browser,
            ):
                page = browser.get(f"/ops/?{found.query}")
                assert (page.url.path, page.url.query) == ("/ops/", b"")
                assert page.text.count("<dd>operator</dd>") == browser.get("/ops").text.count("<dd>operator</dd>") == 1
                parts = set(re.findall(r'(?:hx-get|href|src)="(/[^"#]*)"', page.text))
                assert {f"/ops/{tab}" for tab in TABS if tab != "overview"} < parts
                asked = [part for part in parts if "/static/" in part or part == "/ops/actions"]  # the others wait for Kafka
                assert {part: browser.get(part).status_code for part in asked} == dict.fromkeys(asked, 200)
                assert all(part.startswith("/ops/") for part in parts)
                form = {"token": browser.cookies[FORM_COOKIE], "id": "nobody"}
                for origin, status in {
                    "http://ops.example.com": 200,
                    proxy.origin: 200 if keeps_host else 403,
                    "http://evil.example.com": 403,
                }.items():
                    answer = browser.post("/ops/act/acknowledge", data=form, headers={"Origin": origin})
                    assert (answer.status_code, "name it with --origin" in answer.text) == (status, status == 403)


@table("kept", [True, False])
def test_a_mounted_page_below_a_proxy_s_path(sqlite_url: str, kept: bool) -> None:
    """The `root_path` of the whole application; the proxy keeps or strips it."""
    page = console(settings=dualwrite.Settings(database_url=sqlite_url))
    app = Starlette(routes=[Mount("/dualwrite", page)])
    with closing(page), TestClient(app, root_path="/api") as browser:
        found = browser.get("/api/dualwrite/" if kept else "/dualwrite/")
        assert found.status_code == 200
        assert 'hx-get="/api/dualwrite/section/waiting"' in found.text
        assert 'href="/api/dualwrite/consumers"' in found.text


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
