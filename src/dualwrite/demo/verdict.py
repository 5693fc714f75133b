"""The result of the demo: the figures, and a verdict in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import quantiles
from typing import Any, Final

from dualwrite.demo.comparison import Findings
from dualwrite.demo.supervisor import Tally

EXAMPLES: Final = 5
_BAD_OUTCOMES: Final = ("LOST", "UNVERIFIED")


@dataclass(frozen=True)
class Verdict:
    """The result of one run.

    Args:
        naive: Whether it ran without dualwrite.
        departures: How many departures were requested.
        kills_wanted: How many kills were requested.
        rows: Departures in the database.
        messages: Committed messages in the topic.
        tally: The workers' reports, summed up.
        findings: The disagreements.
        unresolved: Transactional ids on which something is left to recover.
        places: Where database, topic and logs are, by name.
        pool: Whether the workers wrote through pools.
    """

    naive: bool
    departures: int
    kills_wanted: int
    rows: int
    messages: int
    tally: Tally
    findings: Findings
    unresolved: tuple[str, ...]
    places: Mapping[str, str]
    pool: bool = False

    @property
    def complete(self) -> bool:
        """Whether all requested departures and kills were done, and no worker failed."""
        tally = self.tally
        return not self.findings.not_done and tally.kills == self.kills_wanted and not tally.errors and self.rows > 0

    @property
    def resolved(self) -> bool:
        """Whether recovery left nothing open, lost or unverified."""
        outcomes = self.tally.outcomes
        return not (self.unresolved or self.tally.unacknowledged or any(outcomes[name] for name in _BAD_OUTCOMES))

    @property
    def all_agree(self) -> bool:
        """Whether the run is complete, nothing is left to recover, and database and topic agree record by record."""
        return self.complete and self.resolved and self.findings.agree

    @property
    def milliseconds(self) -> tuple[float, float]:
        """p50 and p99 of a flight: of its transaction, or from its `submit` to a pool until its result."""
        if len(self.tally.took) < 2:  # noqa: PLR2004  (quantiles need two values)
            return 0.0, 0.0
        cuts = quantiles(self.tally.took, n=100)
        return cuts[49] / 1000, cuts[98] / 1000

    @property
    def flights_per_commit(self) -> float:
        """How many flights were committed together, on average; 1 without a pool."""
        return len(self.tally.took) / self.tally.commits if self.tally.commits else 0.0

    @property
    def per_second(self) -> float:
        """Flights per second over the whole run, kills and recoveries included."""
        return self.tally.transactions / self.tally.seconds if self.tally.seconds else 0.0

    def summary(self) -> str:
        """The verdict in one sentence."""
        counts = {name: number for name, number in self.findings.counts().items() if number}
        disagreements = ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in counts.items())
        kills = _many(self.tally.kills, "kill")
        if self.naive:
            if disagreements:
                return f"Without dualwrite, database and topic permanently disagree after {kills}: {disagreements}."
            return f"Nothing went wrong after {kills}, but only by luck. Try more kills, or another --seed."
        if self.all_agree:
            return (
                f"All agree: each of {self.rows:,} departures is exactly once in the database and in the topic, "
                f"after {kills} of workers."
            )
        if disagreements:
            return f"DISAGREEMENT: {disagreements}."
        if not self.resolved:
            return "NOT RESOLVED: recovery left a transaction open, lost or unverified."
        return "INCOMPLETE: database and topic agree, but not everything was done as planned."

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        tally = self.tally
        p50, p99 = self.milliseconds
        return {
            "verdict": self.summary(),
            "all_agree": self.all_agree,
            "naive": self.naive,
            "pool": self.pool,
            "departures": self.departures,
            "rows": self.rows,
            "messages": self.messages,
            "transactions": tally.transactions,
            "kills": tally.kills,
            "kills_while_opening": tally.kills_while_opening,
            "openings": len(tally.openings),
            "slowest_opening_seconds": round(max(tally.openings, default=0.0), 3),
            "recoveries": dict(tally.outcomes),
            "unresolved": list(self.unresolved),
            "findings": self.findings.counts(),
            "examples": {
                name: getattr(self.findings, name)[:EXAMPLES] for name, number in self.findings.counts().items() if number
            },
            "worker_errors": tally.errors,
            "seconds": round(tally.seconds, 2),
            "transactions_per_second": round(self.per_second, 1),
            "flights_per_commit": round(self.flights_per_commit, 1),
            "p50_ms": round(p50, 2),
            "p99_ms": round(p99, 2),
            "places": dict(self.places),
        }


def _many(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"
