"""Judges a recorded history by named anomalies; docs/how-it-works/histories.md defines each.

::

    python tools/check_history.py runs/2026-11-29/*.jsonl      # a table; exit code 1 if there is an anomaly
    python tools/check_history.py --json runs/2026-11-29/*     # the same for programs

Exit code 2: the files can't be judged.
"""

from __future__ import annotations

import argparse
import json
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from history_file import CONSUMED, FAIL, FINAL, NEVER, OK, OUTCOMES, READ, ROW, UNKNOWN, History, HistoryError

ANOMALIES: Final = (
    "lost",
    "phantom",
    "duplicate",
    "torn",
    "aborted read",
    "reordered",
    "effect without position",
    "position without effect",
    "time travel",
)
EXAMPLES: Final = 5
"""How many anomalies of each name are described."""


@dataclass
class Found:
    """The anomalies of one name.

    Args:
        count: How many there are.
        examples: The first ones, described.
    """

    count: int = 0
    examples: list[str] = field(default_factory=list)


class Judge:
    """Looks for anomalies in a history.

    Args:
        history: The history.

    Raises:
        HistoryError: It has no final read of something that was written, or one from before the last operation's end.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._found = {name: Found() for name in ANOMALIES}
        self._check_final_reads()
        for rule in (self._reads, self._units, self._order, self._causes, self._positions):
            rule()

    @property
    def anomalies(self) -> dict[str, Found]:
        """What was found, by name."""
        return self._found

    def _report(self, name: str, operations: Sequence[int], text: str, *effects: list[int]) -> None:
        """Count an anomaly; `text` has a `{}` for each list of effects."""
        found = self._found[name]
        found.count += 1
        if found.count <= EXAMPLES:
            described = text.format(*map(self._effects, effects)) if effects else text
            found.examples.append("; ".join([described, *map(self._operation, operations)]))

    def _check_final_reads(self) -> None:
        history = self._history
        unread = [topic for topic in history.topics if topic not in history.topics_read]
        unread += ["the database's rows"] if history.rows and not history.rows_were_read else []
        unread += {
            f"the position of {group} in {topic}-{partition}"
            for moves in history.moves.values()
            for group, topic, partition, *_ in moves
            if (group, topic, partition) not in history.positions
        }
        if unread:
            raise HistoryError(f"there is no final read of {', '.join(sorted(unread)[:EXAMPLES])}: what is lost can't be told")
        last = max((time for times in (history.invoked, history.ended) for time in times if time != NEVER), default=0)
        if history.final_at < last:
            raise HistoryError("a final read is from before the end of the last operation: read both sides when all have ended")

    # --- names for people -------------------------------------------------------------------------------------------------

    def _operation(self, operation: int) -> str:
        history = self._history
        path, line = history.paths[history.place[operation] >> 40], history.place[operation] & (1 << 40) - 1
        client = next(name for (_, name), number in history.clients.items() if number == history.client[operation])
        return f"{path}:{line} (client {client}, {OUTCOMES[history.outcome[operation]]})"

    def _effect(self, effect: int) -> str:
        history = self._history
        topic = history.topic[effect]
        values = history.rows if topic == ROW else history.messages[topic]
        value = next(value for value, number in values.items() if number == effect)
        return f"row {value!r}" if topic == ROW else f"message {value!r} of {[*history.topics][topic]}"

    def _effects(self, effects: Iterable[int]) -> str:
        return ", ".join(map(self._effect, sorted(effects)))

    # --- the rules --------------------------------------------------------------------------------------------------------

    def _reads(self) -> None:
        """What no operation has written, what is there twice, and what the reads during the run did not have."""
        history = self._history
        for text in history.phantoms.values():
            self._report("phantom", [], text)
        for effect, text in history.doubled.items():
            self._report("duplicate", [history.owner[effect]], "{} " + text, [effect])
        for missing, there in history.halves:
            self._report("torn", [history.owner[missing]], "a read had {} without {}", [there], [missing])
        halves = {missing for missing, _ in history.halves}
        for effect, began in history.absent:
            operation = history.owner[effect]
            consumed = min((history.consumed_at[each] for each in history.effects(operation)), default=NEVER)
            if effect in halves or not history.how[effect] & FINAL:
                continue  # it is reported already; or what is never there is judged with its operation
            if consumed < began:
                self._report("time travel", [operation], "a consumer had a message before the database had {}", [effect])
            elif history.outcome[operation] == OK and history.ended[operation] < began:
                self._report("lost", [operation], "a read after the end of the call did not have {}", [effect])

    def _units(self) -> None:
        """What each operation has left: all, nothing, or something that it should not have."""
        history = self._history
        for operation in range(history.operations):
            effects = [*history.effects(operation)]
            has_failed = history.outcome[operation] == FAIL
            aborted = [effect for effect in effects if history.how[effect] and (has_failed or history.replaced[effect])]
            if aborted:
                self._report("aborted read", [operation], "{}, which was rolled back, was seen", aborted)
            effects = [] if has_failed else [effect for effect in effects if not history.replaced[effect]]
            missing = [effect for effect in effects if not history.how[effect] & FINAL]
            if missing:
                self._incomplete(operation, effects, missing)

    def _incomplete(self, operation: int, effects: list[int], missing: list[int]) -> None:
        """Not all of an operation that has not failed is there at the end."""
        history = self._history
        seen = [effect for effect in effects if history.how[effect]]
        rows = [effect for effect in effects if history.topic[effect] == ROW]
        sent = [effect for effect in seen if history.topic[effect] != ROW]
        if sent and rows and not any(history.how[effect] & FINAL for effect in rows):
            self._report("time travel", [operation], "{} without {}", sent, rows)
        elif history.outcome[operation] == OK or any(history.how[effect] & READ for effect in rows):
            self._report("lost", [operation], "{} is missing at the end", missing)
        elif seen:
            self._report("torn", [operation], "{} without {}", seen, missing)

    def _order(self) -> None:
        """Messages of a key in a partition: those of operations that did not overlap, and those of one operation."""
        history = self._history
        for effects in history.order.values():
            effects.sort(key=history.offset.__getitem__)
            latest: dict[int, int] = {}
            in_unit: dict[tuple[int, int], int] = {}
            for effect in effects:
                operation, key = history.owner[effect], history.key[effect]
                if not self._is_kept(effect):
                    continue
                before = latest.setdefault(key, operation)
                if history.outcome[operation] == OK and history.ended[operation] < history.invoked[before]:
                    self._report("reordered", [operation, before], "{} is behind a later operation's of its key", [effect])
                elif history.invoked[operation] > history.invoked[before]:
                    latest[key] = operation
                if history.sent[operation] > 1:
                    if history.sequence[effect] < in_unit.get((operation, key), 0):
                        self._report("reordered", [operation], "{} is behind what its unit has sent later", [effect])
                    in_unit[operation, key] = history.sequence[effect]

    def _causes(self) -> None:
        """An operation that has seen a row: it is not one of a rolled back attempt, and its messages come first."""
        history = self._history
        for operation, seen in history.seen.items():
            for value in seen:
                cause = history.rows.get(value)
                if cause is None:
                    self._report("phantom", [operation], f"no operation has written the row {value!r}, which a unit has read")
                    continue
                other = history.owner[cause]
                if other == operation:
                    continue
                if history.outcome[other] == FAIL or history.replaced[cause]:
                    self._report("aborted read", [operation, other], "a unit has read {}, which was rolled back", [cause])
                for a, b in self._in_one_partition(other, operation):
                    if history.offset[a] > history.offset[b]:
                        self._report("reordered", [operation, other], "{}, the effect, is before its cause, {}", [b], [a])
                        break

    def _is_kept(self, effect: int) -> bool:
        """Whether it has one place: it was not rolled back, as far as its client knows, and is not there twice."""
        history = self._history
        return history.outcome[history.owner[effect]] != FAIL and not history.replaced[effect] and effect not in history.doubled

    def _in_one_partition(self, first: int, second: int) -> Iterator[tuple[int, int]]:
        history = self._history
        for a in filter(self._is_kept, history.effects(first)):
            for b in filter(self._is_kept, history.effects(second)):
                if history.topic[a] == history.topic[b] != ROW and history.partition[a] == history.partition[b] >= 0:
                    yield a, b

    def _positions(self) -> None:
        """Each message below a group's position has taken effect by one operation, and none at it or behind it."""
        history = self._history
        ranges: defaultdict[tuple[str, str, int], list[tuple[int, int, int]]] = defaultdict(list)
        for operation, moves in history.moves.items():
            if self._may_be_committed(operation):
                for group, topic, partition, first, last in moves:
                    ranges[group, topic, partition].append((first, last, operation))
        for place, (position, begin) in history.positions.items():
            group, topic, partition = place
            inputs = [history.offset[effect] for effect in history.order.get((topic, partition), ())]
            reached, committed, before = begin - 1, begin - 1, -1
            for first, last, operation in sorted(ranges[place]):
                self._check_gap(place, inputs, reached + 1, min(first, position))
                reached = max(reached, last)
                if not self._is_committed(operation):
                    continue
                if first <= committed and before >= 0:
                    text = f"{group} has processed {topic}-{partition} at {first} twice"
                    self._report("duplicate", [operation, before], text)
                if last >= position:
                    text = f"{group} is at {position} in {topic}-{partition}, and {last} has taken effect"
                    self._report("effect without position", [operation], text)
                if last > committed:
                    committed, before = last, operation
            self._check_gap(place, inputs, reached + 1, position)

    def _check_gap(self, place: tuple[str, str, int], inputs: list[int], begin: int, end: int) -> None:
        """No operation has consumed offsets from `begin` until before `end`: there is no message, unless inputs are unknown."""
        group, topic, partition = place
        if topic in self._history.topics_read:
            at = bisect_left(inputs, begin)
            begin = inputs[at] if at < len(inputs) else end
        if begin < end:
            text = f"{group} has passed {topic}-{partition} at {begin}, which has taken no effect"
            self._report("position without effect", [], text)

    def _is_committed(self, operation: int) -> bool:
        history = self._history
        if history.outcome[operation] != UNKNOWN:
            return history.outcome[operation] == OK  # effects of a failed one are reported as such
        return any(history.how[effect] and not history.replaced[effect] for effect in history.effects(operation))

    def _may_be_committed(self, operation: int) -> bool:
        has_effects = any(not self._history.replaced[effect] for effect in self._history.effects(operation))
        return self._is_committed(operation) or (self._history.outcome[operation] == UNKNOWN and not has_effects)


