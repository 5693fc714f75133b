"""The parts of the job protocol's model: its rules by name, the state, and the changes that Kafka and the database make.

There is one batch with numbered rows; each row is also a message. Everything is a tuple, so that states can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

RULES: Final = {
    "claim-open": "a task claims its id only while its run is open",
    "claim-locked": "the run can't be closed between that check and the claim",
    "close-fences": "closing a run raises the fencing tokens of its attempts",
    "record-fence": "the decision records a task's state only if the row still has the task's fencing token",
    "decide-open": "the decision requires that the run is the open one",
    "marker-inside": "the decision looks for the batch's marker inside its own transaction",
    "stage-fence": "a task checks the fencing token last, right before it commits its staged rows",
    "move-fence": "staged rows are selected by id and fencing token, not by id alone",
    "move-count": "the number of moved rows must equal the number of staged rows",
    "token-once": "a run can be opened only once with its token",
    "own-id": "an attempt does not claim an id that another attempt of the same run holds",
    "start-fence": "a task checks its fencing token again after it has taken over the id at Kafka",
    "cleanup-fence": "cleanup claims an id only if its fencing token has not changed since cleanup read it",
    "rows-decide": "when a run is given up, the row of each id decides how its transaction ends",
    "see-resolved": "if another process has claimed a committed task's id, commit() waits until that process has resolved it",
    "see-stored": "commit() also waits if the winners are attempts of an earlier run",
    "see-lost": "commit() reports lost messages of the batch, whichever process has found the loss",
    "note-given-up": "a run that is given up before any task has opened it can no longer be opened",
    "cleanup-older": "cleanup does not touch what a newer run has claimed",
}
MISCOUNTED: Final = "the rows are not as many as were staged"
TAKEN: Final = "an attempt of the open run loses its id to another process"
KAFKA_ABORTS: Final = "broker's timeout"
STAGING_EMPTIED: Final = "staging emptied"


class Id(NamedTuple):
    """A transactional id: its row in the database (and its row in kafka_job_attempt), and its state at the coordinator."""

    fence: int = 0  # 0: no row
    stored: int | None = None  # S, an epoch: with native producers it names the transaction
    resolved: bool = True
    lost: bool = False
    token: int = 0
    status: str = "N"  # N unknown, E empty, O ongoing, C complete commit, A complete abort
    epoch: int = -1
    sent: tuple[int, ...] = ()


class P(NamedTuple):
    """A process: its program counter and local variables."""

    pc: str
    id: int = -1
    fence: int = 0
    epoch: int = -1
    seen: tuple[Any, ...] = ()  # the description; later also the decision
    then: str = ""  # the step after resolving
    todo: tuple[tuple[int, int], ...] = ()  # ids with fencing tokens
    kept: tuple[Any, ...] = ()  # a driver's winners, or what a cleanup will delete
    runs: tuple[int, ...] = ()  # runs that a cleanup knows to be over, or that an abort gives up
    is_lost: bool = False  # whether it will report a loss


class State(NamedTuple):
    """The state of the whole system."""

    job: tuple[int, bool, tuple[int, ...]]  # token, whether it is open, earlier tokens
    marker: tuple[int, tuple[int, ...]] | None  # token, ids of the winners
    ids: tuple[Id, ...]
    staged: tuple[tuple[int, int, int], ...]  # id, fencing token, row
    table: tuple[int, ...]  # how many times each row is there
    topic: tuple[int, ...]
    processes: tuple[P, ...]
    swept: bool = False  # whether the final manual recovery has run
    budget: tuple[str, ...] = ()  # what the environment may still do
    violation: str = ""


@dataclass(frozen=True)
class Scene:
    """The processes of a search.

    A process is ("task", token, partition, rows), ("commit", token, partitions), ("commit empty", token, 0), ("abort", token),
    ("recover",), or ("recover id",). ("abort", 0) knows no outcome and aborts the newest run; here it does so even if its tasks
    are working.
    """

    processes: tuple[tuple[Any, ...], ...]
    without: frozenset[str] = frozenset()
    budget: tuple[str, ...] = ()
    strict: bool = False
    rows: int = 2
    numbers: int = 2  # attempts per partition

    def has(self, rule: str) -> bool:
        """Whether the rule is enabled."""
        return rule not in self.without


END: Final = P("over")
_FIRST: Final = {
    "task": "open",
    "commit": "wait",
    "commit empty": "open",
    "abort": "give up",
    "recover": "close",
    "recover id": "claim",
}


def first_state(scene: Scene) -> State:
    """The initial state."""
    partitions = 1 + max((spec[2] for spec in scene.processes if spec[0] == "task"), default=0)
    none = (0,) * scene.rows
    processes = tuple(P(_FIRST[spec[0]]) for spec in scene.processes)
    return State((0, False, ()), None, (Id(),) * (partitions * scene.numbers), (), none, none, processes, budget=scene.budget)


# --- Kafka: native producers, EndTxn v5 -------------------------------------------------------------------------------------


def end_txn(s: State, i: int, epoch: int, *, commit: bool) -> tuple[State, bool, int]:
    """EndTxn v5, a compare-and-set on the epoch: the new state, whether it answers NONE, and the epoch in the answer."""
    k = s.ids[i]
    if k.status == "N":
        return s, False, -1
    retried = epoch == k.epoch - 1 and k.status in "CA"
    if retried:
        return s, commit == (k.status == "C"), k.epoch
    if epoch != k.epoch or (commit and k.status != "O"):
        return s, False, -1
    return _ended(s, i, commit=commit), True, k.epoch + 1


def _ended(s: State, i: int, *, commit: bool) -> State:
    k = s.ids[i]
    if commit:
        s = s._replace(topic=tuple(n + k.sent.count(row) for row, n in enumerate(s.topic)))
    return with_id(s, i, status="C" if commit else "A", epoch=k.epoch + 1, sent=())


def decision(stored: int | None, status: str, epoch: int) -> str:
    """decision.py's table."""
    if stored is not None and status != "E" and epoch == (stored if status == "O" else stored + 1):
        return {"O": "commit", "C": "committed", "A": "lost"}.get(status, "lost")
    if stored is not None and (status in "NE" or epoch <= stored):
        return "lost"  # unverified, which is reported like lost
    return "abort" if status == "O" else "nothing"


