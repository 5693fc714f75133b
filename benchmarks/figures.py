"""Percentiles, medians of rounds and of their ratios, and Markdown tables: pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, Self, TypeVar

F = TypeVar("F")

NONE: Final = "–"  # noqa: RUF001  (a dash for "no value")


def percentile(values: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile: the least value that `share` of the values don't exceed; None if there are no values."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None


@dataclass(frozen=True)
class Latency:
    """Percentiles of durations, in seconds."""

    p50: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        return cls(percentile(values, 0.5), percentile(values, 0.99))


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of the rounds."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Self | None:
        """The spread of the values that are known; None if there are none."""
        found = [value for value in values if value is not None]
        return cls(statistics.median(found), min(found), max(found)) if found else None

    @classmethod
    def of_ratios(cls, ours: Iterable[float | None], theirs: Iterable[float | None]) -> Self | None:
        """The spread of the ratios, round by round, which is not the ratio of the medians."""
        return cls.of(our / their for our, their in zip(ours, theirs, strict=True) if our is not None and their)


def median(spread: Spread | None, digits: int, unit: float = 1.0) -> str:
    """The median; `unit` is how many of the table's units a value is."""
    return NONE if spread is None else f"{spread.median * unit:,.{digits}f}"


class FigureColumn(NamedTuple, Generic[F]):
    """What a column of a table of alternatives shows of each round: `value`, with how many of its units that is."""

    heading: str
    value: Callable[[F], float | None]
    unit: float
    digits: int


def compared(
    what: str,
    columns: Sequence[FigureColumn[F]],
    found: Mapping[str, Sequence[F]],
    base: str,
    *,
    base_heading: str,
    digits: int = 2,
) -> str:
    """A table of alternatives: medians of the rounds, each with the ratios to those of the alternative `base`."""
    lines = []
    for name, rounds in found.items():
        cells = [name]
        for column in columns:
            mine, theirs = ([column.value(each) for each in some] for some in (rounds, found[base]))
            cells.append(median(Spread.of(mine), column.digits, column.unit))
            cells.append(with_range(Spread.of_ratios(mine, theirs), digits))
        lines.append(cells)
    return table([what, *(text for column in columns for text in (column.heading, f"÷ {base_heading}"))], lines)


def with_range(spread: Spread | None, digits: int) -> str:
    """The median, with the smallest and the largest value: `0.95 (0.90 … 1.01)`."""
    if spread is None:
        return NONE
    return f"{spread.median:,.{digits}f} ({spread.least:,.{digits}f} … {spread.greatest:,.{digits}f})"


def table(head: Sequence[str], lines: Iterable[Sequence[str]], *, names: int = 1) -> str:
    """A Markdown table whose first `names` columns contain text."""
    lines = [head, *lines]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]

    def row(cells: Sequence[str]) -> str:
        pairs = enumerate(zip(cells, widths, strict=True))
        return f"| {' | '.join(cell.ljust(width) if at < names else cell.rjust(width) for at, (cell, width) in pairs)} |"

    rule = ("-" * width if at < names else "-" * (width - 1) + ":" for at, width in enumerate(widths))
    return "\n".join([row(head), f"| {' | '.join(rule)} |", *map(row, lines[1:])])
