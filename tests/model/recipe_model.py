"""An explicit-state model of the recipe, step by step: `src/dualwrite/recipe` and `src/dualwrite/recovery`.

Every function `…_step` gives the next atomic, visible action of a process, or several where it may go one way or another. A
pause is simply not to be chosen; a crash is never to be chosen again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from model.recipe_state import (
    DELAY,
    GENERATIONS,
    TIMEOUT,
    UNKNOWN,
    Id,
    P,
    Scene,
    State,
    Stored,
    decided,
    executed,
    go,
    resolved,
    to_look_at,
    with_id,
    with_row,
    without,
)

Steps = Iterator[tuple[str, State]]


def successors(scene: Scene, s: State) -> Steps:
    """Every next state, with the step that leads to it."""
    yield from environment(s)
    for n, (kind, database, cluster, *_) in enumerate(scene.processes):
        p = s.processes[n]
        if p.pc == "over":
            continue
        for what, t in process_step(scene, s, n):
            yield f"{kind} {n} (database {database}, cluster {cluster}) {what}", t


def environment(s: State) -> Steps:
    """What nobody does."""
    for i, k in enumerate(s.ids):
        if k.status == "O" and TIMEOUT in s.budget:
            t = without(s, TIMEOUT)._replace(timed_out=s.timed_out | set(k.sent), aborted=s.aborted | set(k.sent))
            yield f"the broker aborts the transaction of id {i} by its timeout", with_id(t, i, Id("A", k.epoch + 1))
    for number, request in enumerate(s.late):
        t, proven, _ = executed(s._replace(late=(*s.late[:number], *s.late[number + 1 :])), request)
        yield f"a late request arrives: {request} -> {proven}", t
    for database, row in enumerate(s.rows):
        if row.pending is not None:
            yield f"the late COMMIT works in database {database}", _committed(s, database, row.pending)
            yield (
                f"the late COMMIT is lost in database {database}",
                with_row(s, database, row._replace(lock=None, pending=None)),
            )


def process_step(scene: Scene, s: State, n: int) -> Steps:
    """One step of one process."""
    p = s.processes[n]
    row = s.rows[scene.processes[n][1]]
    if p.pc in ("claim", "claim again"):
        yield from claim_step(scene, s, n)
    elif p.pc in ("describe", "reread", "end", "clear", "raise", "settled"):
        yield from settle_step(scene, s, n)
    elif p.pc in ("take", "adopt", "create", "verify"):
        yield from take_step(scene, s, n)
    elif row.lock in (None, n) or p.pc not in ("begin", "record"):
        yield from transaction_step(scene, s, n)


def claim_step(scene: Scene, s: State, n: int) -> Steps:
    """A claim in a transaction of its own: it waits for the row's lock. Again after an unknown COMMIT (F8)."""
    _, database, cluster, *_ = scene.processes[n]
    p, row = s.processes[n], s.rows[database]
    if row.lock is not None and row.pending is None and p.pc == "claim again":
        return
    if row.lock is not None:
        if row.pending is None:  # whoever holds it may be gone: the database ends the session one day
            free = with_row(s, database, row._replace(lock=None))
            yield f"waits until the session of process {row.lock} is ended", free
        return
    if p.pc == "claim again" and row.fence != p.fence:
        yield f"claims again only with fence {p.fence}, it is {row.fence}: in doubt", go(s, n, "over")
        return
    if scene.has("CL") and row.cluster not in (None, cluster):
        yield f"refuses to claim: the row speaks of cluster {row.cluster}", go(s, n, "over")
        return
    row = row._replace(fence=row.fence + 1)
    t = go(with_row(s, database, row), n, "settled", fence=row.fence, todo=to_look_at(scene, row), stored=row.stored)
    yield f"claims, fence {row.fence}", go(t, n, "describe" if t.processes[n].todo else "settled", taking=False)


# --- recovery/resolve.py ------------------------------------------------------------------------------------------------------


