"""Small line charts as SVG paths: numbers over time, scaled to a box, with a break where nothing is known. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

WIDTH: Final = 300
HEIGHT: Final = 40
"""The size of a chart's box, in its own units: the page stretches it."""

_EDGE: Final = 2  # so that a line at 0 or at the top is not cut in half

Point = tuple[float, float | None]
"""Seconds since 1970, and the number; None if it is not known."""


@dataclass(frozen=True)
class Line:
    """One line of a chart: its name, its path, the path of the area below it, and its last number in words."""

    name: str
    path: str
    area: str
    last: str


@dataclass(frozen=True)
class Chart:
    """A chart.

    Args:
        title: What it shows.
        begins: The time at its left edge, in seconds since 1970.
        ends: The time at its right edge.
        peak: Its largest number, in words; None if nothing is known yet. The lower edge is 0.
        is_flat: Whether all its numbers are 0.
        lines: Its lines.
    """

    title: str
    begins: float
    ends: float
    peak: str | None
    is_flat: bool
    lines: tuple[Line, ...]

    @property
    def in_words(self) -> str:
        """What it shows, for those who don't see it."""
        if self.peak is None:
            return f"{self.title}: nothing is known yet"
        last = ", ".join(f"{each.name} {each.last}" for each in self.lines) if len(self.lines) > 1 else self.lines[0].last
        return f"{self.title}: at most {self.peak}, now {last}"


def chart(
    title: str,
    lines: Iterable[tuple[str, Sequence[Point]]],
    *,
    begins: float,
    ends: float,
    gap: float,
    words: Callable[[float], str],
    least: float = 1.0,
) -> Chart:
    """Draw a chart.

    Args:
        title: What it shows.
        lines: The name and the points of each line, the oldest first.
        begins: The time at its left edge, in seconds since 1970.
        ends: The time at its right edge.
        gap: Seconds between two points from which on the line has a break.
        words: A number in words.
        least: The number at the upper edge if all numbers are smaller.
    """
    inside = [(name, [one for one in points if begins <= one[0] <= ends]) for name, points in lines]
    known = [number for _, points in inside for _, number in points if number is not None]
    top = max([least, *known])

    def place(at: float, number: float) -> str:
        x = WIDTH * (at - begins) / (ends - begins)
        return f"{x:.1f} {HEIGHT - _EDGE - (HEIGHT - 2 * _EDGE) * number / top:.1f}"

    drawn = []
    for name, points in inside:
        runs = _runs(points, gap)
        path = "".join(f"M{' L'.join(place(*one) for one in (*run, run[-1]))}" for run in runs)  # one point alone: a dot
        area = "".join(
            f"M{' L'.join((place(run[0][0], 0), *(place(*one) for one in run), place(run[-1][0], 0)))}Z" for run in runs
        )
        last = points[-1][1] if points else None
        drawn.append(Line(name, path, area, "not known" if last is None else words(last)))
    return Chart(title, begins, ends, words(max(known)) if known else None, not any(known), tuple(drawn))


def _runs(points: Sequence[Point], gap: float) -> list[list[tuple[float, float]]]:
    """The points without a break between them."""
    runs: list[list[tuple[float, float]]] = []
    before: float | None = None
    for at, number in points:
        if number is None:
            before = None
            continue
        if before is None or at - before > gap:
            runs.append([])
        runs[-1].append((at, number))
        before = at
    return runs
