"""Templates and files of the page: HTML that escapes everything, and scripts and styles with the hashes that browsers check."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dualwrite.console.actions import entry_key
from dualwrite.console.charts import Chart, chart
from dualwrite.console.recent import POINTS, SPAN_SECONDS, STEPS
from dualwrite.console.words import ago, clock, number_words, seconds_words
from dualwrite.diagnosis.positions import ShownPosition
from dualwrite.diagnosis.stuck import decision_words, groups_words, holder_words
from dualwrite.observability import Steps
from dualwrite.texts import counted, description_words, now_ms, state_words, time_text

_HERE: Final = Path(__file__).parent
_LEAST_RATE: Final = 0.1
_STATIC: Final = _HERE / "static"
_TYPES: Final = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}


@dataclass(frozen=True)
class Asset:
    """A file that the page loads.

    Args:
        content: Its bytes.
        media_type: Its type.
        integrity: Its hash, as browsers check it.
    """

    content: bytes
    media_type: str
    integrity: str

    @property
    def version(self) -> str:
        """A part of the hash for its address, which thus changes with the content."""
        return hashlib.sha256(self.content).hexdigest()[:12]


def _loaded() -> dict[str, Asset]:
    found = {}
    for path in sorted(_STATIC.rglob("*")):
        if path.suffix in _TYPES:
            content = path.read_bytes()
            integrity = f"sha384-{base64.b64encode(hashlib.sha384(content).digest()).decode()}"
            found[path.relative_to(_STATIC).as_posix()] = Asset(content, _TYPES[path.suffix], integrity)
    return found


ASSETS: Final[Mapping[str, Asset]] = _loaded()
"""By the name in their address."""


def rate_charts(series: Mapping[str, list[Any]]) -> list[Chart]:
    """The charts of the last 15 minutes, of the points of `Recent.series` or `DatabaseRates.series`."""
    now = time.time()

    def drawn(title: str, names: Iterable[str], words: Callable[[float], str], least: float) -> Chart:
        lines = [(name, list(zip(series["time"], series[name], strict=True))) for name in names if name in series]
        begins = now - POINTS * SPAN_SECONDS
        return chart(title, lines, begins=begins, ends=now, gap=3 * SPAN_SECONDS, words=words, least=least)

    charts = [drawn("Per second", ("transactions", "units"), number_words, _LEAST_RATE)]
    if "p50" in series:
        charts.append(drawn("From call to result", ("p50", "p99"), lambda found: seconds_words(found / 1000), 1.0))
    return charts


def _furthest(positions: Sequence[ShownPosition], most: int) -> list[ShownPosition]:
    """The positions in their order; if there are more than `most`, those that are furthest behind."""
    if len(positions) <= most:
        return list(positions)
    return sorted(positions, key=lambda one: -((one.behind or 0) + (one.held_back or 0)))[:most]


def _bar(steps: Steps) -> Markup:
    """The durations of a transaction's steps, as a bar."""
    names = [(STEPS[name], seconds) for name, seconds in steps._asdict().items()]
    return Markup(_TEMPLATES.get_template("bar.html").render(steps=steps, names=names))  # noqa: S704  (the template has escaped it)


def _environment() -> Environment:
    made = Environment(loader=FileSystemLoader(_HERE / "templates"), autoescape=True, undefined=StrictUndefined)
    made.trim_blocks = made.lstrip_blocks = True
    made.filters |= {
        "bar": _bar,
        "ago": ago,
        "clock": clock,
        "counted": counted,
        "decision": decision_words,
        "description": description_words,
        "entries": lambda lost: [("entry", entry_key(row, entry)) for row, entry in lost],
        "fences": lambda rows: [("fence", f"{row.transactional_id} {row.fence}") for row in rows],
        "furthest": _furthest,
        "groups": groups_words,
        "holder": holder_words,
        "number": number_words,
        "path": lambda text: quote(str(text), safe=""),
        "seconds": seconds_words,
        "state": state_words,
        "time": time_text,
        "text": lambda value: "" if value is None else getattr(value, "value", value),
    }
    made.globals |= {"assets": ASSETS, "now_ms": now_ms, "rate_charts": rate_charts}
    return made


_TEMPLATES: Final = _environment()


def rendered(template: str, **values: Any) -> str:
    """The HTML of a template; every value is escaped."""
    return _TEMPLATES.get_template(template).render(values)
