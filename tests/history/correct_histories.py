"""Makes correct histories: atomic commits with outcomes that clients may not learn, consumers, reads, and a processor."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

HEADER = {"history": 1, "name": "simulated", "pid": 1, "boot": "b", "clock": 1_000, "versions": {"kafka": "0"}}
TOPIC, INPUT, GROUP = "orders", "input", "g"
PARTITIONS = 2
KEYS = 3


@dataclass
class Unit:
    """An operation: what it writes, and what became of it."""

    number: int
    client: int
    rows: list[int]
    messages: list[tuple[str, str]]
    move: list[Any] | None = None
    outcome: str = ""
    is_committed: bool = False
    began: int = 0
    ended: int | None = None

    @property
    def content(self) -> list[Any]:
        sent = {TOPIC: [part for message in self.messages for part in message]} if self.messages else {}
        return [self.rows, sent, [self.move] if self.move else []]


@dataclass
class Simulation:
    """A system that keeps the promise, and the lines of what its clients did and saw.

    Args:
        chance: What it draws from.
        steps: How many things happen.
    """

    chance: Random
    steps: int = 60
    clients: int = 3
    now: int = 0
    lines: list[list[Any]] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    logs: dict[tuple[str, int], list[tuple[int, str, str]]] = field(default_factory=dict)
    position: int = 0
    replaced: dict[str, Unit] = field(default_factory=dict)
    consumed: dict[tuple[str, int], int] = field(default_factory=dict)
    open: dict[int, Unit] = field(default_factory=dict)
    late: list[Unit] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.logs = {(TOPIC, partition): [] for partition in range(PARTITIONS)} | {(INPUT, 0): []}
        for _ in range(self.steps):
            self.now += self.chance.randint(1, 5)
            self.chance.choice(
                [self._client, self._client, self._client, self._feed, self._consume, self._read, self._recover]
            )()
        for unit in [*self.open.values()]:
            if self.chance.random() < 0.5:  # the others never end
                self._end(unit)
        while self.late:
            self._recover()
        self.now += 10

    def write(self, folder: Path) -> list[Path]:
        """The files: one of the clients, and one of the final reads."""
        final = [["rows", self.now, self.rows], ["position", self.now, GROUP, INPUT, 0, self.position, 0]]
        for (topic, partition), log in self.logs.items():
            final.append(["topic", self.now, topic, partition, [part for message in log for part in message]])
        paths = []
        for name, lines in (("clients", self.lines), ("final", final)):
            paths.append(path := folder / f"{name}.jsonl")
            text = [json.dumps(line, separators=(",", ":")) for line in [HEADER, *lines]]
            path.write_text("\n".join(text) + "\n", encoding="utf-8")
        return paths

    def place_of(self, value: str) -> tuple[list[tuple[int, str, str]], int]:
        """The log that has a message, and its index there."""
        for log in self.logs.values():
            for index, message in enumerate(log):
                if message[2] == value:
                    return log, index
        raise LookupError(value)

    def end_of(self, log: list[tuple[int, str, str]]) -> int:
        """The next offset; some are a marker's."""
        return (log[-1][0] + self.chance.randint(1, 2)) if log else 0

    # --- what can happen --------------------------------------------------------------------------------------------------

    def _client(self) -> None:
        client = self.chance.randrange(self.clients)
        if client in self.open:
            self._end(self.open[client])
        else:
            self._begin(client)

    def _begin(self, client: int) -> None:
        number = len(self.units) + 1
        unit = self._made(number, client)
        seen = self.rows[-1:] if self.chance.random() < 0.3 else []
        self.lines.append(["i", number, client, self.now, *unit.content, seen])
        if self.chance.random() < 0.2:
            for _, value in unit.messages:
                self.replaced[value] = unit
            unit.rows, unit.messages = self._values(number, attempt=5)
            self.lines.append(["w", number, self.now, *unit.content, seen])
        unit.began = self.now
        self.units.append(unit)
        self.open[client] = unit

    def _made(self, number: int, client: int) -> Unit:
        unit = Unit(number, client, *self._values(number, attempt=0))
        waiting = [offset for offset, *_ in self.logs[INPUT, 0] if offset >= self.position]
        if waiting and not any(each.move for each in self.open.values()) and self.chance.random() < 0.5:
            unit.move = [GROUP, INPUT, 0, waiting[0], self.chance.choice(waiting)]
        return unit

    def _values(self, number: int, *, attempt: int) -> tuple[list[int], list[tuple[str, str]]]:
        rows = [number * 10 + attempt + each for each in range(self.chance.randint(1, 2))]
        values = [f"{number}-{attempt + each}" for each in range(self.chance.randint(0, 3))]
        return rows, [(str(self.chance.randrange(KEYS)), value) for value in values]

    def _end(self, unit: Unit) -> None:
        unit.outcome = self.chance.choice(["o", "o", "f", "u", ""])
        if unit.outcome == "o" or (unit.outcome != "f" and self.chance.random() < 0.5):
            if unit.outcome == "o" or unit.move or self.chance.random() < 0.5:
                self._commit(unit)
            else:
                self.late.append(unit)
        if unit.outcome:  # otherwise its process was killed
            unit.ended = self.now = self.now + 1
            self.lines.append([unit.outcome, unit.number, self.now, *(["Error"] if unit.outcome != "o" else [])])
        del self.open[unit.client]

    def _recover(self) -> None:
        """What is in doubt is committed."""
        if self.late:
            self._commit(self.late.pop(self.chance.randrange(len(self.late))))

    def _commit(self, unit: Unit) -> None:
        unit.is_committed = True
        self.rows += unit.rows
        if unit.move:
            self.position = unit.move[4] + 1
        for key, value in unit.messages:
            log = self.logs[TOPIC, int(key) % PARTITIONS]
            log.append((self.end_of(log), key, value))

    def _feed(self) -> None:
        """Somebody writes an input of the processor."""
        number = len(self.units) + 1
        self.units.append(Unit(number, 99, [], [], is_committed=True))
        log, value = self.logs[INPUT, 0], f"in-{number}"
        self.lines.append(["i", number, 99, self.now, [], {INPUT: ["k", value]}])
        log.append((self.end_of(log), "k", value))
        self.now += 1
        self.lines.append(["o", number, self.now])

    def _consume(self) -> None:
        place = self.chance.choice([*self.logs])
        new = self.logs[place][self.consumed.get(place, 0) :]
        self.consumed[place] = len(self.logs[place])
        if new:
            self.lines.append(["c", self.now, *place, [part for message in new for part in message]])

    def _read(self) -> None:
        asked = [row for unit in self.units[-5:] for row in unit.rows]
        self.lines.append(["r", self.now, self.now + 1, asked, [row for row in asked if row in self.rows]])
        self.now += 1
