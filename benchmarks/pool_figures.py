"""The figures of the pool's benchmark, by point and alternative, over all rounds: pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from figures import Figures, Rounds, Spread, processor_seconds
from phases import PHASES, Phases
from pool_cases import ALTERNATIVES, OUTBOX, PLAIN, THREADS, Point

FIGURES: Final[Mapping[str, Callable[[Figures], float | None]]] = {
    "rate": lambda figures: figures.rate,
    "call p50": lambda figures: figures.call.p50,
    "call p99": lambda figures: figures.call.p99,
    "visible p50": lambda figures: figures.visible.p50,
    "visible p99": lambda figures: figures.visible.p99,
    "log": lambda figures: figures.log,
    "database transactions": lambda figures: figures.transactions,
    "units a group": lambda figures: 1 / figures.transactions if figures.transactions else None,
    "client": lambda figures: figures.cpu_writers,
    "relay": lambda figures: figures.cpu_relay,
    "PostgreSQL": lambda figures: figures.cpu_database,
    "broker": lambda figures: figures.cpu_kafka,
    "together": processor_seconds,
    "busy": lambda figures: figures.conditions.busy,
    "stolen": lambda figures: figures.conditions.stolen,
}
"""What the tables and the JSON show: times in seconds, shares of 1, everything else per unit."""

_ONE_AFTER_ANOTHER: Final = 2
_NEARLY_ALL: Final = 0.85
_ENOUGH_ROUNDS: Final = 3


@dataclass(frozen=True)
class Measured:
    """One measurement.

    Args:
        number: The round.
        point: The point.
        figures: The figures.
        connections: How many connections to the database plain commits shared.
        writers: How many writers the pool had at the end.
        late: By how many seconds the delay proxy forwarded later than asked, in the mean; None without it.
    """

    number: int
    point: Point
    figures: Figures
    connections: int | None = None
    writers: int | None = None
    late: float | None = None


@dataclass(frozen=True)
class Clocked:
    """A measurement of the pool with clocks.

    Args:
        point: The point.
        phases: Where its groups' time went.
        figures: The figures of the same measurement.
        processors: The number of the machine's processors.
    """

    point: Point
    phases: Phases
    figures: Figures
    processors: int

    @property
    def client_processors(self) -> float:
        """How many processors the callers' process used; 1 is what Python code can use at most."""
        return (self.figures.cpu_writers or 0.0) * self.figures.rate

    @property
    def binds(self) -> str:
        """What limits the rate: the first of the possible limits that is nearly exhausted."""
        if self.client_processors > _NEARLY_ALL:
            return "the client's Python: one processor"
        if self.figures.conditions.busy > _NEARLY_ALL:
            return f"the machine's {self.processors} processors"
        if self.phases.writers <= _ONE_AFTER_ANOTHER and self.phases.in_turn > _NEARLY_ALL:
            return "the groups' SQL: one group at a time"
        if self.phases.occupied > _NEARLY_ALL:
            return f"the {self.phases.writers} writers: the steps of their groups"
        if self.phases.share(PHASES) > _NEARLY_ALL:
            return "the steps of a group: all callers wait for it"
        return "the callers: too few"


