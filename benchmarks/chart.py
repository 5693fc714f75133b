"""Grouped bars as SVG text, readable on light and dark backgrounds; no library is needed to draw or to show it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

from figures import Spread

_WIDTH: Final = 920.0
_COLUMNS: Final = 2
_MARGIN: Final = 16.0
_AXIS: Final = 34.0
_HEAD: Final = 84.0
_PLOT: Final = 170.0
_PANEL: Final = _PLOT + 64.0
_FOOT: Final = 34.0
_SPACE: Final = 0.16
_GAP: Final = 1.0
_LEGEND: Final = 176.0
"""The width of a series' label, if there is room for all."""
_MAX_LINES: Final = 6
_STEPS: Final = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
_ROOM: Final = 1.08
_TINY: Final = 1e-9
_SMALL: Final = 0.95

# Okabe and Ito's colours, which colour-blind readers can distinguish: for a light and for a dark background.
_COLOURS: Final = (
    ("#8c8c8c", "#a6a6a6"),
    ("#e69f00", "#e69f00"),
    ("#cc79a7", "#d897bc"),
    ("#0072b2", "#56b4e9"),
    ("#009e73", "#2cc79b"),
    ("#d55e00", "#f0803c"),
)


@dataclass(frozen=True)
class Panel:
    """One diagram.

    Args:
        title: The text above it.
        groups: For each place on the axis, the bars by the key of their series; a series without a value has no bar there.
    """

    title: str
    groups: Mapping[str, Mapping[str, Spread]]


