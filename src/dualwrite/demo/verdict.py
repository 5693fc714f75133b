"""The result of the demo: database and topic compared record by record, the figures, and a verdict in one sentence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import quantiles
from typing import Any, Final

from dualwrite.demo.flights import Flight
from dualwrite.demo.supervisor import Tally
from dualwrite.demo.worker import Options

EXAMPLES: Final = 5
"""How many disagreements of a kind, and errors, are shown."""
BAD_OUTCOMES: Final = ("LOST", "UNVERIFIED")  # of recovery, by name

Content = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TopicMessage:
    """One committed message; its content is None if that is not a departure."""

    partition: int
    key: str
    content: Content | None


@dataclass(frozen=True, slots=True)
class Evidence:
    """The state after a run.

    Args:
        flights: The flights that were to be written.
        rows: The departures in the database, in its order.
        messages: The committed messages, ordered by partition and offset.
        aircraft: The rows of the aircraft, by tail number.
    """

    flights: Sequence[Flight]
    rows: Sequence[Content]
    messages: Sequence[TopicMessage]
    aircraft: Mapping[str, Content]


@dataclass
class Findings:
    """The disagreements, as numbers of flights (for `wrong_aircraft`: tail numbers); all empty if everything agrees.

    Attributes:
        lost: In the database, but without a message.
        phantom: A message, but not in the database.
        duplicated: More messages than rows; listed once per extra message.
        unequal: Row and message differ, or the message's key is not the aircraft.
        out_of_order: A message that follows one of the same aircraft that is later in the database, or is in another partition.
        repeated: More than one row in the database; listed once per extra row.
        not_done: A flight that departed, but is not in the database.
        wrong_aircraft: An aircraft whose row is not the sum of its flights.
    """

    lost: list[int] = field(default_factory=list)
    phantom: list[int] = field(default_factory=list)
    duplicated: list[int] = field(default_factory=list)
    unequal: list[int] = field(default_factory=list)
    out_of_order: list[int] = field(default_factory=list)
    repeated: list[int] = field(default_factory=list)
    not_done: list[int] = field(default_factory=list)
    wrong_aircraft: list[str] = field(default_factory=list)

    @property
    def agree(self) -> bool:
        """Whether all are empty."""
        return not any(self.counts().values())

    def counts(self) -> dict[str, int]:
        """The number of disagreements of each kind."""
        return {each.name: len(getattr(self, each.name)) for each in fields(self)}


def compare(evidence: Evidence) -> Findings:
    """Find all disagreements."""
    found = Findings()
    rows: dict[int, list[Content]] = defaultdict(list)
    messages: dict[int, list[TopicMessage]] = defaultdict(list)
    for row in evidence.rows:
        rows[row["number"]].append(row)
    for message in evidence.messages:
        messages[_number(message.content)].append(message)
    for number in sorted(rows.keys() | messages.keys()):
        written, sent = rows.get(number, []), messages.get(number, [])
        surplus = len(sent) - len(written)
        found.repeated += [number] * (len(written) - 1)
        if not written:
            found.phantom += [number] * surplus
            continue
        found.lost += [number] * -surplus
        found.duplicated += [number] * surplus
        if any(message.content not in written or message.key != written[0]["aircraft"] for message in sent):
            found.unequal.append(number)
    found.not_done = [each.number for each in evidence.flights if not each.cancelled and each.number not in rows]
    found.out_of_order = _out_of_order(evidence)
    found.wrong_aircraft = _wrong_aircraft(evidence)
    return found


def _out_of_order(evidence: Evidence) -> list[int]:
    """Per aircraft, comparing the first row and the first message of each flight that has both."""
    first_rows: dict[int, tuple[int, str]] = {}
    for place, row in enumerate(evidence.rows):
        first_rows.setdefault(row["number"], (place, row["aircraft"]))
    last: dict[str, tuple[int, int]] = {}
    found = []
    for message in evidence.messages:
        number = _number(message.content)
        place, aircraft = first_rows.pop(number, (-1, ""))
        if place < 0:
            continue
        partition, latest = last.get(aircraft, (message.partition, -1))
        if place < latest or message.partition != partition:
            found.append(number)
        last[aircraft] = partition, max(latest, place)
    return found


def _wrong_aircraft(evidence: Evidence) -> list[str]:
    nothing = {"departures": 0, "cancelled": 0, "delay": 0, "last_flight": None}
    expected: dict[str, dict[str, Any]] = defaultdict(nothing.copy)
    for row in evidence.rows:
        expected[row["aircraft"]]["departures"] += 1
        expected[row["aircraft"]]["delay"] += row["delay"]
    for flight in evidence.flights:
        if flight.cancelled:
            expected[flight.aircraft]["cancelled"] += 1
        if flight.aircraft in expected:
            expected[flight.aircraft]["last_flight"] = flight.number
    names = expected.keys() | evidence.aircraft.keys()
    return sorted(name for name in names if expected.get(name) != evidence.aircraft.get(name))


def _number(content: Content | None) -> int:
    """The flight number of a message; 0, which no flight has, if the message has none."""
    number = None if content is None else content.get("number")
    return number if isinstance(number, int) else 0


@dataclass(frozen=True)
class DemoVerdict:
    """The result of one run: what was asked for, the figures, the disagreements, and what is left to recover.

    `unresolved` are transactional ids; `places` says where database, topic and logs are, by name.
    """

    options: Options
    rows: int
    messages: int
    tally: Tally
    findings: Findings
    unresolved: tuple[str, ...]
    places: Mapping[str, str]

    @property
    def resolved(self) -> bool:
        """Whether recovery left nothing open, lost or unverified."""
        outcomes = self.tally.outcomes
        return not (self.unresolved or self.tally.unacknowledged or any(outcomes[name] for name in BAD_OUTCOMES))

    @property
    def all_agree(self) -> bool:
        """Whether all was done as planned, nothing is left to recover, and database and topic agree record by record."""
        as_planned = self.tally.kills == self.options.kills and not self.tally.errors and self.rows > 0
        return as_planned and self.resolved and self.findings.agree

    @property
    def milliseconds(self) -> tuple[float, float]:
        """p50 and p99 of a flight's time: of its transaction, or from its `submit` to a pool until its result."""
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
        disagreements = ", ".join(
            f"{number:,} {name.replace('_', ' ')}" for name, number in self.findings.counts().items() if number
        )
        kills = f"{self.tally.kills:,} kill{'' if self.tally.kills == 1 else 's'}"
        if self.options.naive:
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
        counts = self.findings.counts()
        p50, p99 = self.milliseconds
        return {
            "verdict": self.summary(),
            "all_agree": self.all_agree,
            "naive": self.options.naive,
            "pool": self.options.pool,
            "departures": self.options.departures,
            "rows": self.rows,
            "messages": self.messages,
            "transactions": tally.transactions,
            "kills": tally.kills,
            "kills_while_opening": tally.kills_while_opening,
            "openings": len(tally.openings),
            "slowest_opening_seconds": round(max(tally.openings, default=0.0), 3),
            "recoveries": dict(tally.outcomes),
            "unresolved": list(self.unresolved),
            "findings": counts,
            "examples": {name: getattr(self.findings, name)[:EXAMPLES] for name, number in counts.items() if number},
            "worker_errors": tally.errors,
            "seconds": round(tally.seconds, 2),
            "transactions_per_second": round(self.per_second, 1),
            "flights_per_commit": round(self.flights_per_commit, 1),
            "p50_ms": round(p50, 2),
            "p99_ms": round(p99, 2),
            "places": dict(self.places),
        }