def settle_step(scene: Scene, s: State, n: int) -> Steps:  # noqa: C901, PLR0912  (the steps are what it is about)
    """Describe, read again, decide, act, settle, fence: one generation after the other."""
    kind, database, cluster, *_ = scene.processes[n]
    p, row = s.processes[n], s.rows[database]
    generation = p.todo[0] if p.todo else 0
    i = scene.id_of(database, cluster, generation)
    if p.pc == "describe":
        k = s.ids[i]
        if k.status == "N" and p.taking:
            yield f"finds generation {generation} unknown", go(s, n, "create")
        else:
            yield f"describes generation {generation}: {k.status}{k.epoch}", go(s, n, "reread", seen=(k.status, k.epoch, ""))
    elif p.pc == "reread":
        if scene.has("F1") and row.fence != p.fence:
            yield f"reads again: fence {row.fence} is not its {p.fence}", go(s, n, "over")
            return
        known = row if scene.has("F1") else row._replace(stored=p.stored)
        found, stored = decided(scene, known, generation, *p.seen[:2])
        pc = "end" if found == "commit" or (found == "abort" and stored is None) else "clear"
        if pc == "clear" and (stored is None or not scene.has("F7")):
            pc = "raise"
        yield f"reads S={row.stored} again, decides: {found}", go(s, n, pc, seen=(*p.seen[:2], found), stored=stored)
    elif p.pc == "end":
        commit = p.seen[2] == "commit"
        yield from requested(s, n, ("end", i, p.seen[1], commit), "clear" if commit else "next", "describe")
    elif p.pc == "clear":
        if row.lock is not None:
            return
        if row.fence != p.fence:
            yield f"may not settle: fence {row.fence} is not its {p.fence}", go(s, n, "over")
            return
        t = s
        if p.stored is not None:
            t = with_row(s, database, resolved(row, p.stored, p.seen[2]))
            if p.seen[2] == "lost":
                t = t._replace(reported=t.reported | {p.stored.txn})
        after = {"commit": "next", "abort": "end"}.get(p.seen[2], "raise" if scene.has("F7") else "next")
        yield f"settles {p.stored}: {p.seen[2]}", advanced(go(t, n, "clear", stored=None), n, after)
    elif p.pc == "raise":
        after = "next" if scene.has("F7") or p.stored is None else "clear"
        if p.seen[0] == "N":
            yield "raises nothing: the id is unknown", advanced(s, n, after)
        else:
            yield from requested(s, n, ("end", i, p.seen[1], False), after, "describe")
    elif row.fence != p.fence:
        yield f"may not settle: fence {row.fence} is not its {p.fence}", go(s, n, "over")
    elif row.lock is None:
        t = with_row(s, database, row._replace(settled=max(row.settled, row.generation)))
        yield "notes that all is settled", go(t, n, "take" if kind == "writer" else "over")


def advanced(s: State, n: int, after: str, epoch: int = -1) -> State:
    """To another step of settling, or to what follows once a generation is done."""
    p = s.processes[n]
    if after != "next":
        return go(s, n, after, epoch=epoch)
    if p.taking:
        return go(s, n, "verify", epoch=epoch)
    return go(s, n, "describe" if p.todo[1:] else "settled", todo=p.todo[1:], stored=None)


def requested(s: State, n: int, request: tuple[Any, ...], proven: str, refused: str) -> Steps:
    """A request is answered; or it is delayed, and its sender dies."""
    t, is_proven, epoch = executed(s, request)
    what = f"{request} -> {'NONE' if is_proven else 'another answer'}"
    before = s.processes[n].epoch
    yield what, advanced(t, n, proven, epoch if is_proven else before) if is_proven else advanced(t, n, refused, before)
    if DELAY in s.budget:
        t = without(s, DELAY)
        yield f"{request} is delayed, and its sender dies", go(t._replace(late=tuple(sorted((*t.late, request)))), n, "over")


# --- recipe/ownership.py ------------------------------------------------------------------------------------------------------


def take_step(scene: Scene, s: State, n: int) -> Steps:
    """Take a generation, and take it over at Kafka by compare-and-set."""
    _, database, cluster, *_ = scene.processes[n]
    p, row = s.processes[n], s.rows[database]
    if row.fence != p.fence and p.pc in ("take", "verify"):
        yield f"{p.pc}: fence {row.fence} is not its {p.fence}", go(s, n, "over")
    elif p.pc == "take":
        if row.lock is not None:
            return
        is_barred = scene.has("UG") and any(entry.generation == row.generation for entry in row.unverified)
        generation = row.generation if row.generation and not is_barred else row.generation + 1
        if generation == GENERATIONS:
            return
        taken = row._replace(generation=generation, settled=min(row.settled, generation - 1))
        if scene.has("CL"):
            taken = taken._replace(cluster=cluster)
        t = go(with_row(s, database, taken), n, "describe", generation=generation, todo=(generation,), taking=True)
        yield f"takes generation {generation}", t
    elif p.pc == "create":
        yield from requested(s, n, ("create", scene.id_of(database, cluster, p.generation), -1, None), "verify", "describe")
    else:
        yield f"goes on with epoch {p.epoch}", go(s, n, "begin", todo=(), seen=(), stored=None, taking=False)


