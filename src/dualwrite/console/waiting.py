"""What waits and how old it is, over the last hour: the numbers of the first page, and their history in bounded memory."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dualwrite.console.charts import Chart, chart
from dualwrite.console.sections import Sections
from dualwrite.console.subject import Subject
from dualwrite.console.words import number_words, seconds_words
from dualwrite.diagnosis.positions import ShownPosition
from dualwrite.texts import now_ms

SAMPLE_SECONDS: Final = 15.0
"""Seconds between two readings that are kept."""

SHOWN_SECONDS: Final = 3600.0
"""How long a reading is kept; and how long reading goes on after somebody has looked last."""

_GAP: Final = 3 * SAMPLE_SECONDS


def _age_words(seconds: float) -> str:
    return seconds_words(round(seconds))


@dataclass(frozen=True)
class Measure:
    """A number that is kept.

    Args:
        name: What it is: what is counted, in the plural, or which age it is.
        read: The number, made of what was read last; None if that is not known.
        words: The number in words, without its name.
        one: The name if the number is 1; by default the same.
    """

    name: str
    read: Callable[[Sections], float | None]
    words: Callable[[float], str] = _age_words
    one: str = ""


@dataclass(frozen=True)
class Tile:
    """What the first page says about one kind of waiting.

    Args:
        tab: The tab that shows more.
        title: What waits.
        is_there: Whether a console can know it, by what it looks at.
        measures: How many wait; and for how long the oldest does, or how much else waits.
        none: What is said if nothing waits.
        is_work: Whether it is normal that something waits.
    """

    tab: str
    title: str
    is_there: Callable[[Subject], object]
    measures: tuple[Measure, ...]
    none: str = "none"
    is_work: bool = False


@dataclass(frozen=True)
class ShownTile:
    """A tile now: what waits, in words, and its charts. `level` is a class of the style: none, work, waits or unknown."""

    tile: Tile
    level: str
    text: str
    more: str
    charts: tuple[Chart, ...]


class History:
    """The numbers of the last hour. Thread-safe.

    A thread reads them every 15 seconds, from the first `look` until nobody has looked for an hour.

    Args:
        sections: What the page shows.
        read: Begins to read what is too old.
    """

    def __init__(self, sections: Sections, read: Callable[[], None]) -> None:
        self.tiles = [tile for tile in TILES if tile.is_there(sections.subject)]
        self._sections = sections
        self._read = read
        self._lock = threading.Lock()
        self._points: deque[tuple[float, Mapping[Measure, float | None]]] = deque(maxlen=int(SHOWN_SECONDS / SAMPLE_SECONDS))
        self._looked = 0.0
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def look(self) -> None:
        """Somebody looks at the page."""
        with self._lock:
            self._looked = time.monotonic()
            if self._thread is None and not self._ended.is_set():
                self._thread = threading.Thread(target=self._run, name="dualwrite console history", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Read nothing any more."""
        self._ended.set()

    @property
    def since(self) -> float | None:
        """The time of the oldest reading."""
        with self._lock:
            return self._points[0][0] if self._points else None

    def shown(self) -> list[ShownTile]:
        """The tiles now, with what is known at this moment as their last point."""
        with self._lock:
            points = list(self._points)
        points.append((time.time(), self._numbers()))
        return [self._shown(tile, points) for tile in self.tiles]

    def sample(self) -> None:
        """Keep what is known now, and begin to read what is too old."""
        numbers = self._numbers()
        with self._lock:
            self._points.append((time.time(), numbers))
        self._read()

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            with self._lock:
                if time.monotonic() - self._looked > SHOWN_SECONDS:
                    self._thread = None
                    return
            self.sample()

    def _numbers(self) -> dict[Measure, float | None]:
        return {measure: measure.read(self._sections) for tile in self.tiles for measure in tile.measures}

    def _shown(self, tile: Tile, points: list[tuple[float, Mapping[Measure, float | None]]]) -> ShownTile:
        now, numbers = points[-1]
        charts = []
        for measure in tile.measures:
            line = measure.name, [(at, found[measure]) for at, found in points]
            title, begins = f"{tile.title}, {measure.name}", now - SHOWN_SECONDS
            charts.append(chart(title, [line], begins=begins, ends=now, gap=_GAP, words=measure.words))
        first, *others = tile.measures
        count = numbers[first]
        level = "unknown" if count is None else "none" if not count else "work" if tile.is_work else "waits"
        noun = (first.one or first.name) if count == 1 else first.name
        text = "not known" if count is None else f"{first.words(count)} {noun}" if count else tile.none
        more = [f"{each.name} {each.words(number)}" for each in others if count and (number := numbers[each])]
        return ShownTile(tile, level, text, ", ".join(more), tuple(charts))


# --- the numbers ----------------------------------------------------------------------------------------------------------


