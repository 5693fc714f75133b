"""What the model of the recipe is made of: its rules by name, the state, the decision table, and what a change does to a row.

One logical id. Several databases may use it, and there may be several Kafka clusters, whose producer ids are the same numbers:
a transaction is named by its epoch (and start time) alone, which is the worst case.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

RULES: Final = {
    "F1": "describe first, then read the row again, provided that the fencing token is unchanged",
    "F2": "check the fencing token when a transaction begins",
    "F3": "after any answer to EndTxn other than NONE, describe and decide again",
    "F5": "native: take over by compare-and-set, never by an unconditional InitProducerId",
    "NG": "native: register an unknown id once, under a generation that this claim has acquired",
    "F7": "record the outcome in the database before the evidence at the broker is destroyed",
    "F8": "after an unknown COMMIT, claim again only if the fencing token is unchanged",
    "F9": "librdkafka: a new session after an EndTxn that was repeated",
    "FA": "broker without EndTxn v5: abort by InitProducerId, never by EndTxn v4",
    "O2": "librdkafka: a new Kafka transactional id for every claim",
    "KU": "after an answer other than NONE to the writer's own commit, its outcome is unknown: claim again, recover",
    "SA": "clear S before aborting a later transaction",
    "CL": "the row keeps its cluster; another one is refused before anything is claimed",
    "ST": "the id that Kafka sees names the database",
    "QN": "our statements name the schema of the row, and the record its store",
    "UC": "look for UNVERIFIED transactions again, and commit those that are found ongoing",
    "UG": "don't reuse a generation with an UNVERIFIED entry",
    "RA": "publishing again: the record removes the entry, in the same database transaction",
    "RE": "publishing again: the record requires that the entry is still in the row",
    "RI": "publishing again: a record that is sent again recognizes itself by its state",
    "RS": "an entry is added only by the change that clears its state",
    "RL": "only what is proven LOST is published again, nothing UNVERIFIED",
    "RC": "a transaction is published again only on the cluster that its entry names",
    "RD": "a copy of the database that gets a store id of its own loses its entries",
    "RO": "a writer publishes lost transactions again before it begins a new one",
    "RP": "lost transactions are published again in the order of their database transactions, also those lost twice",
    "RW": "a writer reports a late commit as committed only if Kafka has confirmed it, or that of the copy",
    "DF": "a writer whose row is behind what the database had committed reports that before it commits anything else",
}
TRIED: Final = {
    "HL": "hold the row's lock from the claim to the end of recovery",
}
"""Changes of the recipe that were tried, and are not part of it."""

NATIVE: Final = "native"
LIBRDKAFKA: Final = "librdkafka"
OLD_BROKER: Final = "librdkafka on a broker without EndTxn v5"

GENERATIONS: Final = 5
COPY: Final = 1000
"""A copy's number is this times its own number, plus the transaction whose messages it publishes again."""
DELAY: Final = "a request is delayed in the network, and its sender dies"
REPEAT: Final = "a request is delayed in the network, and its sender sends it again"
UNKNOWN: Final = "the answer to a COMMIT is lost"
TIMEOUT: Final = "the broker's timeout"
RAISES: Final = "the user's block raises"
SETTING: Final = "the user's block changes which table an unqualified name means"
ACKNOWLEDGE: Final = "an operator acknowledges a lost transaction, whose messages he publishes himself"
RETENTION: Final = "retention removes messages from the log"
FORGETS: Final = "the coordinator forgets an id, and the log can't be read for a while"
BACK: Final = "the database goes back to before its last commit: an asynchronous standby was promoted"
MOVE: Final = "the id moves to cluster 1"
COPIED: Final = "database 0 is copied to database 1, which gets a store id of its own"


class Stored(NamedTuple):
    """The state S, or an UNVERIFIED entry."""

    generation: int
    epoch: int
    txn: int
    start: int = -1  # librdkafka keeps one epoch over many transactions: the start time distinguishes them


class Entry(NamedTuple):
    """An entry of the row's list of lost transactions."""

    stored: Stored
    cluster: int | None