# --- lane.py ------------------------------------------------------------------------------------------------------------------


def transaction_step(scene: Scene, s: State, n: int) -> Steps:  # noqa: C901, PLR0912  (the steps are what it is about)
    """One transaction after another."""
    _, database, cluster, count = scene.processes[n]
    p, row = s.processes[n], s.rows[database]
    i = scene.id_of(database, cluster, p.generation)
    txn = 10 * n + p.number
    if p.pc == "begin":
        if p.number == count:
            yield "is done", go(s, n, "over")
        elif scene.has("F2") and row.fence != p.fence:
            yield f"begins nothing: fence {row.fence} is not its {p.fence}", go(s, n, "over")
        else:
            yield f"begins transaction {txn}", go(s, n, "produce")
    elif p.pc == "produce":
        yield from requested(s, n, ("produce", i, p.epoch, txn), "record", "over")
    elif p.pc == "record":
        if row.fence != p.fence:
            yield f"may not record: fence {row.fence} is not its {p.fence}", go(s, n, "abort")
        else:
            yield "records its state", go(with_row(s, database, row._replace(lock=n)), n, "commit")
    elif p.pc == "commit":
        stored = Stored(p.generation, p.epoch, txn)
        if row.lock != n:
            yield "can't commit: its session was ended", go(s, n, "abort")
            return
        yield "COMMITS", go(_committed(s, database, stored), n, "complete")
        if UNKNOWN in s.budget:
            t = with_row(without(s, UNKNOWN), database, row._replace(pending=stored))
            yield "sends COMMIT, the answer is lost", go(t, n, "claim again", number=p.number + 1)
    elif p.pc == "complete":
        for what, t in requested(s, n, ("end", i, p.epoch, True), "begin", "claim again"):
            yield what, t if t.processes[n].pc == "over" else go(t, n, t.processes[n].pc, number=p.number + 1)
    else:
        yield from requested(s, n, ("end", i, p.epoch, False), "over", "over")


def _committed(s: State, database: int, stored: Stored) -> State:
    row = s.rows[database]._replace(stored=stored, lock=None, pending=None)
    return with_row(s, database, row)._replace(committed=s.committed | {stored.txn})


# --- the promise --------------------------------------------------------------------------------------------------------------


def violated(scene: Scene, s: State) -> str:
    """The promise, in one state; empty where it is kept. Recovery is tried after every state."""
    if s.visible - s.committed:
        return "a message is visible, its row is not committed"
    if (s.aborted & s.committed) - s.timed_out:
        return "a committed transaction is aborted without a timeout"
    ended = s
    for database, row in enumerate(s.rows):
        ended = with_row(ended, database, row._replace(lock=None, pending=None))  # of what was in COMMIT, nothing stays
    for _ in "again":
        ended = _recovered(scene, ended)
        for request in ended.late:
            ended, _, _ = executed(ended, request)
        ended = ended._replace(late=())
    return _after_recovery(scene, ended)


def _after_recovery(scene: Scene, s: State) -> str:
    if s.visible - s.committed:
        return "after recovery a message is visible, its row is not committed"
    if (s.aborted & s.committed) - s.timed_out:
        return "after recovery a committed transaction is aborted without a timeout"
    unverified = {entry.txn for row in s.rows for entry in row.unverified}
    if not scene.older and any(k.status == "O" for k in s.ids):
        return "after recovery a transaction is open"
    if not scene.older and unverified:
        return "after recovery a committed transaction can't be verified"
    missing = s.committed - s.visible
    if missing - s.reported - unverified:
        return "after recovery a message is missing, and nobody is told"
    return ""


def _recovered(scene: Scene, s: State) -> State:
    """A recovery that nobody disturbs, on the cluster that each row speaks of, or else on the usual one."""
    for database, row in enumerate(s.rows):
        cluster = row.cluster or 0
        alone = replace(scene, processes=(*scene.processes, ("recoverer", database, cluster)), budget=())
        t = s._replace(processes=(*s.processes, P()), budget=())
        n = len(s.processes)
        while t.processes[n].pc != "over":
            _, t = next(process_step(alone, t, n))
        s = t._replace(processes=s.processes, budget=s.budget)
    return s
