"""Templates and files of the page: HTML that escapes everything, and scripts and styles with the hashes that browsers check."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dualwrite.console.actions import entry_key
from dualwrite.console.recent import STEPS
from dualwrite.diagnosis.stuck import decision_words, groups_words, holder_words
from dualwrite.observability import Steps
from dualwrite.texts import counted, description_words, now_ms, state_words, time_text

_HERE: Final = Path(__file__).parent
_STATIC: Final = _HERE / "static"
_TYPES: Final = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
_SMALL_SECONDS: Final = 0.001
_MINUTES_FROM_SECONDS: Final = 120.0
_HOURS_FROM_SECONDS: Final = 7200.0


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


def seconds_words(seconds: float) -> str:
    """A duration, as exact as people need it: `340 µs`, `12 ms`, `4.2 s`, `70 s`, `12 min`, `3 h`."""
    if seconds < _SMALL_SECONDS:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < _MINUTES_FROM_SECONDS:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < _HOURS_FROM_SECONDS else f"{seconds / 3600:.0f} h"


def ago(at: float | datetime) -> str:
    """How long ago a time is, in words."""
    seconds = time.time() - (at.timestamp() if isinstance(at, datetime) else at)
    return f"{seconds_words(max(0.0, round(seconds)))} ago" if seconds >= 1 else "just now"


def clock(at: float) -> str:
    """The time of day in UTC."""
    return f"{datetime.fromtimestamp(at, UTC):%H:%M:%S} UTC"


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
        "groups": groups_words,
        "holder": holder_words,
        "path": lambda text: quote(str(text), safe=""),
        "seconds": seconds_words,
        "state": state_words,
        "time": time_text,
        "text": lambda value: "" if value is None else getattr(value, "value", value),
    }
    made.globals |= {"assets": ASSETS, "now_ms": now_ms}
    return made


_TEMPLATES: Final = _environment()


def rendered(template: str, **values: Any) -> str:
    """The HTML of a template; every value is escaped."""
    return _TEMPLATES.get_template(template).render(values)