@dataclass(frozen=True)
class Chart:
    """Panels with a common legend.

    Args:
        title: The text above everything.
        subtitle: The text below the title: what was measured, and where.
        axis: What the places on the axis are.
        series: The label of each series by its key, in the order of the bars.
        baseline: What the value 1 stands for.
        panels: The panels; all have the same scale.
    """

    title: str
    subtitle: str
    axis: str
    series: Mapping[str, str]
    baseline: str
    panels: Sequence[Panel]

    def svg(self) -> str:
        """The chart; bars are medians, the thin lines on them go from the least to the greatest round."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        rows = math.ceil(len(self.panels) / _COLUMNS)
        height = _HEAD + rows * _PANEL + _FOOT
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}" width="{_WIDTH:g}" '
            f'height="{height:g}" role="img" aria-labelledby="title subtitle">'
        )
        yield _style(len(self.series))
        yield f'<rect class="ground" width="{_WIDTH:g}" height="{height:g}" rx="6"/>'
        yield f'<text id="title" class="title" x="{_MARGIN:g}" y="28">{escape(self.title)}</text>'
        yield f'<text id="subtitle" class="quiet" x="{_MARGIN:g}" y="46">{escape(self.subtitle)}</text>'
        yield from self._legend()
        top = scale_top(bar.greatest for panel in self.panels for group in panel.groups.values() for bar in group.values())
        width = (_WIDTH - _MARGIN * (_COLUMNS + 1)) / _COLUMNS
        for place, panel in enumerate(self.panels):
            row, column = divmod(place, _COLUMNS)
            left, upper = _MARGIN + column * (width + _MARGIN), _HEAD + row * _PANEL
            yield f'<g transform="translate({left:g} {upper:g})">'
            yield from self._panel(panel, width, top)
            yield "</g>"
        yield (
            f'<text class="quiet" x="{_MARGIN:g}" y="{height - 12:g}">{escape(self.axis)}. Dashed line: '
            f"{escape(self.baseline)} = 1. Thin lines: from the least to the greatest round.</text>"
        )
        yield "</svg>"

    def _legend(self) -> Iterator[str]:
        width = min(_LEGEND, (_WIDTH - _MARGIN) / max(1, len(self.series)))
        for place, label in enumerate(self.series.values()):
            x = _MARGIN + place * width
            yield f'<rect class="s{place}" x="{x:g}" y="58" width="12" height="12" rx="2"/>'
            yield f'<text x="{x + 17:g}" y="68">{escape(label)}</text>'

    def _panel(self, panel: Panel, width: float, top: float) -> Iterator[str]:
        def y(value: float) -> float:
            return round(24 + _PLOT * (1 - value / top), 1)

        yield f'<text class="panel" x="{_AXIS:g}" y="12">{escape(panel.title)}</text>'
        for tick in ticks(top):
            yield f'<line class="grid" x1="{_AXIS:g}" x2="{width:g}" y1="{y(tick):g}" y2="{y(tick):g}"/>'
            yield f'<text class="quiet end" x="{_AXIS - 5:g}" y="{y(tick) + 4:g}">{tick:g}</text>'
        yield f'<line class="base" x1="{_AXIS:g}" x2="{width:g}" y1="{y(1):g}" y2="{y(1):g}"/>'
        shown = [each for each in enumerate(self.series) if any(each[1] in bars for bars in panel.groups.values())]
        slot = (width - _AXIS) / max(1, len(panel.groups))
        bar_width = slot * (1 - _SPACE) / max(1, len(shown))
        for number, (name, bars) in enumerate(panel.groups.items()):
            start = _AXIS + slot * number + slot * _SPACE / 2
            for position, (place, key) in enumerate(shown):
                if key in bars:
                    yield from _bar(bars[key], place, start + bar_width * position, bar_width - _GAP, y)
            yield f'<text class="middle" x="{_AXIS + slot * (number + 0.5):.1f}" y="{y(0) + 16:g}">{escape(name)}</text>'


def scale_top(values: Iterable[float]) -> float:
    """The end of an axis from 0 that shows all values, and 1: a tick with room above for a number."""
    most = max([1.0, *values]) * _ROOM
    return math.ceil(most / _step(most)) * _step(most)


def ticks(top: float) -> list[float]:
    """Round numbers from 0 to the end of the axis."""
    step = _step(top)
    return [number * step for number in range(int(top / step + _TINY) + 1)]


def label(value: float) -> str:
    """A number with two digits, short enough to fit on a bar."""
    return f"{value:.2f}".removeprefix("0") if value < _SMALL else f"{value:.1f}"


def _step(top: float) -> float:
    return next((step for step in _STEPS if top / step <= _MAX_LINES), top / _MAX_LINES)


def _bar(bar: Spread, place: int, x: float, width: float, y: Callable[[float], float]) -> Iterator[str]:
    upper, lower, middle = y(bar.median), y(0), x + width / 2
    yield f'<rect class="s{place}" x="{x:.1f}" y="{upper:g}" width="{width:.1f}" height="{lower - upper:.1f}"/>'
    yield f'<line class="range" x1="{middle:.1f}" x2="{middle:.1f}" y1="{y(bar.least):g}" y2="{y(bar.greatest):g}"/>'
    yield f'<text class="value" x="{middle:.1f}" y="{y(max(bar.median, bar.greatest)) - 3:.1f}">{label(bar.median)}</text>'


def _style(series: int) -> str:
    light = "".join(f".s{place}{{fill:{colours[0]}}}" for place, colours in enumerate(_COLOURS[:series]))
    dark = "".join(f".s{place}{{fill:{colours[1]}}}" for place, colours in enumerate(_COLOURS[:series]))
    return (
        "<style>"
        "text{font:12px system-ui,sans-serif;fill:#1f2328}"
        ".title{font-size:16px;font-weight:600}.panel{font-weight:600}.quiet{fill:#59636e;font-size:11px}"
        ".value{font-size:9px;text-anchor:middle}.middle{text-anchor:middle}.end{text-anchor:end}"
        ".ground{fill:#ffffff}.grid{stroke:#d1d9e0;stroke-width:0.5}"
        ".base{stroke:#1f2328;stroke-dasharray:5 3}.range{stroke:#1f2328;stroke-width:0.8}"
        f"{light}"
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.quiet{fill:#9198a1}.ground{fill:#0d1117}"
        f".grid{{stroke:#3d444d}}.base,.range{{stroke:#e6edf3}}{dark}}}"
        "</style>"
    )