class Results:
    """All measurements, without those of the warm-up.

    Attributes:
        measured: The measurements, in their order.
    """

    def __init__(self, measured: Iterable[Measured]) -> None:
        self.measured = list(measured)

    @property
    def verified(self) -> int:
        """How many messages were compared with their rows."""
        return sum(each.figures.verified for each in self.measured)

    @property
    def points(self) -> list[Point]:
        """Every point, in the order of the measurements."""
        return list(dict.fromkeys(each.point for each in self.measured))

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return len({each.number for each in self.measured})

    @property
    def origin(self) -> str:
        """How many rounds the figures are from, as text."""
        return "One round" if self.rounds == 1 else f"Medians of {self.rounds} rounds"

    @property
    def are_few(self) -> bool:
        """Whether there were too few rounds for the figures to be quoted."""
        return self.rounds < _ENOUGH_ROUNDS

    def alternatives(self, point: Point) -> list[str]:
        """What was measured at a point."""
        found = {each.figures.alternative for each in self.measured if each.point == point}
        return [name for name in ALTERNATIVES if name in found]

    def at(self, point: Point, alternative: str) -> Rounds | None:
        """All rounds of an alternative at a point; None if it was not measured there."""
        found = [each.figures for each in self.measured if (each.point, each.figures.alternative) == (point, alternative)]
        return Rounds(found) if found else None

    def of_plain(self, point: Point, alternative: str) -> Spread | None:
        """The rate relative to one plain commit per request through the same handle, round by round."""
        return self._ratio(point, alternative, point)

    def _ratio(self, point: Point, alternative: str, of: Point) -> Spread | None:
        ours, plain = self.at(point, alternative), self.at(of, PLAIN)
        return None if ours is None or plain is None else ours.ratio(plain)

    def of_threads_plain(self, point: Point, alternative: str) -> Spread | None:
        """For callers that are tasks: the rate relative to the plain commits of as many threads, round by round."""
        return None if point.kind == THREADS else self._ratio(point, alternative, replace(point, kind=THREADS))

    def call_of_plain(self, point: Point, alternative: str, percentile: str) -> Spread | None:
        """The duration of a call (`p50` or `p99`) relative to that of a plain commit, round by round."""
        ours, plain = self.at(point, alternative), self.at(point, PLAIN)
        if ours is None or plain is None:
            return None
        return ours.ratio(plain, lambda figures: getattr(figures.call, percentile) or 0.0)

    def writers(self, point: Point, alternative: str) -> Spread | None:
        """How many writers the pool had at the end of each round."""
        return self._spread(point, alternative, lambda each: each.writers)

    def late(self, point: Point, alternative: str) -> Spread | None:
        """By how many seconds the delay proxy was late, in the mean of each round."""
        return self._spread(point, alternative, lambda each: each.late)

    def _spread(self, point: Point, alternative: str, what: Callable[[Measured], float | None]) -> Spread | None:
        found = (what(each) for each in self.measured if (each.point, each.figures.alternative) == (point, alternative))
        return Spread.of(value for value in found if value is not None)

    def log_of_outbox(self, point: Point, alternative: str) -> Spread | None:
        """The write-ahead log of a unit relative to the outbox's, round by round."""
        ours, outbox = self.at(point, alternative), self.at(point, OUTBOX)
        return None if ours is None or outbox is None else ours.ratio(outbox, lambda figures: figures.log)

    def connections(self, point: Point) -> list[int]:
        """How many connections the best plain commits of each round had."""
        found = [each for each in self.measured if (each.point, each.figures.alternative) == (point, PLAIN)]
        return [each.connections for each in found if each.connections is not None]

    def conditions(self) -> tuple[float, float, float]:
        """Of all measurements: the median and the largest share of processor time stolen, and the largest load average."""
        found = [each.figures.conditions for each in self.measured]
        stolen = sorted(each.stolen for each in found)
        return stolen[len(stolen) // 2], stolen[-1], max(each.load for each in found)


def summary(results: Results) -> list[dict[str, Any]]:
    """The medians of every alternative at every point, and the ratios with their ranges."""
    return [_summary_of(results, point, name) for point in results.points for name in results.alternatives(point)]


def _summary_of(results: Results, point: Point, name: str) -> dict[str, Any]:
    rounds = results.at(point, name)
    assert rounds is not None
    spreads = {title: rounds.spread(what) for title, what in FIGURES.items()}
    ratios = {
        "of plain": results.of_plain(point, name),
        "of threads' plain": results.of_threads_plain(point, name),
        "call p50 of plain": results.call_of_plain(point, name, "p50"),
        "call p99 of plain": results.call_of_plain(point, name, "p99"),
        "log of outbox": results.log_of_outbox(point, name),
        "pool's writers": results.writers(point, name),
        "proxy late": results.late(point, name),
    }
    return {
        **asdict(point),
        "alternative": name,
        **{title: None if spread is None else spread.median for title, spread in spreads.items()},
        **{title: None if spread is None else asdict(spread) for title, spread in ratios.items()},
    }
