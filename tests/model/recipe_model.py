"""An explicit-state model of the recipe for one id, step by step: claim, recovery, take-over, transactions.

It follows `dualwrite.recipe.ownership` (claim, take-over), `dualwrite.recovery.resolve` and `dualwrite.recipe.lane`. Every
function `…_step` gives the next atomic, visible action of a process, or several where it may go one way or another. A pause
needs no action: the process is not chosen for a while. A crashed process is never chosen again.
"""

from __future__ import annotations

from model import recipe_republish
from model.recipe_kafka import Steps, advanced, completed, executed, in_words, requested, timed_out
from model.recipe_state import (
    BACK,
    COPIED,
    COPY,
    END,
    FORGETS,
    RAISES,
    REPEAT,
    SETTING,
    TIMEOUT,
    UNKNOWN,
    Id,
    P,
    Row,
    Scene,
    State,
    Stored,
    committed,
    decided,
    go,
    numbered,
    resolved,
    to_look_at,
    with_row,
    without,
)


def successors(scene: Scene, s: State) -> Steps:
    """Every next state, with the step that leads to it."""
    yield from environment(scene, s)
    for n, (kind, database, cluster, *_) in enumerate(scene.processes):
        p = s.processes[n]
        if p.pc == "over" or (COPIED in s.budget and database == 1):
            continue
        for what, t in process_step(scene, s, n):
            where = f" (database {database}, cluster {cluster})" if scene.databases + scene.clusters > 2 else ""
            yield f"{kind} {n}{where} {what}", t


def environment(scene: Scene, s: State) -> Steps:
    """What happens without any process: timeouts, markers, late requests, late COMMITs."""
    for i, k in enumerate(s.ids):
        if k.status == "O" and TIMEOUT in s.budget:
            yield f"the broker aborts the transaction of id {i} by its timeout", timed_out(scene, without(s, TIMEOUT), i)
        if k.status in ("PC", "PA"):
            yield f"the markers of id {i} are written", completed(s, i)
    if BACK in s.budget and s.past and _may_go_back(s):
        rows, left = s.past
        t = without(s, BACK)._replace(rows=rows, committed=left, gone=s.committed - left, past=())
        yield "the database goes back to before its last commit", t
    yield from recipe_republish.environment(scene, s)
    for number, request in enumerate(s.late):
        t, error, _ = executed(scene, s._replace(late=(*s.late[:number], *s.late[number + 1 :])), request)
        yield f"a late request arrives: {in_words(scene, request)}: {error}", t
    for database, row in enumerate(s.rows):
        if row.pending is not None and row.lock is None and row.fence != row.pending_fence:
            t = with_row(s, database, row._replace(pending=None, pending_fence=-1, pending_entry=None))
            yield f"the late record with COMMIT finds another fencing token in database {database}", t
        elif row.pending is not None and row.lock is None and not recipe_republish.may_record(scene, row, row.pending_entry):
            t = with_row(s, database, row._replace(pending=None, pending_fence=-1, pending_entry=None))
            yield f"the late record with COMMIT finds its entry gone in database {database}", t
        elif row.pending is not None:
            yield (
                f"the late COMMIT succeeds in database {database}",
                committed(scene, s, database, row.pending, row.pending_entry),
            )
            yield (
                f"the late COMMIT is lost in database {database}",
                with_row(s, database, row._replace(lock=None, pending=None, pending_fence=-1, pending_entry=None)),
            )


def _may_go_back(s: State) -> bool:
    """No claim is forgotten, as then two processes may have the same fencing token; and open transactions have ended before."""
    same_fences = [row.fence for row in s.rows] == [row.fence for row in s.past[0]]
    is_between = all(p.pc not in ("produce", "add", "send", "prepare", "record", "commit") for p in s.processes)
    return same_fences and is_between and all(row.pending is None and row.lock is None for row in s.rows)


