"""An explicit-state model of the job protocol: "many tasks, one commit", as src/dualwrite/jobs implements it.

Each function `…_step` yields the next atomic, visible action of a process, or several if there is a choice. A process that is
never chosen for a while is paused; one that is never chosen again has crashed.
"""

from __future__ import annotations

from collections.abc import Iterator

from model.job_state import (
    END,
    MISCOUNTED,
    TAKEN,
    Scene,
    State,
    closed,
    decision,
    deleted,
    end_txn,
    given_up,
    go,
    is_whole,
    with_id,
)

Steps = Iterator[tuple[str, State]]

# --- recovery/resolve.py: the id and the fencing token are in the process -----------------------------------------------------


def resolve_step(scene: Scene, s: State, n: int) -> Steps:  # noqa: C901, PLR0912  (one branch for each step)
    """Describe, read again, decide, act, record, fence; then continue at `then`."""
    p = s.processes[n]
    k = s.ids[p.id]
    held = k.fence == p.fence
    if p.pc == "describe":
        if k.status == "N" and p.then == "start":
            yield f"finds id {p.id} unknown", go(s, n, "create")
        else:
            yield f"describes id {p.id}: {k.status}{k.epoch}", go(s, n, "reread", seen=(k.status, k.epoch))
    elif p.pc in ("reread", "clear", "resolved") and not held:
        yield f"{p.pc}: the fencing token is {k.fence}, not {p.fence}", fenced(s, n)
    elif p.pc == "reread":
        status, epoch = p.seen
        naive = scene.processes[n][0] == "abort" and not scene.has("rows-decide")
        stored = None if naive else k.stored
        found = decision(stored, status, epoch)
        seen = (status, epoch, found)
        pc = "end" if found == "commit" or (found == "abort" and stored is None) else "clear"
        if pc == "clear" and stored is None:
            pc = "resolved" if status == "N" else "raise"
        yield f"reads S={k.stored} again, decides: {found}", go(s, n, pc, seen=seen)
    elif p.pc == "end":
        commit = p.seen[2] == "commit"
        t, proven, epoch = end_txn(s, p.id, p.seen[1], commit=commit)
        what = f"EndTxn({'commit' if commit else 'abort'}, id {p.id}, epoch {p.seen[1]}) -> {proven}"
        if not proven:
            yield what, go(t, n, "describe")
        else:
            yield what, go(t, n, "clear" if commit else "resolved", epoch=epoch)
    elif p.pc == "clear":
        lost = p.seen[2] == "lost"
        pc = {"abort": "end", "commit": "resolved"}.get(p.seen[2], "resolved" if p.seen[0] == "N" else "raise")
        t = with_id(s, p.id, stored=None, lost=k.lost or lost)
        yield f"clears S of id {p.id} ({p.seen[2]})", go(t, n, pc, is_lost=p.is_lost or lost)
    elif p.pc == "raise":
        t, proven, epoch = end_txn(s, p.id, p.seen[1], commit=False)
        yield (
            f"raises the epoch of id {p.id} from {p.seen[1]} -> {proven}",
            go(t, n, "resolved" if proven else "describe", epoch=epoch),
        )
    elif p.then == "start":
        yield f"adopts epoch {p.epoch} of id {p.id}", go(s, n, "check", seen=())
    else:
        pc = "next" if p.then == "next and see" else p.then
        yield f"records that id {p.id} is resolved", go(with_id(s, p.id, resolved=True), n, pc, seen=(), epoch=-1)


def fenced(s: State, n: int) -> State:
    """The state after another process has claimed this process's id."""
    match s.processes[n].then:
        case "take" | "start":
            return go(s, n, "over")
        case "hold":
            return go(s, n, "see", seen=(), epoch=-1)
        case then:
            return go(s, n, "see rest" if then == "next and see" else "next", seen=(), epoch=-1)


# --- task.py and ledger.py ----------------------------------------------------------------------------------------------------


