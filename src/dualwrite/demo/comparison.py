"""Compares flights, database and topic record by record. Pure: it uses no client of either."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from dualwrite.demo.flights import Flight

Content = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """One committed message.

    Args:
        partition: Its partition.
        key: Its key.
        content: Its value; None if that is not a departure.
    """

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
    messages: Sequence[Message]
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
        """Whether there is no disagreement."""
        return not any(self.counts().values())

    def counts(self) -> dict[str, int]:
        """The number of disagreements of each kind."""
        return {each.name: len(getattr(self, each.name)) for each in fields(self)}


def compare(evidence: Evidence) -> Findings:
    """Find all disagreements."""
    findings = Findings()
    rows = _by_number(evidence.rows)
    messages: dict[int, list[Message]] = defaultdict(list)
    for message in evidence.messages:
        messages[_number(message.content)].append(message)
    for number in sorted(rows.keys() | messages.keys()):
        _compare_one(number, rows.get(number, []), messages.get(number, []), findings)
    findings.not_done = [each.number for each in evidence.flights if not each.cancelled and each.number not in rows]
    findings.out_of_order = _out_of_order(evidence.rows, evidence.messages)
    findings.wrong_aircraft = _wrong_aircraft(evidence)
    return findings


def _compare_one(number: int, rows: list[Content], messages: list[Message], findings: Findings) -> None:
    findings.repeated += [number] * (len(rows) - 1)
    surplus = len(messages) - len(rows)
    if not rows:
        findings.phantom += [number] * surplus
        return
    findings.lost += [number] * -surplus
    findings.duplicated += [number] * surplus
    if any(message.content not in rows or message.key != rows[0]["aircraft"] for message in messages):
        findings.unequal.append(number)


def _out_of_order(rows: Iterable[Content], messages: Iterable[Message]) -> list[int]:
    """Per aircraft, comparing the first row and the first message of each flight that has both."""
    place: dict[int, int] = {}
    aircraft_of: dict[int, str] = {}
    for row in rows:
        place.setdefault(row["number"], len(place))
        aircraft_of.setdefault(row["number"], row["aircraft"])
    seen: set[int] = set()
    last: dict[str, tuple[int, int]] = {}
    found = []
    for message in messages:
        number = _number(message.content)
        if number not in place or number in seen:
            continue
        seen.add(number)
        partition, latest = last.get(aircraft_of[number], (message.partition, -1))
        if place[number] < latest or message.partition != partition:
            found.append(number)
        last[aircraft_of[number]] = partition, max(latest, place[number])
    return found


def _wrong_aircraft(evidence: Evidence) -> list[str]:
    cancelled = Counter(flight.aircraft for flight in evidence.flights if flight.cancelled)
    departures: Counter[str] = Counter()
    delay: Counter[str] = Counter()
    for row in evidence.rows:
        departures[row["aircraft"]] += 1
        delay[row["aircraft"]] += row["delay"]
    last = {flight.aircraft: flight.number for flight in evidence.flights}
    expected = {
        name: {
            "departures": departures[name],
            "cancelled": cancelled[name],
            "delay": delay[name],
            "last_flight": last.get(name),
        }
        for name in departures.keys() | cancelled.keys()
    }
    return sorted(
        name for name in expected.keys() | evidence.aircraft.keys() if expected.get(name) != evidence.aircraft.get(name)
    )


def _by_number(rows: Iterable[Content]) -> dict[int, list[Content]]:
    found: dict[int, list[Content]] = defaultdict(list)
    for row in rows:
        found[row["number"]].append(row)
    return found


def _number(content: Content | None) -> int:
    """The flight number of a message; 0, which no flight has, if the message has none."""
    number = None if content is None else content.get("number")
    return number if isinstance(number, int) else 0
