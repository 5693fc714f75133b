"""Reads the files of a history (docs/how-it-works/histories.md) into arrays: 10⁶ operations take some hundred megabytes.

An operation and an *effect*, a row or a message that an operation writes, are numbers: indexes of the arrays.
"""

from __future__ import annotations

import gzip
import io
import json
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from history_recorder import VERSION

NEVER: Final = 2**62
"""A time later than all others."""
UNKNOWN, OK, FAIL = range(3)
OUTCOMES: Final = ("unknown", "ok", "fail")
FINAL, CONSUMED, READ = 1, 2, 4
"""How an effect was seen: at the end, by a consumer during the run, by a read of the database during the run."""
ROW: Final = -1
"""In place of a topic."""

_ENDS: Final = {"o": OK, "f": FAIL, "u": UNKNOWN}
_SKIPPED_FIRST: Final = ('["c"', '["r"', '["topic"', '["rows"', '["position"')
_SKIPPED_THEN: Final = ('["i"', '["w"', '["o"', '["f"', '["u"', '["fault"', '["end"')

Place = tuple[str, int, int]
"""Topic, partition, offset."""


class HistoryError(Exception):
    """The files can't be judged: they are not in the format, contradict themselves, or have no final reads."""


class History:
    """What the files of one run say.

    Args:
        paths: The files, `.gz` or not, in any order.

    Raises:
        HistoryError: A file is not in the format.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.paths = [*paths]
        self.versions: defaultdict[str, set[str]] = defaultdict(set)
        self.processes: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self._clocks = [0] * len(self.paths)
        self._boots: set[str] = set()
        # operations
        self.outcome = bytearray()
        self.invoked, self.ended = array("q"), array("q")
        self.client, self.place = array("q"), array("q")
        self.first_effect, self.sent = array("q"), array("q")
        self.clients: dict[tuple[int, Any], int] = {}
        self.moves: dict[int, list[list[Any]]] = {}
        self.seen: dict[int, list[Any]] = {}
        # effects
        self.owner, self.next_effect = array("q"), array("q")
        self.topic, self.key, self.sequence = array("q"), array("q"), array("q")
        self.replaced, self.how = bytearray(), bytearray()
        self.partition, self.offset = array("q"), array("q")
        self.consumed_at = array("q")
        self.rows: dict[Any, int] = {}
        self.topics: dict[str, int] = {}
        self.messages: list[dict[Any, int]] = []
        self._keys: dict[Any, int] = {}
        self._sequence = 0
        # observations
        self.order: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        self.phantoms: dict[Any, str] = {}
        self.doubled: dict[int, str] = {}
        self.halves: list[tuple[int, int]] = []
        self.absent: list[tuple[int, int]] = []
        self.positions: dict[tuple[str, str, int], tuple[int, int]] = {}
        self.rows_were_read, self.topics_read = False, set[str]()
        self.final_at = NEVER
        for number, path in enumerate(self.paths):
            self._read(path, _SKIPPED_FIRST, self._operations(number))
        if len(self._boots) > 1:
            raise HistoryError(
                "the files have clocks of several machines, or of one that was started anew: they can't be compared"
            )
        for number, path in enumerate(self.paths):
            self._read(path, _SKIPPED_THEN, self._observations(self._clocks[number]))

    @property
    def operations(self) -> int:
        """How many there are."""
        return len(self.outcome)

    def _read(self, path: Path, skipped: tuple[str, ...], take: Callable[[Any, int], None]) -> None:
        line_number = 0
        try:
            for line_number, text in _lines(path, skipped):
                take(json.loads(text), line_number)
        except HistoryError as error:
            raise HistoryError(f"{path}:{line_number}: {error}") from error
        except (ArithmeticError, LookupError, OSError, TypeError, ValueError) as error:
            raise HistoryError(
                f"{path}:{line_number}: this is not a line of a history ({type(error).__name__}: {error})"
            ) from error

    # --- operations -------------------------------------------------------------------------------------------------------

    def _operations(self, file: int) -> Callable[[Any, int], None]:
        """What takes the lines of a file that are about its operations."""
        known: dict[int, int] = {}

        def take(line: Any, number: int) -> None:
            clock = self._clocks[file]
            if isinstance(line, dict):
                self._clocks[file] = self._header(line)
            elif (kind := line[0]) == "i":
                if known.setdefault(line[1], self.operations) != self.operations:
                    raise HistoryError(f"operation {line[1]} has begun before")
                self._invoke(self.clients.setdefault((file, line[2]), len(self.clients)), clock + line[3], file << 40 | number)
                self._add(known[line[1]], *line[4:])
            elif kind == "w":
                self._replace(known[line[1]], *line[3:])
            elif kind in _ENDS:
                self._end(known[line[1]], _ENDS[kind], clock + line[2], *line[3:])
            elif kind == "fault":
                self.faults[line[2]] += 1
            elif kind == "end":
                self.processes["closed"] += 1
            else:
                raise HistoryError(f"there is no kind {kind!r}")

        return take

    def _header(self, line: dict[str, Any]) -> int:
        if line["history"] != VERSION:
            raise HistoryError(f"the format's version is {line['history']}, not {VERSION}")
        self.processes["all"] += 1
        self._boots.add(line["boot"])
        for name, version in line["versions"].items():
            self.versions[name].add(version)
        return int(line["clock"])

    def _invoke(self, client: int, at: int, place: int) -> None:
        self.outcome.append(UNKNOWN)
        for values, value in ((self.invoked, at), (self.ended, NEVER), (self.client, client), (self.place, place)):
            values.append(value)
        self.first_effect.append(-1)
        self.sent.append(0)

    def _end(self, operation: int, outcome: int, at: int, error: str = "") -> None:
        if self.ended[operation] != NEVER:
            raise HistoryError("the operation has ended before")
        self.outcome[operation] = outcome
        self.ended[operation] = at
        if error:
            self.errors[error] += 1

    def _add(self, operation: int, rows: Any = (), messages: Any = None, moves: Any = (), seen: Any = ()) -> None:
        for value in rows:
            self._effect(operation, self.rows, value, ROW, None)
        for topic, flat in (messages or {}).items():
            number = self.topics.setdefault(topic, len(self.messages))
            if number == len(self.messages):
                self.messages.append({})
            for key, value in zip(flat[::2], flat[1::2], strict=True):
                self._effect(operation, self.messages[number], value, number, key)
        if moves:
            self.moves[operation] = moves
        if seen:
            self.seen[operation] = seen

    def _replace(self, operation: int, *content: Any) -> None:
        for effect in self.effects(operation):
            self.replaced[effect] = True
        self.moves.pop(operation, None)
        self.seen.pop(operation, None)
        self.sent[operation] = 0
        self._add(operation, *content)

    def _effect(self, operation: int, values: dict[Any, int], value: Any, topic: int, key: Any) -> None:
        effect = values.setdefault(value, len(self.owner))
        if effect == len(self.owner):
            key_number = self._keys.setdefault(key, len(self._keys))
            for numbers, number in ((self.owner, operation), (self.topic, topic), (self.key, key_number)):
                numbers.append(number)
            self.next_effect.append(self.first_effect[operation])
            self.first_effect[operation] = effect
            self.replaced.append(False)
            self.how.append(0)
            unseen = ((self.partition, -1), (self.offset, -1), (self.consumed_at, NEVER), (self.sequence, 0))
            for numbers, number in unseen:
                numbers.append(number)
        elif self.owner[effect] != operation or not self.replaced[effect]:
            raise HistoryError(f"{value!r} is written twice; a row, and a message in its topic, must have a value of its own")
        self.replaced[effect] = False
        self._sequence += 1
        self.sequence[effect] = self._sequence
        self.sent[operation] += topic != ROW

    def effects(self, operation: int) -> Iterator[int]:
        """What an operation has written, also in attempts that were replaced; the last one first."""
        effect = self.first_effect[operation]
        while effect >= 0:
            yield effect
            effect = self.next_effect[effect]

    # --- observations -----------------------------------------------------------------------------------------------------

    def _observations(self, clock: int) -> Callable[[Any, int], None]:
        """What takes the lines of a file that are about what was seen."""

        def take(line: Any, _: int) -> None:
            if isinstance(line, dict):
                return
            kind, at, *rest = line
            if kind == "c":
                self._messages(CONSUMED, clock + at, *rest)
            elif kind == "r":
                self._database(clock + at, *rest[1:])
            else:
                self.final_at = min(self.final_at, clock + at)
                self._final(kind, clock + at, *rest)

        return take

    def _final(self, kind: str, at: int, *rest: Any) -> None:
        if kind == "topic":
            self.topics_read.add(rest[0])
            self._messages(FINAL, at, *rest)
        elif kind == "rows":
            self.rows_were_read = True
            self._final_rows(*rest)
        else:
            group, topic, partition, offset, begin = rest
            self.positions[group, topic, partition] = offset, begin

    def _messages(self, how: int, at: int, topic: str, partition: int, flat: list[Any]) -> None:
        values = self.messages[self.topics[topic]] if topic in self.topics else {}
        order = self.order[topic, partition]
        for offset, key, value in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
            effect = values.get(value)
            if effect is None or self._keys.get(key) != self.key[effect]:
                place = f"{topic}-{partition} at {offset}"
                self.phantoms[place] = f"no operation has sent the message {value!r} with the key {key!r}, which is in {place}"
                continue
            if self.offset[effect] < 0:
                self.partition[effect], self.offset[effect] = partition, offset
                order.append(effect)
            elif (self.partition[effect], self.offset[effect]) != (partition, offset):
                where = f"{topic}-{self.partition[effect]} at {self.offset[effect]}, and in partition {partition} at {offset}"
                self.doubled[effect] = f"is in {where}"
            self.how[effect] |= how
            if how == CONSUMED:
                self.consumed_at[effect] = min(self.consumed_at[effect], at)

    def _final_rows(self, values: list[Any]) -> None:
        for value in values:
            effect = self.rows.get(value)
            if effect is None:
                self.phantoms["row", value] = f"no operation has written the row {value!r}, which is in the database"
            elif self.how[effect] & FINAL:
                self.doubled[effect] = "is in the database more than once"
            else:
                self.how[effect] |= FINAL

    def _database(self, began: int, asked: list[Any], found: list[Any]) -> None:
        for value in found:
            effect = self.rows.get(value)
            if effect is None:
                self.phantoms["row", value] = (
                    f"no operation has written the row {value!r}, which the database had during the run"
                )
            else:
                self.how[effect] |= READ
        there = {self.rows[value]: value for value in found if value in self.rows}
        owners = {self.owner[effect]: effect for effect in there}
        for value in asked:
            effect = self.rows.get(value)
            if effect is not None and effect not in there and not self.replaced[effect]:
                self.absent.append((effect, began))
                if (other := owners.get(self.owner[effect])) is not None:
                    self.halves.append((effect, other))


def _lines(path: Path, skipped: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """The lines of a file with their numbers, but for those that begin with something skipped, and an incomplete last one.

    Raises:
        HistoryError: The first one is no header, or one is behind the end.
    """
    raw = gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # noqa: SIM115  (closed by the next line)
    with raw, io.TextIOWrapper(raw, encoding="utf-8", newline="\n") as file:
        has_ended = False
        for number, text in enumerate(file, 1):
            if has_ended:
                raise HistoryError("there are lines after the file's end")
            if not text.endswith("\n"):
                return  # the process was killed while it wrote this
            if number == 1 and not text.startswith("{"):
                raise HistoryError("the first line is no header")
            has_ended = text.startswith('["end"')
            if not text.startswith(skipped):
                yield number, text
