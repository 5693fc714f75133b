"""A process with a pool whose callers write until it is killed, and what they were told; for the soak tests."""

from __future__ import annotations

from collections import Counter

from crash.scene import Worker
from fixtures.pace import until
from pool.pool_scene import MAYBE


class Run:
    """One process with a pool, and the outcomes that its callers got.

    Args:
        process: A process whose callers print `told N …`, `error N NAME …` and `wrong N …`.

    Attributes:
        told: The units of which a caller knows that they are committed.
        reported_failed: The units of which a caller knows that they are not committed.
        errors: How often each error was raised.
        wrong: What its units have found wrong.
    """

    def __init__(self, process: Worker) -> None:
        self.process = process
        self.told: list[int] = []
        self.reported_failed: list[int] = []
        self.errors: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._read = 0
        self.process.wait_for("open")

    def read(self) -> None:
        """Read what it has printed meanwhile."""
        lines = self.process.lines[self._read :]
        self._read += len(lines)
        for line in lines:
            what, *rest = line.split()
            if what == "told":
                self.told += map(int, rest)
            elif what == "error":
                self.errors[rest[1]] += 1
                if rest[1] not in MAYBE:
                    self.reported_failed.append(int(rest[0]))
            elif what == "wrong":
                self.wrong.append(line)

    def wait_for_more(self, units: int) -> None:
        """Wait until its callers have got so many more outcomes, or it has written all that it can."""
        wanted = len(self.told) + units

        def arrived() -> bool:
            self.read()
            return len(self.told) >= wanted or self.process.last() == "closed"

        until(arrived, lambda: f"{len(self.told)} of {wanted} units; {self.errors}; {self.process.errors[-2000:]}")

    def kill(self) -> None:
        self.process.kill()
        self.read()
