"""The search over every interleaving of a scene of job_model, and the promise that it checks."""

from __future__ import annotations

from model.job_model import (
    Steps,
    commit_empty_step,
    commit_step,
    end_step,
    id_step,
    next_step,
    recover_step,
    resolve_step,
    task_step,
)
from model.job_state import END, KAFKA_ABORTS, STAGING_EMPTIED, Scene, State, first_state, with_id
from model.search import Found, explore

_RECHECK_PAUSE = frozenset({"describe", "reread", "clear", "end", "raise", "resolved"})
_ENTRY = {
    "task": task_step,
    "commit": commit_step,
    "commit empty": commit_empty_step,
    "abort": end_step,
    "recover": recover_step,
    "recover id": id_step,
}


def search(scene: Scene, *, seconds: float = 600.0, wanted: str = "") -> Found:
    """Explore the scene for any violation, or for the wanted one."""
    groups = _alike(scene)

    def following(s: State) -> Steps:
        for what, t in successors(scene, s):
            yield what, _merged(t, groups)

    return explore(first_state(scene), following, lambda s: violated(scene, s), seconds=seconds, wanted=wanted)


def violated(scene: Scene, s: State) -> str:  # noqa: PLR0911  (a list)
    """How a state violates the promise; empty if it does not."""
    if s.violation:
        return s.violation
    if max(s.table) > 1:
        return "a row is in the table twice"
    if max(s.topic) > 1:
        return "a message is in the topic twice"
    if min(s.table) != max(s.table):
        return "a part of the batch is in the table"
    if any(there > row for there, row in zip(s.topic, s.table, strict=True)):
        return "a message is in the topic, and its row is not in the table"
    may_be_lost = KAFKA_ABORTS in scene.budget
    if not may_be_lost and any(k.lost for k in s.ids):
        return "a message is reported as lost"
    if scene.strict and _is_given_up(scene, s):
        return "every run was given up, everybody has ended, and a transaction is open"
    return _after_recovery(s, may_be_lost=may_be_lost) if s.swept else ""


def _is_given_up(scene: Scene, s: State) -> bool:
    runs = [{spec[1] for spec in scene.processes if spec[0] == kind} for kind in ("task", "abort")]
    over = all(p == END for p in s.processes) and runs[0] == runs[1] and s.marker is None
    return over and any(k.status == "O" for k in s.ids)


def _after_recovery(s: State, *, may_be_lost: bool) -> str:
    if any(k.status == "O" for k in s.ids):
        return "after manual recovery a transaction is open"
    if s.staged:
        return "after manual recovery rows are staged"
    if s.table != s.topic and not (may_be_lost and any(k.lost for k in s.ids)):
        return "after manual recovery table and topic differ"
    return ""


def successors(scene: Scene, s: State) -> Steps:
    """All next states, each with the step that leads to it."""
    for n, (kind, *facts) in enumerate(scene.processes):
        pc = s.processes[n].pc
        if pc == END.pc:
            continue
        name = f"{kind}{facts[0] if facts else ''}/{n}"
        for what, t in _steps(scene, s, n, kind, pc):
            yield f"{name} {what}", _rested(scene, t, n)
    if not s.swept:
        yield "RECOVERY BY HAND, at once", recovered(scene, s)
    for what in sorted(set(s.budget)):
        rest = list(s.budget)
        rest.remove(what)
        t = s._replace(budget=tuple(rest))
        if what == STAGING_EMPTIED and s.staged:
            yield "the database crashes, and has emptied the staging table", t._replace(staged=())
        for i, k in enumerate(s.ids):
            if what == KAFKA_ABORTS and k.status == "O":
                aborted = with_id(t, i, status="A", epoch=k.epoch + 1, sent=())
                yield f"the broker aborts what is open on id {i}, by its timeout", aborted


def _steps(scene: Scene, s: State, n: int, kind: str, pc: str) -> Steps:
    if pc in _RECHECK_PAUSE:
        return resolve_step(scene, s, n)
    return next_step(scene, s, n) if pc == "next" else _ENTRY[kind](scene, s, n)


def _rested(scene: Scene, s: State, n: int) -> State:
    """After the steps of a process that nobody can see and nothing can change; what nobody will ask for is dropped."""
    kind = scene.processes[n][0]
    while (p := s.processes[n]).pc in ("next", "hold", "resolved"):
        if p.then != "start" if p.pc == "resolved" else p.todo:
            break
        _, s = next(iter(_steps(scene, s, n, kind, p.pc)))
    if p == END:
        tokens = {
            spec[1] for spec, other in zip(scene.processes, s.processes, strict=True) if spec[0] == "commit" and other != END
        }
        ended = (
            END if spec[0] == "task" and q.pc == "ok" and spec[1] not in tokens else q
            for spec, q in zip(scene.processes, s.processes, strict=True)
        )
        s = s._replace(processes=tuple(ended))
    return s


def recovered(scene: Scene, s: State) -> State:
    """The state after a complete `dualwrite recover --prefix`; a run that was not opened before it is not opened after it."""
    known = {s.job[0], *s.job[2]}
    specs = (
        *(
            ("idle",) if p.pc == "open" and spec[1] not in known else spec
            for p, spec in zip(s.processes, scene.processes, strict=True)
        ),
        ("recover",),
    )
    alone = Scene(specs, scene.without, numbers=scene.numbers, rows=scene.rows)
    idle = tuple(END if spec == ("idle",) else p for p, spec in zip(s.processes, specs, strict=False))
    n = len(idle)
    t = s._replace(processes=(*idle, END._replace(pc="close")))
    while t.processes[n] != END:
        _, t = next(iter(_steps(alone, t, n, "recover", t.processes[n].pc)))
    return t._replace(processes=t.processes[:n], swept=True)


def _alike(scene: Scene) -> tuple[tuple[int, ...], ...]:
    """Groups of processes that differ only in their numbers."""
    by_spec: dict[object, list[int]] = {}
    for n, spec in enumerate(scene.processes):
        by_spec.setdefault(spec, []).append(n)
    return tuple(tuple(numbers) for numbers in by_spec.values() if len(numbers) > 1)


def _merged(s: State, groups: tuple[tuple[int, ...], ...]) -> State:
    """One representative of all states that differ only in which of two equal processes does what."""
    if not groups:
        return s
    processes = list(s.processes)
    for numbers in groups:
        for n, p in zip(numbers, sorted(s.processes[n] for n in numbers), strict=True):
            processes[n] = p
    return s._replace(processes=tuple(processes))
