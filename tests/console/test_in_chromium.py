"""The page in a real browser: it refreshes itself, nothing breaks its policy, it fits a phone, and operators click on it."""

from __future__ import annotations

import os
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from playwright.sync_api import FloatRect
from starlette.applications import Starlette
from starlette.routing import Mount

import dualwrite
from console.chromium import PHONE, WIDE, Visit, served, visiting
from console.console_scene import SCREENSHOTS, ConsoleScene, operator
from dualwrite.console import sections, waiting
from dualwrite.console.app import TABS
from fixtures.broker import make_topic, wait_for_markers
from fixtures.pace import LIMIT

pytestmark = pytest.mark.slow


@pytest.fixture
def address(scene: ConsoleScene, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A console with something in most sections, which has come there one after another."""
    monkeypatch.setattr(sections, "LONGER_SECONDS", 0.0)
    if SCREENSHOTS:  # an hour passes within a minute
        for name in ("SAMPLE_SECONDS", "SHOWN_SECONDS"):
            monkeypatch.setattr(waiting, name, getattr(waiting, name) / 60)
    seconds = float(os.environ.get("DUALWRITE_SCREENSHOT_LOAD", "1"))
    make_topic(scene.broker, f"{scene.name('checkout')}-events", 1)
    with scene.relay("not a topic!") as relay, load(scene, scene.name("shop")) as pool:
        mounted = scene.made(pool=pool, authorize=operator, relays=[relay])
        with served(Starlette(routes=[Mount("/dualwrite", mounted)])) as port:
            found = f"http://127.0.0.1:{port}/dualwrite"
            urllib.request.urlopen(found, timeout=LIMIT).close()  # readings begin with the first look
            for happens in (
                lambda: scene.lose(scene.name("refunds")),
                lambda: scene.crash(scene.name("checkout")),
                lambda: scene.journal(scene.name("mail"), "one", "two"),
            ):
                time.sleep(seconds / 3)
                happens()
            yield found


@contextmanager
def load(scene: ConsoleScene, prefix: str) -> Iterator[dualwrite.WriterPool]:
    """A pool that is used."""
    stop = threading.Event()

    def unit(tx: dualwrite.Transaction) -> None:
        tx.db.execute(sa.text("SELECT 1"))
        tx.send(f"{prefix}-events", b"x")

    def work() -> None:
        while not stop.wait(0.02):
            pool.run(unit)

    with dualwrite.create_pool(scene.store, prefix=prefix, kafka=scene.servers, size=2, lanes=1) as pool:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            yield pool
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def test_the_page_in_a_browser(scene: ConsoleScene, address: str, tmp_path: Path) -> None:
    with visiting(**WIDE) as visit:
        visit.open(f"{address}/")
        visit.page.get_by_text(scene.name("refunds")).first.wait_for()
        visit.page.get_by_text("1 letter", exact=True).wait_for()
        assert visit.height == WIDE["viewport"]["height"], "everything is to be seen without scrolling"
        picture(visit, tmp_path, "console-wide.png")
        visit.page.emulate_media(color_scheme="dark")
        picture(visit, tmp_path, "console-dark.png")
        visit.page.emulate_media(color_scheme="light")
        for page, name in ((scene.name("refunds"), "console-id.png"), (f"{scene.name('shop')}.1", "console-timeline.png")):
            visit.open(f"{address}/id/{page}")
            picture(visit, tmp_path, name)
        assert not visit.complaints


@pytest.mark.soak
def test_the_page_on_a_phone(scene: ConsoleScene, address: str, tmp_path: Path) -> None:
    """It fits on every tab, and the tables that have become lists are tables for screen readers."""
    with visiting(**PHONE) as visit:
        for page in ("", *list(TABS)[1:], f"id/{scene.name('refunds')}", f"id/{scene.name('shop')}.1"):
            visit.page.goto(f"{address}/{page}")
            if not page:
                picture(visit, tmp_path, "console-narrow.png", height=1400)
            for summary in visit.page.locator("summary").all():
                summary.click()
            assert visit.width == PHONE["viewport"]["width"], f"{page} fits"
        visit.open(f"{address}/ids")
        table = visit.page.get_by_role("table", name="Ids in use")
        assert table.get_by_role("columnheader").all_inner_texts()[:2] == ["Id", "State"]
        assert table.get_by_role("rowheader", name=scene.name("refunds")).count() == 1
        assert not visit.complaints


def test_the_tabs_are_links_that_need_no_script_and_no_mouse(scene: ConsoleScene) -> None:
    app = Starlette(routes=[Mount("/dualwrite", scene.made())])
    with served(app) as port, visiting(**WIDE, java_script_enabled=False) as visit:
        address = f"http://127.0.0.1:{port}/dualwrite"
        visit.page.goto(f"{address}/")
        visit.page.keyboard.press("Tab")
        visit.page.keyboard.press("Enter")
        assert visit.page.url.endswith("#main"), "the first stop skips the tabs"
        tabs = visit.page.get_by_role("navigation", name="Sections").get_by_role("link")
        assert [text.split("\n")[0].split(" !")[0] for text in tabs.all_inner_texts()] == [title for title, _ in TABS.values()]
        tabs.filter(has_text="Jobs").focus()
        visit.page.keyboard.press("Enter")
        visit.page.wait_for_url(f"{address}/jobs")
        assert visit.page.locator("[aria-current=page]").inner_text() == "Jobs"
        assert visit.page.get_by_text("There are no jobs.").count() == 1
        assert visit.page.get_by_role("heading", level=1).inner_text() == "Jobs"
        assert "all is well" in visit.page.get_by_role("status").inner_text().lower()


@pytest.mark.soak
def test_an_operator_publishes_again_and_acknowledges(scene: ConsoleScene) -> None:
    again, known = scene.name("refunds"), scene.name("billing")
    make_topic(scene.broker, f"{again}-events", 1)
    for name in (again, known):
        scene.lose(name)
    with served(scene.made(authorize=operator)) as port, visiting(**WIDE) as visit:
        visit.open(f"http://127.0.0.1:{port}/")
        visit.page.get_by_role("link", name=again).first.click()
        visit.press("Publish the lost messages again", f"Publish again on {again}")
        visit.page.get_by_text("its messages are published again now").wait_for()
        visit.open(f"http://127.0.0.1:{port}/id/{known}")
        visit.press("Acknowledge", "Acknowledge 1 transaction")
        visit.page.get_by_text("Acknowledged 1 transaction").wait_for()
        assert not visit.complaints
    wait_for_markers(scene.servers)
    assert (scene.published(again), scene.row(again).lost, scene.row(known).lost) == ([b"from the crashed writer"], (), ())


@pytest.mark.soak
def test_what_an_operator_has_chosen_stays_chosen_while_the_page_refreshes(scene: ConsoleScene) -> None:
    with scene.relay("not a topic!") as relay:
        app = scene.made(authorize=operator, relays=[relay])
        with visiting(**WIDE) as visit:
            box, away = visit.page.locator("input[id^=drop-]"), visit.page.get_by_text("The console does not answer.")
            with served(app) as port:
                visit.open(f"http://127.0.0.1:{port}/letters")
                visit.page.get_by_text("Delete", exact=True).click()
                box.check()
                for _ in range(2):
                    with visit.page.expect_response(lambda answer: answer.url.endswith("/section/letters")) as answered:
                        pass
                    answered.value.finished()
                assert box.is_checked()
                assert not visit.complaints
            away.wait_for()
            with served(app, port):
                away.wait_for(state="hidden")
                assert box.is_checked()
                with visit.page.expect_navigation():
                    visit.page.get_by_role("button", name="Delete the chosen").click()
                visit.page.get_by_text("Deleted 1 dead letter.").wait_for()
        assert relay.dead_letters.count() == 0


@pytest.mark.soak
def test_a_viewer_has_no_buttons(scene: ConsoleScene) -> None:
    lost = scene.name("refunds")
    scene.lose(lost)
    with scene.relay("not a topic!") as relay:
        app = scene.made(authorize=None, relays=[relay])
        with served(app) as port, visiting(**WIDE) as visit:
            for tab, text in (("ids", "An operator can publish them again"), ("letters", "InvalidMessageError")):
                visit.open(f"http://127.0.0.1:{port}/{tab}")
                visit.page.get_by_text(text).wait_for()
                assert visit.page.get_by_role("button").count() == 0
            visit.open(f"http://127.0.0.1:{port}/id/{lost}")
            visit.page.get_by_text("What recovery would do").wait_for()
            assert visit.page.get_by_role("button").count() == 0


def picture(visit: Visit, folder: Path, name: str, height: int | None = None) -> None:
    """Take a picture of what the window shows, or of so many pixels from the page's top, into `folder`, or into SCREENSHOTS."""
    where = (Path(SCREENSHOTS) if SCREENSHOTS and name != "console-dark.png" else folder) / name
    top = None if height is None else FloatRect(x=0, y=0, width=PHONE["viewport"]["width"], height=height)
    visit.page.screenshot(path=where, full_page=height is not None, clip=top, scale="css")
    assert where.stat().st_size > 10_000
