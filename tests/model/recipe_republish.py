"""Publishing lost messages again, as steps of the model: read, begin, send, record, commit; and what is promised about it.

A writer does it after it has taken over its id, and before its next transaction; a recoverer takes over the id for it. What is
published again is a transaction of its own, called a copy here. It has its own name, and is recovered like any other.
"""

from __future__ import annotations

from typing import Final

from model.recipe_kafka import Steps, requested
from model.recipe_state import (
    ACKNOWLEDGE,
    COPIED,
    COPY,
    FORGETS,
    MOVE,
    REPEAT,
    RETENTION,
    UNKNOWN,
    Entry,
    Row,
    Scene,
    State,
    Stored,
    committed,
    go,
    numbered,
    with_id,
    with_row,
    without,
    without_entry,
)

_STEPS: Final = ("produce", "add", "send", "prepare", "record", "end", "abort", "remove")
STEPS: Final = frozenset({"list", "copy", *(f"copy {step}" for step in _STEPS)})


# --- what happens without any process -----------------------------------------------------------------------------------------


def environment(scene: Scene, s: State) -> Steps:
    """What may happen to entries, to the log and to a coordinator's memory at any time, if the budget has it."""
    if ACKNOWLEDGE in s.budget:
        yield from _acknowledged(s)
    if RETENTION in s.budget:
        for one in sorted(one for one in s.log if one[3] in s.aborted):
            t = without(s, RETENTION)._replace(log=s.log - {one})
            yield f"retention removes the messages of transaction {numbered(one[3])}", t
    if FORGETS in s.budget:
        for i, k in enumerate(s.ids):
            if k.status in ("C", "A"):
                yield f"the coordinator forgets id {i}", with_id(without(s, FORGETS), i, k._replace(status="N"))
    row = s.rows[0]
    if MOVE in s.budget and row.lock is None and row.stored is None and 0 < row.generation <= row.resolved:
        moved = row._replace(cluster=1, fence=row.fence + 1)
        yield "an operator moves the id to cluster 1", with_row(without(s, MOVE), 0, moved)
    if COPIED in s.budget and row.lock is None:
        lost = () if scene.has("RD") else row.lost
        cleared = row._replace(fence=row.fence + 1, stored=None, unverified=(), resolved=row.generation, lost=lost)
        yield "database 0 is copied to database 1, which gets a store id of its own", with_row(without(s, COPIED), 1, cleared)


def _acknowledged(s: State) -> Steps:
    """An operator takes an entry out of the row; it is his to publish from then on. This needs no claim."""
    for database, row in enumerate(s.rows):
        for entry in row.lost if row.lock is None else ():
            t = with_row(without(s, ACKNOWLEDGE), database, without_entry(row, entry))
            t = t._replace(acknowledged=t.acknowledged | {entry.stored.txn % COPY})
            yield f"an operator acknowledges transaction {numbered(entry.stored.txn)}", t


# --- the steps of a process ---------------------------------------------------------------------------------------------------


def publishable(scene: Scene, s: State, n: int) -> tuple[tuple[Entry, int], ...]:
    """The entries that the process would publish again, each with the transaction whose messages it reads for it."""
    if not scene.publishes(n):
        return ()
    _, database, cluster, *_ = scene.processes[n]
    row = s.rows[database]
    entries = row.lost if scene.has("RL") else (*row.lost, *(Entry(stored, row.cluster) for stored in row.unverified))
    found = []
    for entry in entries:
        if scene.has("RC") and entry.cluster != cluster:
            continue
        read = _read(s, entry, cluster)
        found += [(entry, read)] if read is not None else []
    if s.order is not None and scene.has("RP"):
        found.sort(key=lambda each: s.order.index(each[0].stored.txn % COPY))
    return tuple(found)


def _read(s: State, entry: Entry, cluster: int) -> int | None:
    """The transaction that the log has at the entry's place; on another cluster a transaction of the same name, if any."""
    name = (cluster, entry.stored.generation, entry.stored.epoch)
    here = sorted(one[3] for one in s.log if one[:3] == name)
    if cluster == entry.cluster:
        return entry.stored.txn if entry.stored.txn in here else None
    return here[0] if here else None