def task_step(scene: Scene, s: State, n: int) -> Steps:  # noqa: C901, PLR0912  (as above)
    """One attempt of one task."""
    p = s.processes[n]
    _, token, _, rows = scene.processes[n]
    if p.pc == "open":
        yield from _open_step(scene, s, n, token)
    elif p.pc == "cleanup":
        yield "lists what other runs have left", _listed(scene, s, n, token, "next")
    elif p.pc == "swept":
        yield "deletes what other runs have staged", go(deleted(s, p.kept), n, "claim", kept=())
    elif p.pc == "claim":
        if scene.has("claim-open") and s.job[:2] != (token, True):
            yield "may not claim: its run is not open", go(s, n, "over")
        elif scene.has("claim-locked"):
            yield from _claim(scene, s, n)
        else:
            yield "sees that its run is open", go(s, n, "claim late")
    elif p.pc == "claim late":
        yield from _claim(scene, s, n)
    k = s.ids[p.id]
    held = k.fence == p.fence
    if p.pc in ("take", "check") and not held:
        if scene.has("start-fence") or p.pc == "take":
            yield f"{p.pc}: the fencing token is {k.fence}, not {p.fence}", go(s, n, "over")
        else:
            yield "does not check its fencing token again", go(s, n, "write")
    elif p.pc == "take":
        yield f"takes a generation of id {p.id}", go(with_id(s, p.id, resolved=False), n, "describe", then="start")
    elif p.pc == "create":
        if k.status == "N":
            yield f"creates id {p.id} at Kafka", go(with_id(s, p.id, status="E", epoch=0), n, "check", epoch=0)
        else:
            yield "creates nothing: Kafka knows the id", go(s, n, "take")
    elif p.pc == "check":
        yield "checks its fencing token again", go(s, n, "write")
    if p.pc in ("write", "staged"):
        yield _produced(s, n, rows, "ok" if p.pc == "staged" else "sent")
    if p.pc in ("write", "sent"):
        if held or not scene.has("stage-fence"):
            staged = tuple(sorted((*s.staged, *((p.id, p.fence, row) for row in rows))))
            t = go(s._replace(staged=staged), n, "ok" if p.pc == "sent" else "staged")
            yield f"commits its staged rows (id {p.id}, fencing token {p.fence})", t
        else:
            yield f"may not stage: the fencing token is {k.fence}, not {p.fence}", go(s, n, "ab" if p.pc == "sent" else "over")
    if p.pc == "ab":
        yield f"aborts its own epoch {p.epoch}", go(end_txn(s, p.id, p.epoch, commit=False)[0], n, "over")


def _open_step(scene: Scene, s: State, n: int, token: int) -> Steps:
    current, is_open, earlier = s.job
    if s.marker is not None:
        yield "finds the batch committed", go(s, n, "ok")
    elif current == token and is_open:
        yield "joins its run", go(s, n, "claim")
    elif scene.has("token-once") and (current == token or token in earlier):
        yield "may not open: its run is over", go(s, n, "over")
    else:
        t = closed(scene, s)._replace(job=(token, True, tuple(sorted({*earlier, current} - {0, token}))))
        yield f"OPENS run {token}", go(t, n, "cleanup" if current else "claim", runs=t.job[2] if current else ())


def _claim(scene: Scene, s: State, n: int) -> Steps:
    _, token, partition, _ = scene.processes[n]
    ids = range(partition * scene.numbers, (partition + 1) * scene.numbers)
    free = [i for i in ids if s.ids[i].token != token or not scene.has("own-id")]
    if not free:
        yield "finds no id", go(s, n, "over")
        return
    k = s.ids[free[0]]
    if scene.strict and k.token == token:
        s = s._replace(violation=TAKEN)
    t = with_id(s, free[0], fence=k.fence + 1, token=token)
    pc = "take" if k.resolved else "describe"
    yield f"claims id {free[0]}, fencing token {k.fence + 1}", go(t, n, pc, id=free[0], fence=k.fence + 1, then="take", runs=())


def _produced(s: State, n: int, rows: tuple[int, ...], pc: str) -> tuple[str, State]:
    p = s.processes[n]
    k = s.ids[p.id]
    if k.status == "N" or k.epoch != p.epoch:
        return f"is refused by Kafka: epoch {p.epoch}", go(s, n, "over")
    if k.status == "O":  # it produces only once, so another process has begun this transaction
        return "shares an epoch", s._replace(violation="two processes write under one epoch")
    return f"sends under epoch {p.epoch} of id {p.id}", go(with_id(s, p.id, status="O", sent=rows), n, pc)


# --- jobs/job_recovery.py: ids one by one, in any order -----------------------------------------------------------------------


def _listed(scene: Scene, s: State, n: int, token: int, pc: str) -> State:
    """The process with a list of every attempt of the prefix that does not belong to this run."""
    left = [(i, k) for i, k in enumerate(s.ids) if k.token not in (0, token)]
    if scene.has("cleanup-older"):
        left = [(i, k) for i, k in left if k.token in s.processes[n].runs]
    todo = tuple((i, k.fence) for i, k in left if not k.resolved)
    return go(s, n, pc, todo=todo, kept=tuple((i, k.fence) for i, k in left), runs=())


