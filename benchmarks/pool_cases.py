"""The cases of the pool's benchmark: kinds of callers, handles, alternatives, and which of them can be combined."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Final

from cases import Case

THREADS: Final = "threads"
ASYNCIO: Final = "asyncio"
UVLOOP: Final = "uvloop"
KINDS: Final = (THREADS, ASYNCIO, UVLOOP)
_MILLI: Final = 1e3

CORE: Final = "core"
PSYCOPG: Final = "psycopg"
HANDLES: Final = (CORE, PSYCOPG)

PLAIN: Final = "plain"
NAIVE: Final = "naive"
OUTBOX: Final = "outbox"
WRITERS: Final = "writers"
OWN: Final = "own"
POOL: Final = "pool"
DECIDED: Final = "pool-decided"
ALTERNATIVES: Final = (PLAIN, NAIVE, OUTBOX, WRITERS, OWN, POOL, DECIDED)
POOLS: Final = (OWN, POOL, DECIDED)

TITLES: Final = {
    PLAIN: "plain commit",
    NAIVE: "commit, then produce",
    OUTBOX: "outbox + relay",
    WRITERS: "a writer each",
    OWN: "pool.transaction()",
    POOL: "pool",
    DECIDED: 'pool, "decided"',
}


@dataclass(frozen=True)
class Point:
    """The conditions under which alternatives are compared.

    Args:
        kind: What the callers are.
        handle: What they write with.
        callers: How many there are; each waits for the result before its next request.
        round_trip: Seconds that a round trip to the database and to Kafka takes; 0: no network in between.
    """

    kind: str
    handle: str
    callers: int
    round_trip: float = 0.0

    def __str__(self) -> str:
        distance = f", {milliseconds(self.round_trip)} ms away" if self.round_trip else ""
        return f"{self.kind}, {self.handle}, {self.callers} {'caller' if self.callers == 1 else 'callers'}{distance}"


def milliseconds(seconds: float) -> str:
    """A duration that was given in milliseconds, as it was given."""
    return f"{seconds * _MILLI:g}"


@dataclass(frozen=True, kw_only=True)
class PoolCase(Case):
    """One alternative at a point.

    Args:
        point: The point.
        pool_size: The number of the pool's writers; None: what the pool chooses.
        has_clocks: Whether the phases of the pool's groups are recorded.
        connections: How many connections to the database share the plain commits, commit-then-produce, or the outbox's.
    """

    point: Point
    pool_size: int | None
    has_clocks: bool
    connections: int

    @classmethod
    def of(
        cls, point: Point, alternative: str, *, pool_size: int | None, has_clocks: bool = False, connections: int | None = None
    ) -> PoolCase:
        """The case; one agent has all the callers. By default each caller has a connection."""
        return cls(
            alternative=alternative,
            writers=point.callers,
            agents=1,
            sends=alternative != PLAIN,
            needs_relay=alternative == OUTBOX,
            round_trip=point.round_trip,
            point=point,
            pool_size=pool_size,
            has_clocks=has_clocks,
            connections=connections or point.callers,
        )


def pool_size(point: Point, alternative: str, chosen: int | None, *, most_writers: int) -> int | None:
    """The number of the pool's writers; None: what the pool chooses.

    Args:
        point: The point.
        alternative: The alternative; each block of `pool.transaction()` has a writer, as far as there are enough.
        chosen: The size that was asked for, if any.
        most_writers: The size for `pool.transaction()` otherwise, at most.
    """
    return min(point.callers, most_writers) if chosen is None and alternative == OWN else chosen


def obstacle(point: Point, alternative: str, *, most_writers: int) -> str | None:
    """Why an alternative is not measured at a point; None if it is measured."""
    if alternative in (WRITERS, OWN) and point.kind != THREADS:
        return "a writer belongs to a thread" if alternative == WRITERS else "blocks are measured with threads"
    if alternative == WRITERS and point.callers > most_writers:
        return f"more than {most_writers} writers (--most-writers)"
    needs_greenlet = point.kind != THREADS and point.handle == CORE and alternative in (PLAIN, NAIVE, OUTBOX)
    if needs_greenlet and not _is_installed("greenlet"):
        return "SQLAlchemy's AsyncEngine needs greenlet: pip install greenlet"
    return None


def kinds_here() -> list[str]:
    """The kinds of callers that can be measured here."""
    return [kind for kind in KINDS if kind != UVLOOP or _is_installed("uvloop")]


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