def process_step(scene: Scene, s: State, n: int) -> Steps:
    """One step of one process."""
    p = s.processes[n]
    row = s.rows[scene.processes[n][1]]
    if p.pc in ("claim", "claim again"):
        yield from claim_step(scene, s, n)
    elif p.pc in ("describe", "reread", "end", "clear", "raise", "resolved"):
        yield from resolve_step(scene, s, n)
    elif p.pc in ("take", "create", "init", "verify"):
        yield from take_step(scene, s, n)
    elif p.pc in recipe_republish.STEPS:
        yield from recipe_republish.republish_step(scene, s, n)
    elif row.lock in (None, n) or p.pc not in ("begin", "record"):
        yield from transaction_step(scene, s, n)


def claim_step(scene: Scene, s: State, n: int) -> Steps:
    """A claim in a transaction of its own: it waits for the row's lock."""
    _, database, cluster, *_ = scene.processes[n]
    p, row = s.processes[n], s.rows[database]
    again = p.pc == "claim again"
    mine = _txn(n, p.number - 1) if again and p.entry is None else -1  # its own transaction, whose outcome it wants to know
    if row.lock is not None and row.pending is None and again:
        return
    if row.lock is not None:
        if row.pending is None:  # its holder may be gone: the database ends that session some time
            free = with_row(s, database, row._replace(lock=None))
            yield f"waits until the session of process {row.lock} is ended", free
        return
    if again and scene.has("F8") and row.fence != p.fence:
        yield f"claims again only if the fencing token is {p.fence}, and it is {row.fence}: in doubt", go(s, n, "over")
        return
    if scene.has("CL") and row.cluster not in (None, cluster):
        yield f"refuses to claim: the row names cluster {row.cluster}", go(s, n, "over")
        return
    number = row.number if again and row.fence == p.fence else -1
    lock = n if "HL" in scene.tried else None
    t = with_row(s, database, row._replace(fence=row.fence + 1, number=number, lock=lock))
    owed = p.owed if again else -1
    if mine >= 0 and number != mine:
        t = t._replace(denied=t.denied | {mine})
    elif mine >= 0 and scene.publishes(n):
        owed = mine
    todo = to_look_at(scene, row)
    known = mine if mine >= 0 and number == mine else p.known if again else -1
    changes = {
        "known": known,
        "fence": row.fence + 1,
        "todo": todo,
        "stored": row.stored,
        "taking": False,
        "entry": None,
        "copy": -1,
    }
    yield f"claims, fencing token {row.fence + 1}", go(t, n, "describe" if todo else "resolved", owed=owed, **changes)


# --- recovery -----------------------------------------------------------------------------------------------------------------


