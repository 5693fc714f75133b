"""What waits over time: charts with breaks where nothing is known, and a history that is bounded and ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import dualwrite
from dualwrite.console import waiting
from dualwrite.console.charts import HEIGHT, WIDTH, Point, chart
from dualwrite.console.sections import Sections
from dualwrite.console.subject import Subject
from dualwrite.console.waiting import History
from dualwrite.console.words import number_words
from fixtures.pace import until


@pytest.fixture
def observed(sqlite_url: str) -> Iterator[Sections]:
    """What a console of a database alone looks at."""
    subject = Subject(dualwrite.Settings(database_url=sqlite_url))
    yield Sections(subject, None)
    subject.close()


def test_a_chart_has_a_break_where_nothing_is_known_or_was_read() -> None:
    points: list[Point] = [(-50.0, 9.0), (0.0, 1.0), (10.0, 4.0), (20.0, None), (30.0, 2.0), (90.0, 0.0), (100.0, 2.0)]
    drawn = chart("Journal", [("messages", points)], begins=0, ends=100, gap=30, words=number_words)
    (line,) = drawn.lines
    assert line.path.count("M") == line.area.count("Z") == 3, "before and after 20, and from 90 on"
    assert line.path.startswith(f"M0.0 {HEIGHT - 2 - (HEIGHT - 4) / 4:.1f} L{WIDTH / 10:.1f} 2.0")
    assert drawn.in_words == "Journal: at most 4, now 2", "what was before its beginning does not count"
    unknown = chart("Journal", [("messages", [(50.0, None)])], begins=0, ends=100, gap=30, words=number_words)
    assert (unknown.peak, unknown.lines[0].path) == (None, "")


def nothing_waits(history: History) -> bool:
    return {tile.level for tile in history.shown() if tile.tile.tab != "rates"} == {"none"}


def test_the_history_is_bounded_and_a_gap_is_not_0(observed: Sections) -> None:
    history = History(observed, lambda: None)
    for _ in range(300):
        history.sample()
    assert len(history._points) == waiting.SHOWN_SECONDS / waiting.SAMPLE_SECONDS
    assert {tile.text for tile in history.shown()} == {"not known"}
    for read in (observed.ids, observed.journals, observed.letters, observed.jobs):
        read.begin_if_due()
    until(lambda: nothing_waits(history), "what waits is read")
    assert [tile.tile.title for tile in history.shown()] == ["Ids in doubt", "Journals", "Dead letters", "Jobs", "Transactions"]


def test_it_is_read_from_the_first_look_until_nobody_has_looked_for_long(
    observed: Sections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "SAMPLE_SECONDS", 0.01)
    read = threading.Event()
    history = History(observed, read.set)
    assert history._thread is None, "a console that nobody looks at reads nothing"
    history.look()
    until(read.is_set, "a reading")
    monkeypatch.setattr(waiting, "SHOWN_SECONDS", 0.0)
    until(lambda: history._thread is None, "nobody looks")
    monkeypatch.setattr(waiting, "SHOWN_SECONDS", 3600.0)
    history.look()
    thread = history._thread
    assert thread is not None
    history.close()
    until(lambda: not thread.is_alive(), "it is closed")