class Row(NamedTuple):
    """The row of the id in one database."""

    fence: int = 0
    generation: int = 0  # 0: none was taken
    resolved: int = 0
    stored: Stored | None = None
    unverified: tuple[Stored, ...] = ()
    cluster: int | None = None
    lock: int | None = None  # the process between record and the end of its COMMIT
    pending: Stored | None = None  # what a delayed COMMIT will store; it holds the lock if the state was recorded before
    pending_fence: int = -1  # the fencing token that a delayed record with its COMMIT requires
    pending_entry: Entry | None = None  # and the entry that it requires and removes
    number: int = -1  # the newest claim's last committed transaction
    lost: tuple[Entry, ...] = ()


class Id(NamedTuple):
    """What a coordinator keeps of one Kafka transactional id."""

    status: str = "N"  # N unknown, E empty, O ongoing, PC/PA prepare commit/abort, C/A complete commit/abort
    epoch: int = -1
    sent: tuple[int, ...] = ()  # messages in the log without a marker, by their transactions
    start: int = 0  # start time of the last transaction: a counter
    mark: int = -1  # the newest epoch that the partition has seen


class P(NamedTuple):
    """A process: where it is, and its local variables."""

    pc: str = "claim"
    fence: int = 0
    todo: tuple[int, ...] = ()
    seen: tuple[Any, ...] = ()  # status, epoch, start, decision
    stored: Stored | None = None  # what was read and is decided on
    taking: bool = False  # resolving is a part of taking over
    generation: int = 0
    is_new: bool = False  # it acquired the generation itself, and has not registered its id yet
    epoch: int = -1
    number: int = 0  # of its transactions
    start: int = -1  # of the transaction that it has prepared (librdkafka)
    repeated: bool = False  # its EndTxn was sent twice
    entry: Entry | None = None  # what it publishes again
    copy: int = -1  # under which number
    owed: int = -1  # the transaction whose outcome its caller waits for, since its commit came too late
    was_lost: bool = False  # that one
    known: int = -1  # the last transaction that it knows to be committed, since its claim from another process


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
    denied: frozenset[int] = frozenset()  # the writer said that they were rolled back
    late: tuple[tuple[Any, ...], ...] = ()  # requests in the network whose senders are gone
    budget: tuple[str, ...] = ()
    copies: int = 0  # how many were begun
    log: frozenset[tuple[int, int, int, int]] = frozenset()  # what can be read: cluster, generation, epoch, transaction
    acknowledged: frozenset[int] = frozenset()
    confirmed: frozenset[int] = frozenset()  # a writer said that they are committed, after its commit came too late
    told: frozenset[int] = frozenset()  # a writer that publishes again said that they are lost
    order: tuple[int, ...] | None = None  # committed transactions in their order, if it matters
    shown: tuple[int, ...] = ()  # those that became visible
    past: tuple[Any, ...] = ()  # the rows, and what was committed, before the last commit
    gone: frozenset[int] = frozenset()  # committed, and the database has gone back to before that
    forgotten: frozenset[int] = frozenset()  # reported as such