def resolve_step(scene: Scene, s: State, n: int) -> Steps:  # noqa: C901, PLR0912, PLR0915  (a branch for each step)
    """Describe, read again, decide, act, record, fence: one generation after the other."""
    kind, database, cluster, *_ = scene.processes[n]
    p, row = s.processes[n], s.rows[database]
    generation = p.todo[0] if p.todo else 0
    i = scene.id_of(database, cluster, generation)
    if p.pc == "describe":
        k = s.ids[i]
        if k.status == "N" and p.taking:
            yield f"finds generation {generation} unknown", go(s, n, "create" if p.is_new or not scene.has("NG") else "take")
        elif k.status not in ("PC", "PA"):
            found = f"describes generation {generation}: {'unknown' if k.status == 'N' else f'{k.status}{k.epoch}'}"
            yield found, go(s, n, "reread", seen=(k.status, k.epoch, k.start, ""))
    elif p.pc == "reread":
        if scene.has("F1") and row.fence != p.fence:
            yield f"reads again: the fencing token is {row.fence}, not {p.fence}", go(s, n, "over")
            return
        known = row if scene.has("F1") else row._replace(stored=p.stored)
        found, stored = decided(scene, known, generation, *p.seen[:3])
        pc = "end" if found == "commit" or (found == "abort" and (stored is None or not scene.has("SA"))) else "clear"
        if pc == "clear" and (stored is None or not scene.has("F7")):
            pc = "raise"
        read = "reads S again" if scene.has("F1") else "uses S as its claim read it"
        yield f"{read}: {_named(stored)}; decides: {found}", go(s, n, pc, seen=(*p.seen[:3], found), stored=stored)
    elif p.pc == "end":
        yield from _end_step(scene, s, n, i)
    elif p.pc == "clear":
        if row.lock not in (None, n):
            return
        if row.fence != p.fence:
            yield f"may not resolve: the fencing token is {row.fence}, not {p.fence}", go(s, n, "over")
            return
        t = s
        if p.stored is not None:
            t = with_row(s, database, resolved(scene, row, p.stored, p.seen[3]))
            if p.seen[3] == "forgotten":
                t = t._replace(forgotten=t.forgotten | ((t.visible - t.committed) or {-1}))
            if p.seen[3] == "lost":
                t = t._replace(reported=t.reported | {p.stored.txn})
            if p.owed >= 0 and p.stored.txn % COPY == p.owed:
                t = go(t, n, "clear", was_lost=p.seen[3] in ("lost", "unverified"))
            if scene.republish and REPEAT in s.budget:
                yield f"resolves S={_named(p.stored)}: {p.seen[3]}; the answer is lost", without(t, REPEAT)
        by_epoch = "next" if scene.ends_by_epoch else "raise"
        after = {"commit": by_epoch, "abort": "end" if scene.has("SA") else by_epoch}.get(
            p.seen[3], "raise" if scene.has("F7") else "next"
        )
        yield f"resolves S={_named(p.stored)}: {p.seen[3]}", advanced(go(t, n, "clear", stored=None), n, after)
    elif p.pc == "raise":
        after = "next" if scene.has("F7") or p.stored is None else "clear"
        if p.seen[0] == "N":
            yield "has nothing to fence: the id is unknown", advanced(s, n, after)
        elif scene.ends_by_epoch:
            yield from requested(scene, s, n, ("end", i, p.seen[1], (False, True)), after, "describe")
        else:
            yield from requested(scene, s, n, ("init", i, -1, None), after, "describe")
    elif row.fence != p.fence:
        yield f"may not resolve: the fencing token is {row.fence}, not {p.fence}", go(s, n, "over")
    elif row.lock in (None, n):
        t = with_row(s, database, row._replace(resolved=max(row.resolved, row.generation), lock=None))
        takes = kind == "writer" or recipe_republish.publishable(scene, t, n)
        yield "records that everything is resolved", go(t, n, "take" if takes else "over")


def _end_step(scene: Scene, s: State, n: int, i: int) -> Steps:
    """Commit or abort the transaction that was described."""
    p = s.processes[n]
    _, epoch, _, found = p.seen
    if found == "abort" and not scene.ends_by_epoch and scene.has("FA"):
        yield from requested(scene, s, n, ("init", i, -1, None), "describe", "describe")
        return
    after = "clear" if found == "commit" or p.stored is not None else "next" if scene.ends_by_epoch else "raise"
    if scene.has("F3"):
        yield from requested(scene, s, n, ("end", i, epoch, (found == "commit", True)), after, "describe")
        return
    for what, t in requested(scene, s, n, ("end", i, epoch, (found == "commit", True)), after, "refused"):
        if t.processes[n].pc == "refused":  # without F3: lost if it was to be committed, or already aborted
            yield what, advanced(go(t, n, "clear", seen=(*p.seen[:3], "lost" if found == "commit" else found)), n, after)
        else:
            yield what, t


# --- taking over --------------------------------------------------------------------------------------------------------------


