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

CORE: Final = "core"
PSYCOPG: Final = "psycopg"
HANDLES: Final = (CORE, PSYCOPG)

PLAIN: Final = "plain"
NAIVE: Final = "naive"
OUTBOX: Final = "outbox"
WRITERS: Final = "writers"
POOL: Final = "pool"
DECIDED: Final = "pool-decided"
ALTERNATIVES: Final = (PLAIN, NAIVE, OUTBOX, WRITERS, POOL, DECIDED)

TITLES: Final = {
    PLAIN: "plain commit",
    NAIVE: "commit, then produce",
    OUTBOX: "outbox + relay",
    WRITERS: "a writer each",
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
    """

    kind: str
    handle: str
    callers: int

    def __str__(self) -> str:
        return f"{self.kind}, {self.handle}, {self.callers} {'caller' if self.callers == 1 else 'callers'}"


@dataclass(frozen=True, kw_only=True)
class PoolCase(Case):
    """One alternative at a point.

    Args:
        point: The point.
        pool_size: The number of the pool's writers.
        has_clocks: Whether the phases of the pool's groups are recorded.
        connections: How many connections to the database share the plain commits, commit-then-produce, or the outbox's.
    """

    point: Point
    pool_size: int
    has_clocks: bool
    connections: int

    @classmethod
    def of(
        cls, point: Point, alternative: str, *, pool_size: int, has_clocks: bool = False, connections: int | None = None
    ) -> PoolCase:
        """The case; one agent has all the callers. By default each caller has a connection."""
        return cls(
            alternative=alternative,
            writers=point.callers,
            agents=1,
            sends=alternative != PLAIN,
            needs_relay=alternative == OUTBOX,
            point=point,
            pool_size=pool_size,
            has_clocks=has_clocks,
            connections=connections or point.callers,
        )


def obstacle(point: Point, alternative: str, *, most_writers: int) -> str | None:
    """Why an alternative is not measured at a point; None if it is measured."""
    if alternative == WRITERS and point.kind != THREADS:
        return "a writer belongs to a thread"
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
