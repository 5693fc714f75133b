"""What the figures depend on: date, commit, versions, machine, servers, how busy the machine was; and progress."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import confluent_kafka
import psutil
from sqlalchemy import create_engine, text

import dualwrite
from dualwrite.kafka.native import is_compiled

T = TypeVar("T")
M = TypeVar("M")

ROOT: Final = Path(__file__).resolve().parents[1]
_SETTINGS: Final = ("server_version", "fsync", "synchronous_commit", "full_page_writes")
_PACKAGES: Final = ("psycopg", "SQLAlchemy", "confluent-kafka")
_COUNTED_TWICE: Final = ("guest", "guest_nice")  # Linux includes them in user and nice


def show_progress(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def surroundings(cluster: str, url: str | None = None, **more: object) -> dict[str, Any]:
    """Date, versions, machine, and the servers; without a database for a benchmark that uses none."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "dualwrite": f"{dualwrite.__version__}, commit {_commit()}{', compiled' if is_compiled() else ''}",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
        "librdkafka": confluent_kafka.libversion()[0],
        "machine": f"{os.cpu_count()} processors, {_processor_model()}, {platform.machine()}, {platform.system()}",
        "load average before": os.getloadavg()[0],
        "kafka": cluster,
        **({} if url is None else {"postgresql": _postgres(url)}),
        **more,
    }


def heading(around: dict[str, Any]) -> str:
    """The surroundings in one line, with warnings if the figures mean less than they seem to."""
    postgres = around.get("postgresql", {})
    lines = ["; ".join(f"{name}: {value}" for name, value in around.items())]
    if "off" in (postgres.get("fsync"), postgres.get("synchronous_commit")):
        lines.append("WARNING: this PostgreSQL does not wait for its disk, so its commits are not durable.")
    return "\n\n".join(lines)


def _commit() -> str:
    """The commit of this checkout, with `-dirty` if files are changed."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603  (see above)
    except (OSError, subprocess.CalledProcessError):  # no git, or not a checkout
        return "unknown"


def _processor_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # not on Linux
        found = None
    return found[1].strip() if found else platform.processor() or "unknown model"


def _postgres(url: str) -> dict[str, str]:
    database = create_engine(url)
    with database.connect() as connection:
        found = {name: str(connection.scalar(text(f"SHOW {name}"))) for name in _SETTINGS}
    database.dispose()
    return found


@dataclass(frozen=True)
class Load:
    """The state of the machine during a measurement, as shares of all processors' time.

    Args:
        busy: What any process used; stolen time counts as used.
        stolen: What a hypervisor gave to other guests.
    """

    busy: float
    stolen: float

    def __str__(self) -> str:
        return f"Busy {self.busy:.0%}, stolen {self.stolen:.1%}."

    @classmethod
    def since(cls, first: tuple[float, float, float]) -> Self:
        """From `first`, which was `processor_times()`, until now."""
        total, idle, stolen = (now - then for now, then in zip(processor_times(), first, strict=True))
        return cls(1 - idle / (total or 1.0), stolen / (total or 1.0))


def processor_times() -> tuple[float, float, float]:
    """Seconds of all processors since the machine started: all, without work, given to other guests."""
    times = psutil.cpu_times()._asdict()
    total = sum(seconds for name, seconds in times.items() if name not in _COUNTED_TWICE)
    return total, times["idle"] + times.get("iowait", 0.0), times.get("steal", 0.0)


def in_turns(names: Sequence[T], by: int) -> Iterator[T]:
    """All of them, starting with a different one each time, so that a slowdown of the machine affects all alike."""
    for place in range(len(names)):
        yield names[(place + by) % len(names)]


def in_rounds(
    what: str, names: Sequence[str], rounds: int, measure: Callable[[str, bool], M], *, has_warm_up: bool = True
) -> tuple[dict[str, list[M]], Load]:
    """Measure every alternative in each round; what each has measured, round by round, and how busy the machine was.

    A first round, for which `measure` gets False, is a warm-up and discarded.
    """
    found: dict[str, list[M]] = {name: [] for name in names}
    first = processor_times()
    for number in range(0 if has_warm_up else 1, rounds + 1):
        for name in in_turns(names, number):
            show_progress(f"{what}, {f'round {number}/{rounds}' if number else 'warm-up'}: {name}")
            measured = measure(name, number > 0)
            if number:
                found[name].append(measured)
        if not number:
            first = processor_times()
    return found, Load.since(first)