def republish_step(scene: Scene, s: State, n: int) -> Steps:  # noqa: C901, PLR0912  (a branch for each step)
    """One copy after another, then the writer's own transactions; a recoverer resolves its generation."""
    _, database, cluster, *_ = scene.processes[n]
    p, row = s.processes[n], s.rows[database]
    i = scene.id_of(database, cluster, p.generation)
    if p.pc == "list":
        yield from _list_step(scene, s, n)
    elif p.pc == "copy":
        if scene.has("F2") and row.fence != p.fence:
            yield f"begins nothing: the fencing token is {row.fence}, not {p.fence}", go(s, n, "over")
        elif p.entry is not None and not _has(row, p.entry):
            yield f"finds that transaction {numbered(p.entry.stored.txn)} is not in the row any more", go(s, n, "list")
        elif row.lock in (None, n):
            begins = f"begins transaction {numbered(p.copy)}"
            yield begins, go(s, n, "copy produce" if scene.is_native else "copy add", start=-1)
    elif p.pc == "copy produce":
        yield from requested(scene, s, n, ("produce", i, p.epoch, p.copy), "copy record", "over")
    elif p.pc == "copy add":
        yield from requested(scene, s, n, ("add", i, p.epoch, None), "copy send", "over")
    elif p.pc == "copy send":
        yield from requested(scene, s, n, ("send", i, p.epoch, p.copy), "copy prepare", "over")
    elif p.pc == "copy prepare":
        k = s.ids[i]
        is_ours = k.status == "O" and k.epoch == p.epoch
        yield f"prepares: {k.status}{k.epoch}", go(s, n, "copy record", start=k.start) if is_ours else go(s, n, "over")
    elif p.pc == "copy record":
        yield from _record_step(scene, s, n)
    elif p.pc == "copy end":
        yield from _end_step(scene, s, n, i)
    elif p.pc == "copy remove":  # without RA: in a transaction of its own
        if row.fence != p.fence:
            yield f"may not remove: the fencing token is {row.fence}, not {p.fence}", go(s, n, "over")
        elif p.entry is not None and row.lock in (None, n):
            t = _next(with_row(s, database, without_entry(row, p.entry)), n)
            yield f"removes transaction {numbered(p.entry.stored.txn)} from the row", t
    else:
        yield from requested(scene, s, n, ("end", i, p.epoch, (False, scene.is_native)), "list", "over")


def _list_step(scene: Scene, s: State, n: int) -> Steps:
    """Choose the next entry and read its messages; if there is none, the writer begins its transactions."""
    p = s.processes[n]
    row = s.rows[scene.processes[n][1]]
    found = publishable(scene, s, n)
    if row.fence != p.fence:
        yield f"publishes nothing: the fencing token is {row.fence}, not {p.fence}", go(s, n, "over")
    elif found:
        entry, read = found[0]
        copy = read % COPY + COPY * (s.copies + 1)
        t = go(s._replace(copies=s.copies + 1), n, "copy", entry=entry, copy=copy)
        yield f"reads the messages of transaction {numbered(read)} in the log", t
    elif scene.processes[n][0] == "recoverer":
        yield "has nothing to publish", go(s, n, "describe", todo=(p.generation,), entry=None, copy=-1)
    else:
        yield from _verdict(scene, s, n)


def _verdict(scene: Scene, s: State, n: int) -> Steps:
    """The writer tells its caller the outcome of the transaction whose commit came too late, and goes on."""
    p = s.processes[n]
    row = s.rows[scene.processes[n][1]]
    t = go(s, n, "begin", owed=-1, was_lost=False, entry=None, copy=-1)
    if p.owed < 0:
        yield "has nothing to publish", t
        return
    listed = {entry.stored.txn % COPY for entry in row.lost} | {stored.txn % COPY for stored in row.unverified}
    if p.was_lost if scene.has("RW") else p.owed in listed:
        yield f"reports transaction {p.owed} as lost", t._replace(told=t.told | {p.owed})
    else:
        yield f"reports transaction {p.owed} as committed", t._replace(confirmed=t.confirmed | {p.owed})


