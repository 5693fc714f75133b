"""The figures as Markdown tables, so that they can be pasted into documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from alternatives import GUARANTEES
from figures import Figures, Rounds, Spread, processor_seconds
from steps import Step

TITLES: Final = {
    "database": "database commit only",
    "naive": "naive",
    "outbox": "outbox + relay",
    "recipe": "recipe (dualwrite)",
    "pool": "pool (dualwrite)",
}
_MILLI: Final = 1000.0
NONE: Final = "–"  # noqa: RUF001  (a dash for "no value")
_NAMES: Final = 2


def throughput(all_rounds: Sequence[Rounds]) -> str:
    """Rates, ratios, and the duration of one call in the writer."""
    head = ["writers", "alternative", "tx/s", "min … max", "÷ database", "÷ outbox", "p50 ms", "p99 ms", "effect of a crash"]
    lines = []
    for rounds in all_rounds:
        rate = rounds.spread(lambda figures: figures.rate)
        lines.append(
            [
                str(rounds.writers),
                TITLES[rounds.alternative],
                median(rate, 0),
                range_of(rate, 0),
                _ratio(rounds, "database", all_rounds),
                _ratio(rounds, "outbox", all_rounds),
                _milliseconds(rounds, lambda figures: figures.call.p50),
                _milliseconds(rounds, lambda figures: figures.call.p99),
                GUARANTEES[rounds.alternative],
            ]
        )
    return table(head, lines)


def visibility(all_rounds: Sequence[Rounds]) -> str:
    """How soon consumers see the message."""
    head = [
        "writers",
        "alternative",
        "begin → visible p50 ms",
        "p99 ms",
        "call's return → visible p50 ms",
        "p99 ms",
        "visible/s",
        "backlog at the end",
        "drained in s",
    ]
    lines = [
        [
            str(rounds.writers),
            TITLES[rounds.alternative],
            _milliseconds(rounds, lambda figures: figures.visible.p50),
            _milliseconds(rounds, lambda figures: figures.visible.p99),
            _milliseconds(rounds, lambda figures: figures.after_call.p50),
            _milliseconds(rounds, lambda figures: figures.after_call.p99),
            median(rounds.spread(lambda figures: figures.delivered), 0),
            median(rounds.spread(lambda figures: figures.backlog), 0),
            median(rounds.spread(lambda figures: figures.drained), 1),
        ]
        for rounds in all_rounds
        if rounds.alternative != "database"
    ]
    return table(head, lines)


def load(all_rounds: Sequence[Rounds]) -> str:
    """The cost of a unit of work, in the database and in processor time."""
    head = [
        "writers",
        "alternative",
        "database transactions",
        "rows changed",
        "WAL bytes",
        "CPU ms: writers",
        "relay",
        "PostgreSQL",
        "Kafka",
        "together",
    ]
    cpu: list[Callable[[Figures], float | None]] = [
        lambda figures: figures.cpu_writers,
        lambda figures: figures.cpu_relay,
        lambda figures: figures.cpu_database,
        lambda figures: figures.cpu_kafka,
    ]

    lines = [
        [
            str(rounds.writers),
            TITLES[rounds.alternative],
            median(rounds.spread(lambda figures: figures.transactions), 2),
            median(rounds.spread(lambda figures: figures.rows), 2),
            median(rounds.spread(lambda figures: figures.log), 0),
            *(_milliseconds(rounds, each) for each in [*cpu, processor_seconds]),
        ]
        for rounds in all_rounds
    ]
    return table(head, lines)


def steps(found: Sequence[Step]) -> str:
    """The time spent in each step of a dual write."""
    lines = [
        [step.name, *(f"{seconds * _MILLI:.3f}" for seconds in (step.mean, step.p50, step.p99)), f"{step.share:.0%}"]
        for step in found
    ]
    return table(["step", "mean ms", "p50 ms", "p99 ms", "share"], lines, names=1)


def _ratio(rounds: Rounds, base: str, all_rounds: Iterable[Rounds]) -> str:
    for other in all_rounds:
        if other.alternative == base and other.writers == rounds.writers:
            return with_range(rounds.ratio(other), 2)
    return NONE


def _milliseconds(rounds: Rounds, what: Callable[[Figures], float | None]) -> str:
    spread = rounds.spread(what)
    return NONE if spread is None else f"{spread.median * _MILLI:.2f}"


def median(spread: Spread | None, digits: int) -> str:
    """The median."""
    return NONE if spread is None else f"{spread.median:,.{digits}f}"


def range_of(spread: Spread | None, digits: int) -> str:
    """The smallest and the largest value."""
    return NONE if spread is None else f"{spread.least:,.{digits}f} … {spread.greatest:,.{digits}f}"


def with_range(spread: Spread | None, digits: int) -> str:
    """The median, with the smallest and the largest value: `0.95 (0.90 … 1.01)`."""
    return NONE if spread is None else f"{median(spread, digits)} ({range_of(spread, digits)})"


def table(head: Sequence[str], lines: Iterable[Sequence[str]], *, names: int = _NAMES) -> str:
    """A table whose first `names` columns contain text."""
    lines = [head, *lines]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]

    def left(column: int) -> bool:
        return column < names or not any(line[column][:1].isdigit() for line in lines[1:])

    def row(cells: Sequence[str]) -> str:
        aligned = (
            cell.ljust(width) if left(column) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join(aligned)} |"

    rule = ("-" * width if left(column) else "-" * (width - 1) + ":" for column, width in enumerate(widths))
    return "\n".join([row(head), f"| {' | '.join(rule)} |", *(row(line) for line in lines[1:])])