@dataclass(frozen=True)
class Scene:
    """Who takes part: ("writer", database, cluster, transactions) or ("recoverer", database, cluster).

    A writer with "reports" at its end publishes nothing again: it reports what is lost, and goes on (`on_lost="report"`).

    Args:
        processes: The processes. Unless a database's row says otherwise, its id is on cluster 0.
        without: Rules that are removed.
        budget: What the environment may do, each once.
        older: Database 0 has a row that an older release wrote, without a cluster, and the transaction it names is ongoing.
        taken: A writer had registered generation 1 of the id in database 0, and crashed before it used it.
        clusters: How many.
        client: NATIVE, LIBRDKAFKA or OLD_BROKER.
        is_slow: Markers are written some time after EndTxn was answered: PrepareCommit and PrepareAbort can be seen.
        tried: Changes that are tried, see TRIED.
        is_merged: The record is sent with the COMMIT (PostgreSQL under two-phase commit), so that no lock is held in between.
        idles: Between two transactions a writer may clear the state of the one whose commit it knows (`recipe.idle`).
        republish: Everybody publishes lost transactions again, unless it "reports" them.
        joins: A writer's database transaction is one of the user's, which may be old: its fencing token is checked, under the
            lock of the row, before the first message.
        is_ordered: The order of the messages is compared with that of the database transactions.
        is_plain: The broker has no InitProducerId that can only create.
    """

    processes: tuple[tuple[Any, ...], ...]
    without: frozenset[str] = frozenset()
    budget: tuple[str, ...] = ()
    older: bool = False
    taken: bool = False
    clusters: int = 1
    client: str = NATIVE
    is_slow: bool = False
    tried: frozenset[str] = frozenset()
    is_merged: bool = False
    idles: bool = False
    republish: bool = False
    joins: bool = False
    is_ordered: bool = False
    is_plain: bool = False

    def has(self, rule: str) -> bool:
        """Whether the rule is kept."""
        assert rule in RULES
        return rule not in self.without

    @cached_property
    def after_recovery(self) -> dict[State, str]:
        """What recovery after a state violates, for those that were looked at: many states lead to the same one."""
        return {}

    def with_recoverer(self, database: int, cluster: int) -> Scene:
        """The scene in which one process more recovers, and nothing disturbs it."""
        key = (database, cluster)
        if key not in self._recoverers:
            added = (*self.processes, ("recoverer", database, cluster))
            self._recoverers[key] = replace(self, processes=added, budget=(), is_slow=False)
        return self._recoverers[key]

    @cached_property
    def _recoverers(self) -> dict[tuple[int, int], Scene]:
        return {}

    @cached_property
    def databases(self) -> int:
        """How many."""
        return 1 + max(spec[1] for spec in self.processes)

    def publishes(self, n: int) -> bool:
        """Whether a process publishes lost transactions again."""
        return self.republish and self.processes[n][-1] != "reports"

    @cached_property
    def is_native(self) -> bool:
        """Whether each transaction has an epoch of its own."""
        return self.client == NATIVE

    @cached_property
    def ends_by_epoch(self) -> bool:
        """Whether the broker has EndTxn v5."""
        return self.client != OLD_BROKER

    def id_of(self, database: int, cluster: int, generation: int) -> int:
        """Which Kafka id a generation has: one of its own for each database, or (without ST) one for all."""
        name = database if self.has("ST") else 0
        return (cluster * self.databases + name) * self.generations + generation

    @cached_property
    def generations(self) -> int:
        """How many an id can have, and one more."""
        return 2 * GENERATIONS if self.republish else GENERATIONS


END: Final = P("over")
OLDER: Final = Stored(1, 0, 100)
"""What the row of an older release names as committed."""


def first_state(scene: Scene) -> State:
    """The initial state: nothing has happened, except that a crashed writer or an older release may have left a row."""
    rows = [Row() for _ in range(scene.databases)]
    ids = [Id() for _ in range(scene.databases * scene.clusters * scene.generations)]
    committed: frozenset[int] = frozenset()
    if scene.taken:
        rows[0] = Row(fence=1, generation=1)
        ids[scene.id_of(0, 0, 1)] = Id("E", 0, mark=0)
    if scene.older:
        rows[0] = Row(fence=1, generation=1, stored=OLDER)
        ids[scene.id_of(0, 0, 1)] = Id("O", 0, (OLDER.txn,), 1, 0)
        committed = frozenset({OLDER.txn})
    order = () if scene.is_ordered else None
    return State(tuple(rows), tuple(ids), (P(),) * len(scene.processes), committed, budget=scene.budget, order=order)


def numbered(txn: int) -> str:
    """The transaction's number, in words if it is a copy."""
    return f"{txn % COPY}, copy {txn // COPY}" if txn >= COPY else str(txn)


# --- the decision -------------------------------------------------------------------------------------------------------------