def _record_step(scene: Scene, s: State, n: int) -> Steps:
    """One database transaction: the fencing token and the entry are still there; the entry goes, S names the copy."""
    _, database, *_ = scene.processes[n]
    p, row = s.processes[n], s.rows[database]
    assert p.entry is not None
    stored = Stored(p.generation, p.epoch, p.copy, p.start)
    if row.lock is not None:
        return
    if row.fence != p.fence:
        pc = "over" if p.repeated and scene.has("RI") else "copy abort"
        yield f"may not record: the fencing token is {row.fence}, not {p.fence}", go(s, n, pc)
    elif scene.has("RI") and row.stored == stored:
        yield "finds that its record is in the row", go(s, n, "copy end", repeated=False)
    elif not may_record(scene, row, p.entry):
        yield (
            f"may not record: transaction {numbered(p.entry.stored.txn)} is not in the row any more",
            go(s, n, "copy abort", repeated=False),
        )
    else:
        recorded = committed(scene, s, database, stored, p.entry)
        yield "records its state, removes the entry, COMMITS", go(recorded, n, "copy end", repeated=False)
        if REPEAT in s.budget:
            sent = "records its state, removes the entry, COMMITS: the answer is lost, and it will be sent again"
            yield sent, go(without(recorded, REPEAT), n, "copy record", repeated=True)
            yield f"{sent}; it was not executed", go(without(s, REPEAT), n, "copy record", repeated=True)
        if UNKNOWN in s.budget:
            lock, fence = (None, p.fence) if scene.is_merged else (n, -1)
            late = row._replace(pending=stored, pending_fence=fence, pending_entry=p.entry, lock=lock)
            t = with_row(without(s, UNKNOWN), database, late)
            yield "sends its record with COMMIT, the answer is lost", go(t, n, "claim again")


def may_record(scene: Scene, row: Row, entry: Entry | None) -> bool:
    """Whether the row still has the entry of what a copy publishes, which its record requires (rule RE)."""
    return entry is None or not scene.has("RE") or _has(row, entry)


def _has(row: Row, entry: Entry) -> bool:
    return entry in row.lost or entry.stored in row.unverified


def _end_step(scene: Scene, s: State, n: int, i: int) -> Steps:
    """Kafka's commit of the copy. Any other answer than NONE: recover first (rule KU)."""
    p = s.processes[n]
    is_writer = scene.processes[n][0] == "writer"
    for what, t in requested(scene, s, n, ("end", i, p.epoch, (True, scene.is_native)), "copied", "refused"):
        pc = t.processes[n].pc
        if pc in ("over", "copy end"):  # delayed
            yield what, t
        elif pc == "refused" and not scene.has("KU"):
            yield f"{what}: reported as lost", go(t._replace(reported=t.reported | {p.copy}), n, "over")
        elif pc == "refused" and is_writer:
            yield what, go(t, n, "claim again", repeated=False)
        elif pc == "refused" or (p.repeated and not scene.is_native and scene.has("F9") and not is_writer):
            yield what, go(t, n, "describe", todo=(p.generation,), entry=None, copy=-1, repeated=False)
        elif p.repeated and not scene.is_native and scene.has("F9"):
            yield what, go(t, n, "claim again", repeated=False, was_lost=p.was_lost and p.owed != p.copy % COPY)
        elif not scene.has("RA"):
            yield what, go(t, n, "copy remove", repeated=False)
        else:
            yield what, _next(go(t, n, "list", repeated=False), n)


def _next(s: State, n: int) -> State:
    """The state after a copy whose commit Kafka has confirmed."""
    p = s.processes[n]
    return go(s, n, "list", was_lost=p.was_lost and p.owed != p.copy % COPY, entry=None, copy=-1)


# --- the promise --------------------------------------------------------------------------------------------------------------


def broken(scene: Scene, s: State) -> str:
    """How a state violates what is promised about lost messages; empty if it does not."""
    messages = {txn % COPY for txn in s.visible}
    if len(messages) < len(s.visible):
        return "a message is visible twice"
    if messages & s.acknowledged:
        return "a message is visible that an operator has acknowledged as lost"
    if any(entry.stored.txn % COPY in messages for row in s.rows for entry in row.lost):
        return "a message is visible, and its transaction is still in the list of lost ones"
    if messages & s.told:
        return "a writer says that a transaction is lost, and its messages are visible"
    coming = {txn % COPY for k in s.ids if k.status == "PC" for txn in k.sent}
    if s.confirmed - messages - coming:
        return "a writer says that a lost transaction is committed"
    return (
        "messages are visible in another order than that of their database transactions" if _is_out_of_order(scene, s) else ""
    )


def _is_out_of_order(scene: Scene, s: State) -> bool:
    """Whether one overtook an earlier one, except that of a writer that had reported the earlier one as lost and went on."""
    places = [(s.order.index(txn % COPY), txn) for txn in s.shown] if s.order is not None else []
    return any(
        later > earlier and (txn >= COPY or scene.publishes(txn // 10))
        for number, (later, txn) in enumerate(places)
        for earlier, _ in places[number + 1 :]
    )


def left(scene: Scene, s: State) -> str:
    """The same after recovery, which has published again what it could."""
    if not scene.republish:
        return ""
    for row in s.rows:
        for entry in row.lost:
            if entry.cluster == row.cluster and _read(s, entry, entry.cluster or 0) is not None:
                return "after recovery a lost transaction was not published again"
    return ""
