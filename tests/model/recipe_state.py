"""What the model of the recipe is made of: its rules by name, the state, Kafka's answers, the decision table.

One logical id. Several databases may use it, and there may be several Kafka clusters, whose producer ids are the same numbers:
a transaction is named by its epoch (and start time) alone, which is the worst case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

RULES: Final = {
    "F1": "describe first, then read the row again, provided that the fencing token is unchanged",
    "F2": "check the fencing token when a transaction begins",
    "F3": "after any answer to EndTxn other than NONE, describe and decide again",
    "F5": "native: take over by compare-and-set, never by an unconditional InitProducerId",
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
}
TRIED: Final = {
    "HL": "hold the row's lock from the claim to the end of recovery",
    "CU": "clear the state of an idle writer before it has read that Kafka has committed",
}
"""Changes of the recipe that were tried, and are not part of it."""

NATIVE: Final = "native"
LIBRDKAFKA: Final = "librdkafka"
OLD_BROKER: Final = "librdkafka on a broker without EndTxn v5"

CONCURRENT: Final = "CONCURRENT_TRANSACTIONS"
GENERATIONS: Final = 5
DELAY: Final = "a request is delayed in the network, and its sender dies"
REPEAT: Final = "a request is delayed in the network, and its sender sends it again"
UNKNOWN: Final = "the answer to a COMMIT is lost"
TIMEOUT: Final = "the broker's timeout"
RAISES: Final = "the user's block raises"
SETTING: Final = "the user's block changes which table an unqualified name means"


class Answer(NamedTuple):
    """Kafka's answer to a request.

    Args:
        state: The state with the request's effect.
        error: NONE, CONCURRENT_TRANSACTIONS (send it again), or "another error".
        epoch: The epoch in the answer; -1 unless the error is NONE.
    """

    state: State
    error: str = "another error"
    epoch: int = -1


class Stored(NamedTuple):
    """The state S, or an UNVERIFIED entry."""

    generation: int
    epoch: int
    txn: int
    start: int = -1  # librdkafka keeps one epoch over many transactions: the start time distinguishes them


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
    number: int = -1  # the newest claim's last committed transaction


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
    epoch: int = -1
    number: int = 0  # of its transactions
    start: int = -1  # of the transaction that it has prepared (librdkafka)
    repeated: bool = False  # its EndTxn was sent twice
    answer: tuple[Any, ...] = ()  # to the commit that it has requested, not read yet: error, epoch


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


@dataclass(frozen=True)
class Scene:
    """Who takes part: ("writer", database, cluster, transactions) or ("recoverer", database, cluster).

    Args:
        processes: The processes. Unless a database's row says otherwise, its id is on cluster 0.
        without: Rules that are removed.
        budget: What the environment may do, each once.
        older: Database 0 has a row that an older release wrote, without a cluster, and the transaction it names is ongoing.
        taken: A writer had taken generation 1 of the id in database 0, and crashed before it used it.
        clusters: How many.
        client: NATIVE, LIBRDKAFKA or OLD_BROKER.
        is_slow: Markers are written some time after EndTxn was answered: PrepareCommit and PrepareAbort can be seen.
        tried: Changes that are tried, see TRIED.
        is_merged: The record is sent with the COMMIT (PostgreSQL under two-phase commit), so that no lock is held in between.
        idles: Between two transactions a writer may clear the state of the one whose commit it knows (`recipe.idle`).
        requests: A writer only requests Kafka's commit, and reads the answer before its next transaction
            (`acknowledge="decided"`).
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
    requests: bool = False

    def has(self, rule: str) -> bool:
        """Whether the rule is kept."""
        assert rule in RULES
        return rule not in self.without

    @property
    def databases(self) -> int:
        """How many."""
        return 1 + max(spec[1] for spec in self.processes)

    @property
    def is_native(self) -> bool:
        """Whether each transaction has an epoch of its own."""
        return self.client == NATIVE

    @property
    def ends_by_epoch(self) -> bool:
        """Whether the broker has EndTxn v5."""
        return self.client != OLD_BROKER

    def id_of(self, database: int, cluster: int, generation: int) -> int:
        """Which Kafka id a generation has: one of its own for each database, or (without ST) one for all."""
        name = database if self.has("ST") else 0
        return (cluster * self.databases + name) * GENERATIONS + generation


END: Final = P("over")
OLDER: Final = Stored(1, 0, 100)
"""What the row of an older release names as committed."""


def first_state(scene: Scene) -> State:
    """The initial state: nothing has happened, except that a crashed writer or an older release may have left a row."""
    rows = [Row() for _ in range(scene.databases)]
    ids = [Id() for _ in range(scene.databases * scene.clusters * GENERATIONS)]
    committed: frozenset[int] = frozenset()
    if scene.taken:
        rows[0] = Row(fence=1, generation=1)
    if scene.older:
        rows[0] = Row(fence=1, generation=1, stored=OLDER)
        ids[scene.id_of(0, 0, 1)] = Id("O", 0, (OLDER.txn,), 1, 0)
        committed = frozenset({OLDER.txn})
    return State(tuple(rows), tuple(ids), (P(),) * len(scene.processes), committed, budget=scene.budget)


# --- Kafka --------------------------------------------------------------------------------------------------------------------