# --- the summary ----------------------------------------------------------------------------------------------------------


def summary(history: History, anomalies: dict[str, Found]) -> dict[str, Any]:
    """What the files have, as JSON has it."""
    last = max((time for times in (history.invoked, history.ended) for time in times if time != NEVER), default=0)
    unknown = [operation for operation in range(history.operations) if history.outcome[operation] == UNKNOWN]
    committed = sum(any(history.how[each] & FINAL for each in history.effects(operation)) for operation in unknown)
    return {
        "operations": {name: history.outcome.count(number) for number, name in enumerate(OUTCOMES)},
        "unknown": {"committed": committed, "not committed": len(unknown) - committed},
        "rows": len(history.rows),
        "messages": sum(map(len, history.messages)),
        "seen": {
            "at the end": sum(how & FINAL != 0 for how in history.how),
            "by consumers": sum(how & CONSUMED != 0 for how in history.how),
            "by reads": sum(how & READ != 0 for how in history.how),
        },
        "clients": len(history.clients),
        "processes": {"ended": history.processes["closed"], "killed": history.processes["all"] - history.processes["closed"]},
        "seconds": round((last - min(history.invoked, default=last)) / 1e6),
        "errors": dict(history.errors.most_common()),
        "faults": dict(sorted(history.faults.items())),
        "versions": {name: sorted(versions) for name, versions in sorted(history.versions.items())},
        "anomalies": {name: {"count": found.count, "examples": found.examples} for name, found in anomalies.items()},
    }