def take_step(scene: Scene, s: State, n: int) -> Steps:
    """Take a generation, and the id at Kafka: native by compare-and-set, librdkafka by InitProducerId."""
    kind, database, cluster, *_ = scene.processes[n]
    p, row = s.processes[n], s.rows[database]
    if row.fence != p.fence and p.pc in ("take", "verify"):
        yield f"{p.pc}: the fencing token is {row.fence}, not {p.fence}", go(s, n, "over")
    elif p.pc == "take":
        newest = s.ids[scene.id_of(database, cluster, row.generation)]
        generation = row.generation if _reuses(scene, row, newest) else row.generation + 1
        if row.lock is not None or generation == scene.generations:
            return
        taken = row._replace(generation=generation, resolved=min(row.resolved, generation - 1))
        if scene.has("CL"):
            taken = taken._replace(cluster=cluster)
        is_conditional = scene.is_native and scene.has("F5")
        is_new = is_conditional and generation > row.generation
        changes = {"generation": generation, "is_new": is_new, "todo": (generation,), "taking": True, "repeated": False}
        t = go(with_row(s, database, taken), n, "describe" if is_conditional else "init", **changes)
        yield f"takes generation {generation}", t
    elif p.pc == "create":
        i = scene.id_of(database, cluster, p.generation)
        what = "init" if scene.is_plain else "create"
        yield from requested(scene, go(s, n, "create", is_new=False), n, (what, i, -1, None), "verify", "describe")
    elif p.pc == "init":
        i = scene.id_of(database, cluster, p.generation)
        yield from requested(scene, s, n, ("init", i, -1, None), "verify", "init")
    else:
        pc = "list" if scene.publishes(n) and (kind == "recoverer" or scene.has("RO")) else "begin"
        yield f"continues with epoch {p.epoch}", go(s, n, pc, todo=(), seen=(), stored=None, taking=False)


def _reuses(scene: Scene, row: Row, newest: Id) -> bool:
    """Whether a writer continues with the newest generation."""
    if not row.generation or (not scene.is_native and scene.has("O2")):
        return False
    if newest.status == "N" and scene.is_native and scene.has("F5") and scene.has("NG"):
        return False
    return not (scene.has("UG") and any(entry.generation == row.generation for entry in row.unverified))


# --- transactions -------------------------------------------------------------------------------------------------------------


def transaction_step(scene: Scene, s: State, n: int) -> Steps:  # noqa: C901, PLR0912, PLR0915  (a branch for each step)
    """One transaction after another."""
    _, database, cluster, count, *_ = scene.processes[n]
    p, row = s.processes[n], s.rows[database]
    i = scene.id_of(database, cluster, p.generation)
    txn = _txn(n, p.number)
    if p.pc == "begin":
        if scene.idles and p.number and _is_of(row.stored, n, p) and row.fence == p.fence and row.lock is None:
            yield f"is idle, clears S={_named(row.stored)}", go(with_row(s, database, row._replace(stored=None)), n, "begin")
        if p.number == count:
            is_late = scene.publishes(n) and not scene.has("RO") and p.owed >= 0
            yield ("has no more transactions", go(s, n, "list")) if is_late else ("is done", go(s, n, "over"))
        elif scene.joins:
            yield f"joins a transaction of the user's as transaction {txn}", go(s, n, "record", start=-1)
        elif scene.has("F2") and row.fence != p.fence:
            yield f"begins nothing: the fencing token is {row.fence}, not {p.fence}", go(s, n, "over")
        elif scene.has("DF") and row.fence == p.fence and p.known > row.number:
            found = f"finds transaction {row.number} in the row, and knows that {p.known} was committed: reports that"
            yield found, go(s._replace(forgotten=s.forgotten | {p.known}), n, "begin", known=row.number)
        else:
            yield f"begins transaction {txn}", go(s, n, "produce" if scene.is_native else "add", start=-1)
    elif p.pc == "produce":
        after = "commit" if scene.joins else "record"
        yield from requested(scene, s, n, ("produce", i, p.epoch, txn), after, "over")
    elif p.pc == "add":
        yield from requested(scene, s, n, ("add", i, p.epoch, None), "send", "over")
    elif p.pc == "send":
        yield from requested(scene, s, n, ("send", i, p.epoch, txn), "prepare", "over")
    elif p.pc == "prepare":
        k = s.ids[i]
        is_ours = k.status == "O" and k.epoch == p.epoch
        yield f"prepares: {k.status}{k.epoch}", go(s, n, "record", start=k.start) if is_ours else go(s, n, "over")
    elif p.pc == "record":
        if row.fence != p.fence and (scene.has("F2") or not scene.joins):
            what = f"may not record: the fencing token is {row.fence}, not {p.fence}"
            yield what, go(s, n, "over" if scene.joins else "abort")
        elif scene.is_merged:
            yield from _commit_merged(scene, s, n, database)
            if SETTING in s.budget:
                yield from _commit_after_setting(scene, s, n, database)
        else:
            then = "produce" if scene.joins else "commit"
            yield "records its state", go(with_row(s, database, row._replace(lock=n)), n, then)
        if RAISES in s.budget and scene.joins:
            yield "ends, since its user rolls back", go(without(s, RAISES), n, "begin", number=p.number + 1)
        elif RAISES in s.budget:
            yield "rolls back, since its block raises", go(without(s, RAISES), n, "undo")
    elif p.pc == "commit":
        stored = Stored(p.generation, p.epoch, txn, p.start)
        if row.lock != n:
            yield "can't commit: its session was ended", go(s, n, "abort")
            return
        yield "COMMITS", go(committed(scene, s, database, stored), n, "complete", known=txn)
        if RAISES in s.budget:
            t = with_row(without(s, RAISES), database, row._replace(lock=None))
            yield "is rolled back by its user" if scene.joins else "is rolled back: its COMMIT is refused", go(t, n, "undo")
        if UNKNOWN in s.budget:
            t = with_row(without(s, UNKNOWN), database, row._replace(pending=stored))
            yield "sends COMMIT, the answer is lost", go(t, n, "claim again", number=p.number + 1)
    elif p.pc in ("complete", "undo"):
        yield from _finish_step(scene, s, n, i)
    else:
        yield from requested(scene, s, n, ("end", i, p.epoch, (False, scene.is_native)), "over", "over")