def executed(scene: Scene, s: State, request: tuple[Any, ...]) -> Answer:
    """The effect of a request, and its answer."""
    what, i, epoch, argument = request
    k = s.ids[i]
    if what == "end" and scene.ends_by_epoch and argument[1]:
        return _ended_by_epoch(scene, s, i, epoch, commit=argument[0])
    if what == "end":
        return _ended_plainly(scene, s, i, epoch, commit=argument[0])
    if what == "create":
        return Answer(with_id(s, i, Id("E", 0, mark=0)), "NONE", 0) if k.status == "N" else Answer(s)
    if what == "init":
        return _initialised(scene, s, i)
    return _received(scene, s, i, what, epoch, argument)


def in_words(scene: Scene, request: tuple[Any, ...]) -> str:
    """The request as Kafka's protocol names it."""
    what, i, epoch, argument = request
    if what == "end":
        outcome, by_epoch = "commit" if argument[0] else "abort", argument[1] and scene.ends_by_epoch
        return f"EndTxn {'v5' if by_epoch else 'v4'}({outcome}, epoch {epoch}) of id {i}"
    name = {"create": "create-only InitProducerId", "init": "InitProducerId", "add": "AddPartitionsToTxn"}.get(what, "Produce")
    if what in ("create", "init"):
        return f"{name} of id {i}"
    return f"{name}(epoch {epoch}{'' if argument is None else f', transaction {argument}'}) of id {i}"


def _ended_by_epoch(scene: Scene, s: State, i: int, epoch: int, *, commit: bool) -> Answer:
    """EndTxn v5: it raises the epoch, and repeating it changes nothing."""
    k = s.ids[i]
    if k.status == "N":
        return Answer(s)
    is_repeated = k.epoch == epoch + 1
    if k.status in ("PC", "PA"):
        return Answer(s, CONCURRENT) if is_repeated and commit == (k.status == "PC") else Answer(s)
    if is_repeated and k.status in ("C", "A"):
        return Answer(s, "NONE", k.epoch) if commit == (k.status == "C") else Answer(s)
    if epoch != k.epoch or (commit and k.status != "O"):
        return Answer(s)
    start = k.start if k.status == "O" else k.start + 1
    return Answer(_ending(scene, s, i, k._replace(epoch=k.epoch + 1, start=start), commit=commit), "NONE", k.epoch + 1)


def _ended_plainly(scene: Scene, s: State, i: int, epoch: int, *, commit: bool) -> Answer:
    """EndTxn v4: the epoch stays, and its holders may go on."""
    k = s.ids[i]
    if k.status == "N" or epoch != k.epoch:
        return Answer(s)
    if k.status == "O":
        return Answer(_ending(scene, s, i, k, commit=commit), "NONE", epoch)
    if k.status in ("PC", "PA"):
        return Answer(s, CONCURRENT) if commit == (k.status == "PC") else Answer(s)
    is_repeated = k.status == ("C" if commit else "A")
    return Answer(s, "NONE", epoch) if is_repeated else Answer(s)


def _initialised(scene: Scene, s: State, i: int) -> Answer:
    """InitProducerId: aborts what is ongoing, and raises the epoch."""
    k = s.ids[i]
    if k.status in ("PC", "PA"):
        return Answer(s, CONCURRENT)
    if k.status == "O":
        return Answer(_ending(scene, s, i, k._replace(epoch=k.epoch + 1), commit=False), CONCURRENT)
    return Answer(with_id(s, i, k._replace(status="E", epoch=k.epoch + 1)), "NONE", k.epoch + 1)


def _received(scene: Scene, s: State, i: int, what: str, epoch: int, txn: int) -> Answer:
    """A message ("produce": the native producer's, which adds its partition), or librdkafka's "add" and "send"."""
    k = s.ids[i]
    if what == "send":  # to the partition's leader, which asks the coordinator only from EndTxn v5 on (KIP-890)
        is_refused = epoch < k.mark or (scene.ends_by_epoch and (k.status != "O" or epoch != k.epoch))
        return Answer(s) if is_refused else Answer(with_id(s, i, k._replace(sent=(*k.sent, txn), mark=epoch)), "NONE", epoch)
    if k.status == "N" or k.epoch != epoch:
        return Answer(s)
    if k.status in ("PC", "PA"):
        return Answer(s, CONCURRENT)
    if k.status != "O":
        k = k._replace(status="O", start=k.start + 1)
    if what == "produce":
        k = k._replace(sent=(*k.sent, txn), mark=epoch)
    return Answer(with_id(s, i, k), "NONE", epoch)


def _ending(scene: Scene, s: State, i: int, k: Id, *, commit: bool) -> State:
    s = with_id(s, i, k._replace(status="PC" if commit else "PA"))
    return s if scene.is_slow else completed(s, i)


def completed(s: State, i: int) -> State:
    """The state after the markers of an id's ending transaction have been written."""
    k = s.ids[i]
    if k.status not in ("PC", "PA"):
        return s
    ended = frozenset(k.sent)
    s = s._replace(visible=s.visible | ended) if k.status == "PC" else s._replace(aborted=s.aborted | ended)
    return with_id(s, i, k._replace(status=k.status[1], sent=(), mark=max(k.mark, k.epoch)))


def timed_out(scene: Scene, s: State, i: int) -> State:
    """The state after an id's ongoing transaction has been aborted by its timeout."""
    k = s.ids[i]
    s = s._replace(timed_out=s.timed_out | set(k.sent))
    return _ending(scene, s, i, k._replace(epoch=k.epoch + 1), commit=False)


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


def resolved(row: Row, stored: Stored, found: str) -> Row:
    """The row after a state has been resolved, or recorded as UNVERIFIED."""
    left = tuple(entry for entry in row.unverified if entry != stored)
    if found == "unverified":
        left = (*left, stored)
    return row._replace(stored=None if row.stored == stored else row.stored, unverified=left)


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