def table(found: dict[str, Any]) -> str:
    """The summary as text."""
    lines = []
    for name, value in found.items():
        if name == "anomalies":
            continue
        if isinstance(value, dict):
            each = ", ".join(f"{key} {item if isinstance(item, str) else _number(item)}" for key, item in value.items())
            lines.append((name, each or "none"))
        else:
            lines.append((name, _number(value)))
    for name, anomaly in found["anomalies"].items():
        lines.append((name, _number(anomaly["count"])))
        lines += [("", f"  {example}") for example in anomaly["examples"]]
    return "\n".join(f"{name:<24} {text}".rstrip() for name, text in lines)


def _number(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else f"{value:,}"


def check(paths: Iterable[Path]) -> dict[str, Any]:
    """Judge files; return the summary.

    Raises:
        HistoryError: They can't be judged.
    """
    history = History(paths)
    return summary(history, Judge(history).anomalies)


def main() -> int:
    """Judge the files of the command line."""
    parser = argparse.ArgumentParser(description="Judges a recorded history by named anomalies.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="the files of one run, .gz or not")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    options = parser.parse_args()
    try:
        found = check(options.files)
    except HistoryError as error:
        sys.stderr.write(f"This history can't be judged: {error}.\n")
        return 2
    sys.stdout.write((json.dumps(found, indent=2) if options.json else table(found)) + "\n")
    return 1 if any(anomaly["count"] for anomaly in found["anomalies"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