# --- changed copies -----------------------------------------------------------------------------------------------------------


def with_id(s: State, i: int, **changes: Any) -> State:
    """The state with a changed row or coordinator's entry of an id."""
    return s._replace(ids=(*s.ids[:i], s.ids[i]._replace(**changes), *s.ids[i + 1 :]))


def go(s: State, n: int, pc: str = "", /, **changes: Any) -> State:
    """The state with a process at another program counter."""
    if pc:
        changes["pc"] = pc
    p = END if pc == "over" else s.processes[n]._replace(**changes)
    return s._replace(processes=(*s.processes[:n], p, *s.processes[n + 1 :]))


def is_whole(s: State) -> bool:
    """Whether the batch is complete in the table and the topic: every row, or none if it was committed without rows."""
    expected = 0 if s.marker is not None and not s.marker[1] else 1
    return all(n == expected for n in (*s.table, *s.topic))


def closed(scene: Scene, s: State, keep: tuple[int, ...] = ()) -> State:
    """The state after ending the open run."""
    token, is_open, earlier = s.job
    if is_open and scene.has("close-fences"):
        raised = (k._replace(fence=k.fence + 1) if k.token == token and i not in keep else k for i, k in enumerate(s.ids))
        s = s._replace(ids=tuple(raised))
    return s._replace(job=(token, False, earlier))


def given_up(scene: Scene, s: State, token: int) -> State:
    """The state after giving up a run: it is ended, or can no longer be opened."""
    if s.job[:2] == (token, True):
        return closed(scene, s)
    if token not in (0, s.job[0], *s.job[2]) and s.marker is None and scene.has("note-given-up"):
        return s._replace(job=(*s.job[:2], tuple(sorted((*s.job[2], token)))))
    return s


def deleted(s: State, up_to: tuple[tuple[int, int], ...]) -> State:
    """The state without the rows staged under these ids with fencing tokens up to these."""
    limit = dict(up_to)
    return s._replace(staged=tuple(row for row in s.staged if row[1] > limit.get(row[0], -1)))
