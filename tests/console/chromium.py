"""A real browser for tests, by Playwright: Debian's Chromium without a window, whose complaints about a page are kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import pytest
import uvicorn
from playwright.sync_api import Page, sync_playwright
from starlette.types import ASGIApp

from fixtures.pace import LIMIT, until

WIDE: Final[dict[str, Any]] = {"viewport": {"width": 1280, "height": 800}}
PHONE: Final[dict[str, Any]] = {
    "viewport": {"width": 390, "height": 844},
    "is_mobile": True,
    "has_touch": True,
    "device_scale_factor": 2,
}

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
def served(app: ASGIApp, port: int = 0) -> Iterator[int]:
    """Serve an application on a port of this machine, 0 for a free one; yields the port."""
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        until(lambda: server.started, "the server has started")
        yield int(server.servers[0].sockets[0].getsockname()[1])
    finally:
        server.should_exit = server.force_exit = True
        thread.join(LIMIT)


class Visit:
    """A page in a browser.

    Attributes:
        page: The page.
        complaints: What the browser has said about it: errors of scripts, and what the page's policy forbids.
    """

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.set_default_timeout(LIMIT * 1000)
        page.on("console", lambda message: self.complaints.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def open(self, address: str) -> None:
        """Open an address, and wait until the page has read a section again."""
        self.page.goto(address)
        self.page.locator("html[data-swapped=yes]").wait_for(state="attached")

    def press(self, summary: str, button: str) -> None:
        """Unfold what has this summary, press the button in it, and wait for the page that follows."""
        self.page.get_by_text(summary, exact=True).click()
        with self.page.expect_navigation():
            self.page.get_by_role("button", name=button).click()

    @property
    def height(self) -> int:
        """How high the page's content is, in CSS pixels, at least the window's height."""
        return int(self.page.evaluate("document.documentElement.scrollHeight"))

    @property
    def width(self) -> int:
        """How wide the page's content is, in CSS pixels."""
        return int(self.page.evaluate("document.documentElement.scrollWidth"))


@contextmanager
def visiting(**options: Any) -> Iterator[Visit]:
    """A page in a browser of its own, with WIDE, PHONE, or Playwright's other options of a context.

    In the block an event loop runs in this thread, Playwright's: so what blocks, such as a writer, must be outside of it.
    """
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield Visit(opened.new_context(**options).new_page())
        finally:
            opened.close()