def _commit_merged(scene: Scene, s: State, n: int, database: int) -> Steps:
    """The record sent with the COMMIT, in one message: no lock is held before it is executed."""
    p, row = s.processes[n], s.rows[database]
    stored = Stored(p.generation, p.epoch, _txn(n, p.number), p.start)
    t = go(committed(scene, s, database, stored), n, "complete", known=stored.txn)
    yield "records its state and COMMITS", t
    if UNKNOWN in s.budget:
        late = row._replace(pending=stored, pending_fence=p.fence)
        t = with_row(without(s, UNKNOWN), database, late)
        yield "sends its record with COMMIT, the answer is lost", go(t, n, "claim again", number=p.number + 1)


def _commit_after_setting(scene: Scene, s: State, n: int, database: int) -> Steps:
    """The block has changed the session: without the rule, the name now means the row of the same id in another place."""
    p, t = s.processes[n], without(s, SETTING)
    place = database if scene.has("QN") else (database + 1) % scene.databases
    if t.rows[place].fence != p.fence:
        yield f"changes its session; the record finds no row in database {place}", go(t, n, "abort")
        return
    stored = Stored(p.generation, p.epoch, _txn(n, p.number), p.start)
    what = f"changes its session, records its state in database {place} and COMMITS"
    yield what, go(committed(scene, t, place, stored), n, "complete")


def _finish_step(scene: Scene, s: State, n: int, i: int) -> Steps:
    """The writer's own commit or abort at Kafka, and what follows from its answer."""
    p = s.processes[n]
    is_commit = p.pc == "complete"
    after = "claim again" if p.repeated and not scene.is_native and scene.has("F9") else "begin"
    for what, t in requested(scene, s, n, ("end", i, p.epoch, (is_commit, scene.is_native)), after, "refused"):
        found = t.processes[n]
        if found.pc in ("over", p.pc):  # delayed
            yield what, t
        elif found.pc == "refused" and is_commit and not scene.has("KU"):
            yield f"{what}: reported as lost", go(t._replace(reported=t.reported | {_txn(n, p.number)}), n, "over")
        else:
            pc = "claim again" if found.pc == "refused" else found.pc
            yield what, go(t, n, pc, number=p.number + 1, repeated=False)


