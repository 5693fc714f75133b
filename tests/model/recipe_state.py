"""What the model of the recipe is made of: its rules by name, the state, Kafka's answers, the decision table.

One logical id, native producers (EndTxn v5). Several databases may use it, and there may be several Kafka clusters, whose
producer ids are the same numbers: a transaction is named by its epoch alone, which is the worst case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

RULES: Final = {
    "F1": "describe first, then read the row again on the condition of one's own fence",
    "F2": "check the fence when a transaction begins",
    "F7": "settle in the database before the evidence at the broker is destroyed",
    "CL": "the row keeps the cluster that it speaks of; another one is refused before anything is claimed",
    "ST": "the id that Kafka sees names the database",
    "UC": "what stands as UNVERIFIED is looked for again, and committed where it is found ongoing",
    "UG": "a generation on which something stands as UNVERIFIED is not used again",
}
GENERATIONS: Final = 4
DELAY: Final = "a request is delayed in the network"
UNKNOWN: Final = "the answer to a COMMIT is lost"
TIMEOUT: Final = "the broker's timeout"


class Stored(NamedTuple):
    """The state S, or an entry of what is unverified."""

    generation: int
    epoch: int
    txn: int


class Row(NamedTuple):
    """The row of the id in one database."""

    fence: int = 0
    generation: int = 0  # 0: none was taken
    settled: int = 0
    stored: Stored | None = None
    unverified: tuple[Stored, ...] = ()
    cluster: int | None = None
    lock: int | None = None  # the process between record and the end of its COMMIT
    pending: Stored | None = None  # what a COMMIT on its way will store; the lock is its own then


class Id(NamedTuple):
    """What a coordinator keeps of one Kafka transactional id."""

    status: str = "N"  # N unknown, E empty, O ongoing, C complete commit, A complete abort
    epoch: int = -1
    sent: tuple[int, ...] = ()


class P(NamedTuple):
    """A process: where it is, and its local variables."""

    pc: str = "claim"
    fence: int = 0
    todo: tuple[int, ...] = ()
    seen: tuple[Any, ...] = ()  # status, epoch, decision
    stored: Stored | None = None  # what was read and is decided on
    taking: bool = False  # settling is a part of taking over
    generation: int = 0
    epoch: int = -1
    number: int = 0  # of its transactions


class State(NamedTuple):
    """Everything."""

    rows: tuple[Row, ...]
    ids: tuple[Id, ...]  # see `Scene.id_of`
    processes: tuple[P, ...]
    committed: frozenset[int] = frozenset()  # in a database
    visible: frozenset[int] = frozenset()
    aborted: frozenset[int] = frozenset()
    timed_out: frozenset[int] = frozenset()
    reported: frozenset[int] = frozenset()  # as lost
    late: tuple[tuple[Any, ...], ...] = ()  # requests in the network whose senders are gone
    budget: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scene:
    """Who takes part: ("writer", database, cluster, transactions) or ("recoverer", database, cluster).

    Args:
        processes: The processes. What a database's row does not say otherwise, is on cluster 0.
        without: Rules that are taken out.
        budget: What the environment may do, each once.
        older: Database 0 has a row that an older release wrote, without a cluster, and what it says is committed is ongoing.
        clusters: How many.
    """

    processes: tuple[tuple[Any, ...], ...]
    without: frozenset[str] = frozenset()
    budget: tuple[str, ...] = ()
    older: bool = False
    clusters: int = 1

    def has(self, rule: str) -> bool:
        """Whether the rule is kept."""
        assert rule in RULES
        return rule not in self.without

    @property
    def databases(self) -> int:
        """How many."""
        return 1 + max(spec[1] for spec in self.processes)

    def id_of(self, database: int, cluster: int, generation: int) -> int:
        """Which Kafka id a generation has: one of its own for each database, or (without ST) one for all."""
        name = database if self.has("ST") else 0
        return (cluster * self.databases + name) * GENERATIONS + generation


END: Final = P("over")
OLDER: Final = Stored(1, 0, 100)
"""What the row of an older release says is committed."""


def first_state(scene: Scene) -> State:
    """Nothing has happened, but for the row of an older release."""
    rows = [Row() for _ in range(scene.databases)]
    ids = [Id() for _ in range(scene.databases * scene.clusters * GENERATIONS)]
    committed: frozenset[int] = frozenset()
    if scene.older:
        rows[0] = Row(fence=1, generation=1, stored=OLDER)
        ids[scene.id_of(0, 0, 1)] = Id("O", 0, (OLDER.txn,))
        committed = frozenset({OLDER.txn})
    return State(tuple(rows), tuple(ids), (P(),) * len(scene.processes), committed, budget=scene.budget)


# --- Kafka --------------------------------------------------------------------------------------------------------------------


def executed(s: State, request: tuple[Any, ...]) -> tuple[State, bool, int]:
    """A request's effect; whether it was answered NONE, and the epoch in the answer."""
    what, i, epoch, argument = request
    k = s.ids[i]
    if what == "end":
        return _ended(s, i, epoch, commit=argument)
    if what == "create":
        return (with_id(s, i, Id("E", 0)), True, 0) if k.status == "N" else (s, False, -1)
    if k.status == "N" or k.epoch != epoch:  # produce
        return s, False, -1
    sent = (*k.sent, argument) if k.status == "O" else (argument,)
    return with_id(s, i, Id("O", epoch, sent)), True, epoch