def next_step(scene: Scene, s: State, n: int) -> Steps:
    """resolve_ids: claim the next id with the fencing token that was read, and resolve it."""
    p = s.processes[n]
    kind = scene.processes[n][0]
    if not p.todo:
        after = {"task": "swept", "recover": "swept", "commit": "clean", "abort": "clean", "recover id": "over"}
        pc = after.get(kind) or ("clean" if p.then == "next and see" else "swept")  # "commit empty" does both
        yield "has resolved them", go(s, n, pc, id=-1, fence=0, then="")
    for each in p.todo:
        i, fence = each
        k = s.ids[i]
        t = go(s, n, todo=tuple(other for other in p.todo if other != each))
        if k.fence == fence or not scene.has("cleanup-fence"):
            if scene.strict and s.job[:2] == (k.token, True):
                t = t._replace(violation=TAKEN)
            t = go(with_id(t, i, fence=k.fence + 1), n, "describe", id=i, fence=k.fence + 1, then="next")
            if p.then == "next and see":
                t = go(t, n, then="next and see")
            yield f"claims id {i} to resolve it, fencing token {k.fence + 1}", t
        elif p.then == "next and see":
            yield f"finds id {i} claimed by another", go(t, n, "see rest", id=i)
        else:
            yield f"leaves id {i} to the process that claimed it", t


# --- jobs/decision.py and jobs/driver.py --------------------------------------------------------------------------------------


def commit_step(scene: Scene, s: State, n: int) -> Steps:  # noqa: C901  (as above)
    """The driver's commit() of a run."""
    p = s.processes[n]
    _, token, partitions = scene.processes[n]
    if p.pc == "wait":
        for winners in _outcomes(scene, s, token, partitions):
            found = None if scene.has("marker-inside") else s.marker
            pc = "commit" if winners else "give up"
            yield f"has the outcomes of ids {[w[0] for w in winners]}", go(s, n, pc, kept=winners, seen=(found,))
    elif p.pc == "commit":
        yield from _decide_step(scene, s, n, token)
    elif p.pc == "hold":
        if not p.todo:
            yield "has completed them", go(s, n, "rest", id=-1, fence=0, epoch=-1, then="")
        for each in p.todo:
            i, fence = each
            k = s.ids[i]
            t = go(s, n, todo=tuple(other for other in p.todo if other != each), id=i, fence=fence, then="hold")
            if k.fence != fence:
                yield f"finds id {i} claimed by another", fenced(t, n)
            elif k.resolved:
                yield f"finds id {i} resolved", t
            else:
                yield f"completes id {i} with fencing token {fence}", go(t, n, "describe")
    elif p.pc in ("see", "see rest"):
        waits = s.ids[p.id].stored is not None and scene.has("see-resolved")
        if not waits:
            yield f"sees that id {p.id} is resolved", go(s, n, "hold" if p.pc == "see" else "next")
    else:
        yield from end_step(scene, s, n)


def commit_empty_step(scene: Scene, s: State, n: int) -> Steps:
    """The driver's commit() of a run whose tasks have no rows: it opens the run like a task, then decides."""
    p = s.processes[n]
    _, token, _ = scene.processes[n]
    if p.pc == "open":
        for what, t in _open_step(scene, s, n, token):
            yield what, t if t.processes[n].pc in ("cleanup", END.pc) else go(t, n, "commit", seen=(s.marker,))
    elif p.pc == "cleanup":
        yield "lists what other runs have left", _listed(scene, s, n, token, "next")
    elif p.pc == "swept":
        yield "deletes what other runs have staged", go(deleted(s, p.kept), n, "commit", kept=(), seen=(s.marker,))
    else:
        yield from commit_step(scene, s, n)


def _outcomes(scene: Scene, s: State, token: int, partitions: int) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """One outcome for each partition; a task that found the batch committed has no id."""
    choices: list[tuple[tuple[int, int, int], ...]] = [()]
    for partition in range(partitions):
        told = [
            ((p.id, p.fence, p.epoch),) if p.id >= 0 else ()
            for p, spec in zip(s.processes, scene.processes, strict=True)
            if p.pc == "ok" and spec[:3] == ("task", token, partition)
        ]
        choices = [(*before, *one) for before in choices for one in told]
    yield from sorted(set(choices))