def _named(stored: Stored | None) -> str:
    return "none" if stored is None else f"transaction {numbered(stored.txn)}, epoch {stored.epoch}"


def _is_of(stored: Stored | None, n: int, p: P) -> bool:
    """Whether a stored state is that of the process's last transaction."""
    return stored is not None and stored.txn == _txn(n, p.number - 1)


def _txn(n: int, number: int) -> int:
    return 10 * n + number


# --- the promise --------------------------------------------------------------------------------------------------------------


def violated(scene: Scene, s: State) -> str:
    """How a state violates the promise; empty if it does not. Recovery is tried after every state."""
    if found := _broken(scene, s):
        return found
    if s.denied & s.committed:
        return "a writer says that a committed transaction was rolled back"
    rows = tuple(_at_rest(row) for row in s.rows)
    ended = s._replace(rows=rows, processes=(END,) * len(s.processes), budget=())
    found = scene.after_recovery.get(ended)
    if found is None:
        found = scene.after_recovery[ended] = _violated_after_recovery(scene, ended)
    return found


def _at_rest(row: Row) -> Row:
    """The row when all processes are gone: a COMMIT under way is lost, and only they know which fencing token is newer."""
    return row._replace(fence=0, lock=None, pending=None, pending_fence=-1, pending_entry=None)


def _violated_after_recovery(scene: Scene, s: State) -> str:
    """The same once all processes are gone: many states lead to the same one."""
    for _ in range(5):  # late requests arrive after a recovery, and the next one must cope with them
        before, s = s, _recovered(scene, s)
        for request in s.late:
            s = executed(scene, s, request).state
        s = s._replace(rows=tuple(_at_rest(row) for row in s.rows), late=())
        if s == before:
            break
    return _after_recovery(scene, s)


def _broken(scene: Scene, s: State) -> str:  # noqa: PLR0911  (one for each promise)
    if s.forgotten - s.gone:
        return "a transaction is reported as forgotten, and the database has it"
    if any(later > txn and later // 10 == txn // 10 for txn in (s.gone & s.visible) - s.forgotten for later in s.committed):
        return "a writer goes on, and does not report what the database has forgotten"
    if s.visible - s.committed - s.gone:
        return "a message is visible, and its row is not committed"
    if (s.aborted & s.committed) - s.timed_out:
        return "a committed transaction is aborted without a timeout"
    if s.reported & s.visible:
        return "a transaction is reported as lost, and its messages are visible"
    if s.reported - s.timed_out:
        return "a transaction is reported as lost, and no timeout has aborted it"
    return recipe_republish.broken(scene, s)


def _after_recovery(scene: Scene, s: State) -> str:
    if found := _broken(scene, s):
        return f"after recovery {found}"
    listed = {entry.stored.txn % COPY for row in s.rows for entry in row.lost}
    unverified = {entry.txn % COPY for row in s.rows for entry in row.unverified}
    if not scene.older and any(k.status == "O" for k in s.ids):
        return "after recovery a transaction is open"
    if not scene.older and any(k.sent for k in s.ids):
        return "after recovery a message is in the log, and no marker will follow"
    if not scene.older and FORGETS not in scene.budget and unverified:
        return "after recovery a committed transaction can't be verified"
    missing = {txn % COPY for txn in s.committed} - {txn % COPY for txn in s.visible}
    if missing - listed - unverified - s.acknowledged:
        return "after recovery a message is missing, and it is not reported"
    return recipe_republish.left(scene, s)


def _recovered(scene: Scene, s: State) -> State:
    """The state after an undisturbed recovery, on the cluster that each row names, or else on cluster 0."""
    for i in range(len(s.ids)):
        s = completed(s, i)
    for database, row in enumerate(s.rows):
        cluster = row.cluster or 0
        alone = scene.with_recoverer(database, cluster)
        t = s._replace(processes=(*s.processes, P()), budget=())
        n = len(s.processes)
        while t.processes[n].pc != "over":
            _, t = next(process_step(alone, t, n))
        s = t._replace(processes=s.processes, budget=s.budget)
    return s
