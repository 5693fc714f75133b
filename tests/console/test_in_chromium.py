"""The page in a real browser: its sections are read by themselves, nothing breaks its policy, and it fits any window."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from starlette.applications import Starlette
from starlette.routing import Mount

import dualwrite
from console import chromium
from console.console_scene import SCREENSHOTS, ConsoleScene, operator
from dualwrite.console import sections
from fixtures.broker import make_topic

pytestmark = pytest.mark.slow


@pytest.fixture
def address(scene: ConsoleScene, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A console with something in each section."""
    chromium.chromium()
    monkeypatch.setattr(sections, "LONGER", 0.0)
    make_topic(scene.broker, f"{scene.name('checkout')}-events", 1)
    scene.crash(scene.name("checkout"))
    scene.lose(scene.name("refunds"))
    scene.journal(scene.name("mail"), "one", "two")
    prefix = scene.name("shop")
    with (
        scene.relay("not a topic!") as relay,
        dualwrite.create_pool(scene.store, prefix=prefix, kafka=scene.servers, size=2, lanes=1) as pool,
    ):
        mounted = scene.made(pool=pool, authorize=operator, relays=[relay])
        stop = threading.Event()

        def unit(tx: dualwrite.Transaction) -> None:
            tx.db.execute(sa.text("SELECT 1"))
            tx.send(f"{prefix}-events", b"x")

        def load() -> None:
            while not stop.wait(0.02):
                pool.run(unit)

        threads = [threading.Thread(target=load) for _ in range(2)]
        for thread in threads:
            thread.start()
        stop.wait(float(os.environ.get("DUALWRITE_SCREENSHOT_LOAD", "1")))
        try:
            with chromium.served(Starlette(routes=[Mount("/dualwrite", mounted)])) as found:
                yield f"{found}/dualwrite"
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def test_the_page_in_a_browser(scene: ConsoleScene, address: str, tmp_path: Path) -> None:
    document, log = chromium.open_page(f"{address}/", tmp_path, "--dump-dom")
    assert "Content Security Policy" not in log, log
    assert "integrity" not in log, log
    assert "Uncaught" not in log, log
    assert 'data-swapped="yes"' in document, "a section was read by htmx"
    assert 'class="uplot' in document, "there is a chart"
    assert f"{scene.name('refunds')}" in document
    for name, size, options in (
        ("wide", chromium.WIDE, ()),
        ("narrow", chromium.NARROW, ()),
        ("dark", chromium.WIDE, ("--force-dark-mode", "--blink-settings=preferredColorScheme=0")),
    ):
        picture(tmp_path, f"{address}/", f"console-{name}.png", size, *options)
    picture(tmp_path, f"{address}/id/{scene.name('refunds')}", "console-id.png", (1280, 1200))
    picture(tmp_path, f"{address}/id/{scene.name('shop')}.1", "console-timeline.png", (1280, 1200))


def picture(folder: Path, address: str, name: str, size: tuple[int, int], *options: str) -> None:
    """Take a picture of a page; SCREENSHOTS is a folder for it."""
    where = folder / name
    chromium.open_page(address, folder, f"--screenshot={where}", f"--window-size={size[0]},{size[1]}", *options)
    assert where.stat().st_size > 10_000
    if SCREENSHOTS:
        shutil.copy(where, SCREENSHOTS)