def decided(scene: Scene, row: Row, generation: int, status: str, epoch: int, start: int) -> tuple[str, Stored | None]:
    """What to do with a generation, and on which state."""
    named = {"O": "commit", "C": "committed", "A": "lost"}
    stored = row.stored if row.stored is not None and row.stored.generation == generation else None
    if scene.has("UC"):
        for entry in row.unverified:
            if entry.generation == generation and names(scene, entry, status, epoch, start):
                return named[status], entry
    if stored is not None and names(scene, stored, status, epoch, start):
        return named[status], stored
    if stored is not None and not _has_passed(scene, stored, status, epoch, start):
        return "unverified", stored
    if stored is not None and status == "C":
        return "forgotten", stored
    return "abort" if status == "O" else "nothing", stored


def names(scene: Scene, stored: Stored, status: str, epoch: int, start: int) -> bool:
    """Whether a stored state names the described transaction."""
    if status in ("N", "E"):
        return False
    if scene.is_native:
        return epoch == (stored.epoch if status == "O" else stored.epoch + 1)
    return start == stored.start and (epoch == stored.epoch or (status != "O" and epoch == stored.epoch + 1))


def _has_passed(scene: Scene, stored: Stored, status: str, epoch: int, start: int) -> bool:
    if status in ("N", "E"):
        return False
    return epoch > stored.epoch if scene.is_native else epoch >= stored.epoch and start != stored.start


def to_look_at(scene: Scene, row: Row) -> tuple[int, ...]:
    """The generations in which a transaction may be open or is recorded as UNVERIFIED."""
    again = {entry.generation for entry in row.unverified} if scene.has("UC") else set()
    return tuple(sorted({*range(row.resolved + 1, row.generation + 1), *again}))


def resolved(scene: Scene, row: Row, stored: Stored, found: str) -> Row:
    """The row after a state has been resolved, or recorded as LOST or UNVERIFIED."""
    left = tuple(entry for entry in row.unverified if entry != stored)
    lost, entry = row.lost, Entry(stored, row.cluster)
    if found == "lost" and entry not in lost and (not scene.has("RS") or row.stored == stored or left != row.unverified):
        lost = (*lost, entry)
    if found == "unverified":
        left = (*left, stored)
    return row._replace(stored=None if row.stored == stored else row.stored, unverified=left, lost=lost)


def committed(scene: Scene, s: State, database: int, stored: Stored, entry: Entry | None = None) -> State:
    """The state after a COMMIT that records `stored`; the entry of what it publishes again leaves the row with it."""
    row = s.rows[database]
    if BACK in s.budget:
        before = row._replace(lock=None, pending=None, pending_fence=-1, pending_entry=None)
        s = s._replace(past=(with_row(s, database, before).rows, s.committed))
    row = row._replace(stored=stored, lock=None, pending=None, pending_fence=-1, pending_entry=None)
    if entry is None:
        row = row._replace(number=stored.txn)
    elif scene.has("RA"):
        row = without_entry(row, entry)
    if s.order is not None and entry is None:
        s = s._replace(order=(*s.order, stored.txn))
    return with_row(s, database, row)._replace(committed=s.committed | {stored.txn})


def without_entry(row: Row, entry: Entry) -> Row:
    """The row without an entry."""
    lost = tuple(one for one in row.lost if one != entry)
    return row._replace(lost=lost, unverified=tuple(stored for stored in row.unverified if stored != entry.stored))


# --- changed copies -----------------------------------------------------------------------------------------------------------


def with_row(s: State, database: int, row: Row) -> State:
    """The state with a changed row."""
    return s._replace(rows=(*s.rows[:database], row, *s.rows[database + 1 :]))


def with_id(s: State, i: int, k: Id) -> State:
    """The state with a changed coordinator's entry of an id."""
    return s._replace(ids=(*s.ids[:i], k, *s.ids[i + 1 :]))


def go(s: State, n: int, pc: str, **changes: Any) -> State:
    """The state with a process at another program counter."""
    p = END if pc == "over" else s.processes[n]._replace(pc=pc, **changes)
    return s._replace(processes=(*s.processes[:n], p, *s.processes[n + 1 :]))


def without(s: State, budget: str) -> State:
    """The state with a part of the budget spent."""
    left = list(s.budget)
    left.remove(budget)
    return s._replace(budget=tuple(left))