def _all(
    found: Iterable[Any] | None, number: Callable[[Any], float | None], together: Callable[[list[float]], float]
) -> float | None:
    """The numbers of all, together; None if they or one of them are not known."""
    if found is None:
        return None
    numbers = [number(one) for one in found]
    known = [one for one in numbers if one is not None]
    return together(known) if len(known) == len(numbers) else None


def _most(numbers: list[float]) -> float:
    return max(numbers, default=0.0)


def _doubts(sections: Sections) -> float | None:
    if sections.ids.known.current is None or (sections.subject.has_kafka and sections.seen.known.current is None):
        return None
    return len({each.transactional_id for each in sections.needs()})


def _oldest_doubt(sections: Sections) -> float | None:
    if _doubts(sections) is None:
        return None
    began = sections.beginnings()
    return _all(sections.needs(), lambda each: max(0.0, time.time() - began.get(each.kafka_id, time.time())), _most)


def _stuck(sections: Sections) -> float | None:
    return None if sections.stuck.known.current is None else len(sections.stuck_partitions())


def _longest_wait(sections: Sections) -> float | None:
    found = None if sections.stuck.known.current is None else sections.stuck_partitions()
    return _all(found, lambda one: (one.holder.age_ms(now_ms()) or 0) / 1000, _most)


def _journaled(sections: Sections) -> float | None:
    return _all(sections.journals.known.current, lambda state: state.gate.entries or 0, sum)


def _oldest_journaled(sections: Sections) -> float | None:
    return _all(sections.journals.known.current, lambda state: state.age, _most)


def _rows(sections: Sections) -> float | None:
    return _all(sections.relays.known.current, lambda one: None if one.status is None else one.status.waiting, sum)


def _oldest_row(sections: Sections) -> float | None:
    return _all(sections.relays.known.current, lambda one: None if one.status is None else one.status.oldest or 0.0, _most)


def _letters(sections: Sections) -> float | None:
    subject = sections.subject
    stored = 0.0 if subject.sql_store is None else _all(sections.letters.known.current, lambda each: each.count, sum)
    found = sections.topics.known.current if subject.dead_letter_topics else []
    in_topics = _all(found, lambda each: None if each.problem else each.count, sum)
    return None if stored is None or in_topics is None else stored + in_topics


def _behind(sections: Sections) -> float | None:
    return _all(_lags(sections), lambda one: one.behind or 0, sum)


def _held_back(sections: Sections) -> float | None:
    return _all(_lags(sections), lambda one: one.held_back or 0, sum)


def _lags(sections: Sections) -> list[ShownPosition] | None:
    return None if sections.positions.known.current is None else sections.lags.known.current


def _open_runs(sections: Sections) -> float | None:
    return _all(sections.jobs.known.current, lambda one: one.row.is_open, sum)


def _silent_job(sections: Sections) -> float | None:
    return _all(sections.jobs.known.current, lambda one: one.silent or 0.0, _most)


def _rate(sections: Sections) -> float | None:
    if sections.recent is None and sections.ids.known.current is None:
        return None
    known = [each for each in sections.series()["transactions"] if each is not None]
    return known[-1] if known else None


TILES: Final = (
    Tile(
        "ids",
        "Ids in doubt",
        lambda subject: subject.has_database,
        (Measure("ids", _doubts, number_words, "id"), Measure("oldest", _oldest_doubt)),
    ),
    Tile(
        "stuck",
        "Stuck partitions",
        lambda subject: subject.has_kafka,
        (Measure("partitions", _stuck, number_words, "partition"), Measure("oldest", _longest_wait)),
    ),
    Tile(
        "journals",
        "Journals",
        lambda subject: subject.sql_store,
        (Measure("messages", _journaled, number_words, "message"), Measure("oldest", _oldest_journaled)),
        none="empty",
    ),
    Tile(
        "journals",
        "Relays",
        lambda subject: subject.relays,
        (Measure("rows", _rows, number_words, "row"), Measure("oldest", _oldest_row)),
        none="nothing waits",
        is_work=True,
    ),
    Tile(
        "letters",
        "Dead letters",
        lambda subject: subject.sql_store or subject.dead_letter_topics,
        (Measure("letters", _letters, number_words, "letter"),),
    ),
    Tile(
        "consumers",
        "Consumers",
        lambda subject: subject.has_database and subject.has_kafka,
        (
            Measure("behind", _behind, number_words),
            Measure("held back", _held_back, number_words),
        ),
        none="none behind",
        is_work=True,
    ),
    Tile(
        "jobs",
        "Jobs",
        lambda subject: subject.sql_store,
        (Measure("open runs", _open_runs, number_words, "open run"), Measure("silent", _silent_job)),
        none="none runs",
        is_work=True,
    ),
    Tile(
        "rates",
        "Transactions",
        lambda subject: subject.has_database,
        (Measure("per second", _rate, number_words),),
        none="none now",
        is_work=True,
    ),
)
"""All tiles, in the order of the page."""