def _decide_step(scene: Scene, s: State, n: int, token: int) -> Steps:
    p = s.processes[n]
    found = s.marker if scene.has("marker-inside") else p.seen[0]
    claims = tuple((i, fence) for i, fence, _ in p.kept)
    if found is not None:
        t = closed(scene, s) if s.job[:2] == (token, True) else s
        if found[0] == token:
            yield "finds its own marker", go(t, n, "hold", todo=claims, kept=(), seen=())
        else:
            yield f"finds that run {found[0]} was committed", go(t, n, "rest", kept=(), seen=())
        return
    refused = ""
    if scene.has("decide-open") and s.job[:2] != (token, True):
        refused = "its run is not open"
    if scene.has("record-fence") and any(s.ids[i].fence != fence for i, fence in claims):
        refused = refused or "a task was fenced"
    keys = {i for i, _ in claims}
    moved = [row[2] for row in s.staged if (row[:2] in claims if scene.has("move-fence") else row[0] in keys)]
    if scene.has("move-count") and len(moved) != sum(len(_rows_of(scene, s, i, f)) for i, f in claims):
        refused = refused or MISCOUNTED
    if refused:
        lie = "commit() says that nothing was committed, and this run was" if s.marker and s.marker[0] == token else ""
        if scene.strict and refused == MISCOUNTED:
            lie = "an open run is refused for rows of an earlier one"
        yield f"commits nothing: {refused}", go(s, n, "over")._replace(violation=lie)
        return
    t = s._replace(table=tuple(count + moved.count(row) for row, count in enumerate(s.table)))
    for i, _, epoch in p.kept:
        t = with_id(t, i, stored=epoch)
    t = closed(scene, t, keep=tuple(sorted(keys)))._replace(marker=(token, tuple(sorted(keys))))
    yield "COMMITS the batch", go(t, n, "hold", todo=claims, kept=(), seen=())
    yield "COMMITS the batch, the answer is lost", t


def _rows_of(scene: Scene, s: State, i: int, fence: int) -> tuple[int, ...]:
    """The rows of a task, according to its outcome."""
    for p, spec in zip(s.processes, scene.processes, strict=True):
        if spec[0] == "task" and (p.id, p.fence) == (i, fence):
            return tuple(spec[3])
    return ()


def end_step(scene: Scene, s: State, n: int) -> Steps:
    """What commit() and abort() do after the decision, and the first step of abort()."""
    p = s.processes[n]
    kind, token = scene.processes[n][:2]
    token = token or (p.runs or s.job)[0]
    if p.pc == "give up":
        blind = scene.processes[n][1] == 0
        t = given_up(scene, s, token)
        if blind:
            t = go(t, n, runs=(token,))
        if blind or kind == "abort" or s.marker is not None:
            yield f"gives run {token} up", go(t, n, "rest", kept=())
        else:
            yield f"gives run {token} up, nothing to write", go(t, n, "over")
    elif p.pc == "rest":
        winners = s.marker[1] if s.marker is not None else ()
        listed = [(i, k) for i, k in enumerate(s.ids) if k.token == token or i in winners]
        then = "next and see" if kind.startswith("commit") and scene.has("see-stored") else ""
        todo = tuple((i, k.fence) for i, k in listed if not k.resolved)
        yield "lists what its run has left", go(s, n, "next", todo=todo, then=then)
    elif p.pc == "clean":
        t = go(deleted(s, tuple((i, k.fence) for i, k in enumerate(s.ids) if k.token == token)), n, "over")
        is_lost = p.is_lost or (scene.has("see-lost") and s.marker is not None and any(s.ids[i].lost for i in s.marker[1]))
        returns = kind.startswith("commit") and not is_lost
        if returns and not is_whole(s):
            t = t._replace(violation="commit() returns, and the batch is not in both")
        yield "deletes what its run has staged" + (", RETURNS" if returns else ""), t


def recover_step(scene: Scene, s: State, n: int) -> Steps:
    """Manual recovery: `dualwrite recover --prefix`."""
    p = s.processes[n]
    if p.pc == "close":
        t = closed(scene, s)
        yield f"closes run {s.job[0]}", go(t, n, "cleanup", runs=(*s.job[2], s.job[0]))
    elif p.pc == "cleanup":
        yield "lists every attempt", _listed(scene, s, n, 0, "next")
    elif p.pc == "swept":
        yield "deletes what they have staged", go(deleted(s, p.kept), n, "over")


def id_step(_: Scene, s: State, n: int) -> Steps:
    """A Recoverer for one id, which does not know about jobs."""
    for i, k in enumerate(s.ids):
        if k.fence:
            yield (
                f"claims id {i}, fencing token {k.fence + 1}",
                go(with_id(s, i, fence=k.fence + 1), n, "describe", id=i, fence=k.fence + 1, then="next"),
            )
