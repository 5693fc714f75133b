"""A real browser for tests: Chromium without a window, which opens one page and takes its picture or prints its document."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import uvicorn
from starlette.types import ASGIApp

from fixtures.pace import LIMIT, until

WIDE = (1280, 1600)
NARROW = (500, 2600)
"""Chromium without a window does not make windows that are narrower than 500 pixels."""

_NAMES = ("chromium", "chromium-browser", "google-chrome")


@cache
def chromium() -> str:
    """The browser. Where `CI` is set, it is installed if that is possible: it takes about half a minute."""
    if given := os.environ.get("CHROMIUM"):
        return given
    if (found := next(filter(None, map(shutil.which, _NAMES)), None)) is None and os.environ.get("CI") and os.geteuid() == 0:
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium"]
        for command in (["apt-get", "update", "-qq"], install):
            subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=240)
        found = next(filter(None, map(shutil.which, _NAMES)), None)
    return found or pytest.skip("there is no Chromium: apt-get install chromium")


@contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """Serve an application on a free port of this machine; yields its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        until(lambda: server.started, "the server has started")
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(LIMIT)


def open_page(address: str, folder: Path, *options: str, seconds: float = 8.0) -> tuple[str, str]:
    """Open a page for some seconds of its time; what the browser has printed, and its log."""
    ended = subprocess.run(
        [
            chromium(),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--enable-logging=stderr",
            f"--user-data-dir={folder / 'profile'}",
            f"--virtual-time-budget={int(seconds * 1000)}",
            *options,
            address,
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        cwd=folder,
    )
    return ended.stdout, ended.stderr