def _ended(s: State, i: int, epoch: int, *, commit: bool) -> tuple[State, bool, int]:
    """EndTxn v5."""
    k = s.ids[i]
    if k.status == "N":
        return s, False, -1
    if epoch == k.epoch - 1 and k.status in "CA":  # the same request again
        return s, commit == (k.status == "C"), k.epoch
    if epoch != k.epoch or (commit and k.status != "O"):
        return s, False, -1
    ended = frozenset(k.sent if k.status == "O" else ())
    s = s._replace(visible=s.visible | ended) if commit else s._replace(aborted=s.aborted | ended)
    return with_id(s, i, Id("C" if commit else "A", k.epoch + 1)), True, k.epoch + 1


# --- decision.py --------------------------------------------------------------------------------------------------------------


def decided(scene: Scene, row: Row, generation: int, status: str, epoch: int) -> tuple[str, Stored | None]:
    """What to do with a generation, and on which state."""
    stored = row.stored if row.stored is not None and row.stored.generation == generation else None
    if scene.has("UC"):
        for entry in row.unverified:
            if entry.generation == generation and _names(entry, status, epoch):
                return {"O": "commit", "C": "committed", "A": "lost"}[status], entry
    if stored is not None and _names(stored, status, epoch):
        return {"O": "commit", "C": "committed", "A": "lost"}[status], stored
    if stored is not None and (status in "NE" or epoch <= stored.epoch):
        return "unverified", stored
    return "abort" if status == "O" else "nothing", stored


def _names(stored: Stored, status: str, epoch: int) -> bool:
    return status in "OCA" and epoch == (stored.epoch if status == "O" else stored.epoch + 1)


def to_look_at(scene: Scene, row: Row) -> tuple[int, ...]:
    """The generations on which something may be open, or stands as unverified."""
    again = {entry.generation for entry in row.unverified} if scene.has("UC") else set()
    return tuple(sorted({*range(row.settled + 1, row.generation + 1), *again}))


def resolved(row: Row, stored: Stored, found: str) -> Row:
    """The row once it is known, or given up, what became of a state."""
    left = tuple(entry for entry in row.unverified if entry != stored)
    if found == "unverified":
        left = (*left, stored)
    return row._replace(stored=None if row.stored == stored else row.stored, unverified=left)


# --- small changes ------------------------------------------------------------------------------------------------------------


def with_row(s: State, database: int, row: Row) -> State:
    """With another row."""
    return s._replace(rows=(*s.rows[:database], row, *s.rows[database + 1 :]))


def with_id(s: State, i: int, k: Id) -> State:
    """With another coordinator's entry."""
    return s._replace(ids=(*s.ids[:i], k, *s.ids[i + 1 :]))


def go(s: State, n: int, pc: str, **changes: Any) -> State:
    """With a process elsewhere."""
    p = END if pc == "over" else s.processes[n]._replace(pc=pc, **changes)
    return s._replace(processes=(*s.processes[:n], p, *s.processes[n + 1 :]))


def without(s: State, budget: str) -> State:
    """With a part of the budget spent."""
    left = list(s.budget)
    left.remove(budget)
    return s._replace(budget=tuple(left))
