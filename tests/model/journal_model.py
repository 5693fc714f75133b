"""The model of the journal: units that are written while Kafka is down, and the gate that keeps the order by cause.

It follows `dualwrite.recipe.journaling`, `SqlStoreTransaction` and `relay.journal_drain`. What a transaction does by itself is
in the model of the recipe; here it is a few steps, and what it leaves in Kafka's log is one entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

from model.search import Found, explore

RULES: Final = {
    "all-through-journal": "while the gate is open, every unit of the prefix goes through the journal",
    "check-again": "the record of a direct unit checks that the gate is as the unit has read it before its first message",
    "epoch": "the gate counts its openings, and the record compares the number",
    "share-lock": "a unit that writes into the journal locks the gate, shared, until its COMMIT, and finds it open",
    "empty-under-lock": "whether the journal is empty is read under the exclusive lock that closing takes",
    "confirmed": "the gate closes only when Kafka has confirmed the last drained transaction",
    "close-fenced": "closing checks the drainer's fencing token in the same transaction",
    "drain-fenced": "draining checks the drainer's fencing token in the transaction that deletes the entries",
    "republish-first": "a drained transaction that Kafka has lost is published again before the next entries and the closing",
    "CL-id": "an id of the prefix is opened only on the cluster that the rows of the other ids name (rule CL)",
    "CL-drain": "the journal is drained only on that cluster (rule CL)",
    "recover-first": "an id that was claimed without asking Kafka is recovered there before a unit of it sends to Kafka",
    "all-read-gate": "beside pools that write into the journal always, every pool of the prefix reads the gate",
}

DOWN: Final = "down"
CRASH: Final = "crash"
LOSE: Final = "lose"
KILL: Final = "kill"
WRONG: Final = "wrong"
CLOSE: Final = "close"

OVERTAKEN: Final = "a unit's message comes before that of a unit whose data it has seen"
DOUBLED: Final = "a message was published twice"
MISSING: Final = "a committed message is never published"
STUCK: Final = "the gate stays open"

OPEN: Final = "open"
COMMITTED: Final = "committed"
READ_COMMITTED: Final = "READ COMMITTED"
SNAPSHOT: Final = "REPEATABLE READ or SERIALIZABLE"


@dataclass(frozen=True)
class Scene:
    """Who writes.

    Args:
        units: The isolation level of each unit.
        budget: What may happen, each entry once: the brokers go down, the drainer dies or is paused, Kafka aborts a drained
            transaction, a writer dies between its two commits, somebody drains with the address of another cluster, the gate
            is closed although a pool that writes into the journal always is running (its lease has ended).
        one_id: Whether the units are those of one id: each begins after the one before, or once that one's writer is dead. The
            next writer of the id does not need Kafka to start.
        elsewhere: The units of writers with another cluster's address, on ids of their own. Consumers are on the right one.
        always: The units of pools that write into the journal always (`acknowledge="journaled"`): they have no id, and open the
            gate whenever they find it closed, also while Kafka answers.
        channel: Whether a unit may learn of another one by another way than its database transaction.
        without: Rules that are removed.
    """

    units: tuple[str, ...]
    budget: tuple[str, ...] = ()
    one_id: bool = False
    elsewhere: frozenset[int] = frozenset()
    always: frozenset[int] = frozenset()
    channel: bool = False
    without: frozenset[str] = frozenset()


class Gate(NamedTuple):
    """The gate's row."""

    is_open: bool = False
    epoch: int = 0


_ALWAYS: Final = Gate(is_open=True, epoch=-1)
"""What a unit assumes that writes into the journal always: it has not read the gate."""

_IGNORED: Final = frozenset({"all-through-journal", "all-read-gate"})
"""Without these rules, a unit goes to Kafka, as long as it answers, whatever the gate is."""


class Unit(NamedTuple):
    """A unit.

    Args:
        step: "new", "begun", "recorded", "decided" or "done"; "refused": it has never begun.
        gate: As read by BEGIN.
        seen: The units whose data it has seen; None: it has not read yet.
        causes: Those that it had seen when it sent its message, or wrote it into the journal.
        has_sent: Whether its message is in Kafka's log.
        snapshot: The committed units when it began.
        is_locking: Whether it locks the gate, shared.
        is_dead: Whether its writer has died once the database had decided; recovery commits it at Kafka.
    """

    step: str = "new"
    gate: Gate = Gate()
    seen: frozenset[int] | None = None
    causes: frozenset[int] = frozenset()
    has_sent: bool = False
    snapshot: frozenset[int] = frozenset()
    is_locking: bool = False
    is_dead: bool = False

    @property
    def is_direct(self) -> bool:
        return not self.gate.is_open


class Drainer(NamedTuple):
    """One process that drains.

    Args:
        step: "idle", "selected", "sent", "decided" (at the database, not yet at Kafka) or "closing".
        fence: Its fencing token.
        rows: What it drains.
        is_elsewhere: Whether it publishes on another cluster, whose log is not in the model.
    """

    step: str
    fence: int
    rows: tuple[int, ...] = ()
    is_elsewhere: bool = False


class State(NamedTuple):
    """Both sides, the units, the drainers, and what may still happen.

    Args:
        log: Kafka's log without aborted entries: the unit, and who has written it, a drainer's fence or 0; and its status.
        lost: Entries that were drained by a transaction which Kafka has aborted.
        ids: The units in the order of the ids of their entries, which are taken when they are written, not when they commit.
    """

    is_up: bool
    gate: Gate
    journal: tuple[int, ...]
    log: tuple[tuple[int, int, str], ...]
    units: tuple[Unit, ...]
    drainers: tuple[Drainer, ...]
    fence: int
    lost: tuple[int, ...]
    ids: tuple[int, ...]
    budget: tuple[str, ...]


Next = Iterator[tuple[str, State]]


def search(scene: Scene, *, wanted: str = "") -> Found:
    """Explore every interleaving of a scene."""
    first = State(True, Gate(), (), (), (Unit(),) * len(scene.units), (Drainer("idle", 1),), 1, (), (), scene.budget)
    return explore(first, partial(successors, scene), partial(violated, scene), wanted=wanted)


def violated(scene: Scene, s: State) -> str:
    """What is broken in a state."""
    visible = [unit for unit, _, status in s.log if status == COMMITTED]
    if len(set(visible)) < len(visible):
        return DOUBLED
    for place, unit in enumerate(visible):
        if not s.units[unit].causes.isdisjoint(visible[place + 1 :]):
            return OVERTAKEN
    if all(unit.step in ("done", "refused") for unit in s.units) and next(successors(scene, s), None) is None:
        if len(visible) < sum(unit.step == "done" for unit in s.units):
            return MISSING
        return STUCK if s.gate.is_open else ""
    return ""


def successors(scene: Scene, s: State) -> Next:
    """Every next state."""
    if not s.is_up:
        yield "Kafka is up again", s._replace(is_up=True)
    elif DOWN in s.budget:
        yield "Kafka goes down", _spent(s._replace(is_up=False), DOWN)
    for number, unit in enumerate(s.units):
        for what, t in _unit(scene, s, number, unit):
            yield f"unit {number} {what}", t
    for number, drainer in enumerate(s.drainers):
        for what, t in _drainer(scene, s, number, drainer):
            yield f"drainer {drainer.fence} {what}", t
    if CRASH in s.budget:
        yield "another process takes over draining", _spent(_taken_over(s, keeps=False), CRASH)
        yield "another process takes over draining, while the drainer is only paused", _spent(_taken_over(s, keeps=True), CRASH)
    if WRONG in s.budget and "CL-drain" in scene.without:
        t = _spent(_taken_over(s, keeps=True, is_elsewhere=True), WRONG)
        yield "a process with another cluster's address takes over draining", t


# --- units ----------------------------------------------------------------------------------------------------------------


def _unit(scene: Scene, s: State, number: int, unit: Unit) -> Next:
    match unit.step:
        case "new" if scene.one_id and number and not _has_ended(s.units[number - 1]):
            return
        case "new" if number in scene.elsewhere and "CL-id" not in scene.without:
            yield "is refused: it has another cluster's address", _with(s, number, Unit("refused"))
        case "new":
            yield "begins", _with(s, number, Unit("begun", _gate_of(scene, s, number), snapshot=_committed(s)))
        case "begun":
            yield from _working(scene, s, number, unit)
        case "recorded":
            if unit.is_direct:
                yield "commits in the database", _with(s, number, unit._replace(step="decided"))
            else:
                t = _with(s, number, unit._replace(step="done", is_locking=False))
                yield "commits in the database", t._replace(journal=tuple(sorted((*s.journal, number), key=s.ids.index)))
        case "decided":  # by the writer, or by recovery
            if s.is_up or number in scene.elsewhere:
                log = tuple((one, by, COMMITTED if (one, by) == (number, 0) else status) for one, by, status in s.log)
                yield "commits at Kafka", _with(s, number, unit._replace(step="done"))._replace(log=log)
            if KILL in s.budget and scene.one_id:
                yield "loses its writer", _spent(_with(s, number, unit._replace(is_dead=True)), KILL)
        case _:
            return


def _gate_of(scene: Scene, s: State, number: int) -> Gate:
    """The gate that a unit has when it begins."""
    if number in scene.always:
        return _ALWAYS
    is_ignored = not scene.without.isdisjoint(_IGNORED) and s.is_up
    return Gate(False, s.gate.epoch) if is_ignored else s.gate


def _working(scene: Scene, s: State, number: int, unit: Unit) -> Next:
    """Read and send in either order; then record. What fails is undone and runs again."""
    if unit.seen is None:
        sees_newest = scene.units[number] == READ_COMMITTED or scene.channel
        yield "reads", _with(s, number, unit._replace(seen=(_committed(s) if sees_newest else unit.snapshot) - {number}))
    if unit.is_direct and not unit.has_sent:
        yield from _sending(scene, s, number, unit)
    if unit.seen is None or (unit.is_direct and not unit.has_sent):
        return
    if unit.is_direct:
        sees_newest = scene.units[number] == READ_COMMITTED
        if _is_as_read(scene, s, unit) or not sees_newest or "check-again" in scene.without:
            yield "records", _with(s, number, unit._replace(step="recorded"))
        else:
            yield "finds another gate", _undone(s, number)
    elif "share-lock" in scene.without:
        yield "writes into the journal", _written(s, number, unit._replace(causes=unit.seen))
    elif s.gate.is_open:
        yield "writes into the journal", _written(s, number, unit._replace(causes=unit.seen, is_locking=True))
    elif number in scene.always:
        yield "finds the gate closed, and opens it", _undone(s, number)._replace(gate=Gate(True, s.gate.epoch + 1))
    else:
        yield "finds the gate closed", _undone(s, number)


def _sending(scene: Scene, s: State, number: int, unit: Unit) -> Next:
    sent = unit._replace(has_sent=True, causes=unit.seen or frozenset())
    if number in scene.elsewhere:
        yield "sends, on another cluster", _with(s, number, sent)
    elif not s.is_up:
        opened = s.gate if s.gate.is_open else Gate(True, s.gate.epoch + 1)
        yield "can't send; the gate is open now", _undone(s, number)._replace(gate=opened)
    elif not (scene.one_id and number and s.units[number - 1].step == "decided"):
        yield "sends", _with(s, number, sent)._replace(log=(*s.log, (number, 0, OPEN)))
    elif "recover-first" in scene.without:
        t = _aborted(s, number - 1)
        yield "sends, which ends what its id had open", _with(t, number, sent)._replace(log=(*t.log, (number, 0, OPEN)))


def _written(s: State, number: int, unit: Unit) -> State:
    return _with(s, number, unit._replace(step="recorded"))._replace(ids=(*s.ids, number))


def _is_as_read(scene: Scene, s: State, unit: Unit) -> bool:
    if not scene.without.isdisjoint(_IGNORED):
        return True
    if "epoch" in scene.without:
        return s.gate.is_open == unit.gate.is_open
    return s.gate == unit.gate


def _undone(s: State, number: int) -> State:
    log = tuple(entry for entry in s.log if entry[:2] != (number, 0))
    return _with(s, number, Unit())._replace(log=log)


def _has_ended(unit: Unit) -> bool:
    return unit.step == "done" or unit.is_dead


def _aborted(s: State, number: int) -> State:
    log = tuple(entry for entry in s.log if entry[:2] != (number, 0))
    return _with(s, number, s.units[number]._replace(step="done"))._replace(log=log)


def _committed(s: State) -> frozenset[int]:
    return frozenset(number for number, unit in enumerate(s.units) if unit.step in ("decided", "done"))


# --- draining -------------------------------------------------------------------------------------------------------------


def _drainer(scene: Scene, s: State, number: int, drainer: Drainer) -> Next:
    match drainer.step:
        case "idle":
            yield from _idle(scene, s, number, drainer)
        case "selected":
            if drainer.fence == s.fence and (s.is_up or drainer.is_elsewhere):  # Kafka refuses a fenced producer
                where = ", on another cluster" if drainer.is_elsewhere else ""
                yield f"sends{where}", _sent(s, number, drainer, drainer.rows)
            else:
                yield "gives up", _with_drainer(s, number, _idle_again(drainer))
        case "sent":
            yield from _deciding(scene, s, number, drainer)
        case "decided":
            yield from _finishing(scene, s, number, drainer)
        case "closing":
            yield from _closing(scene, s, number, drainer)
        case _:
            return


def _idle(scene: Scene, s: State, number: int, drainer: Drainer) -> Next:
    if s.lost and drainer.fence == s.fence and s.is_up:
        yield "publishes again", _sent(s, number, drainer, s.lost)
    if s.lost and "republish-first" not in scene.without:
        return
    if s.journal:
        yield "selects", _with_drainer(s, number, drainer._replace(step="selected", rows=s.journal[:1]))
    elif s.gate.is_open and s.is_up:  # Kafka has just answered; otherwise the gate would soon be opened again
        if "empty-under-lock" in scene.without:
            yield "finds the journal empty", _with_drainer(s, number, drainer._replace(step="closing"))
        else:
            yield from _closing(scene, s, number, drainer)


def _sent(s: State, number: int, drainer: Drainer, rows: tuple[int, ...]) -> State:
    log = s.log if drainer.is_elsewhere else (*s.log, *((row, drainer.fence, OPEN) for row in rows))
    return _with_drainer(s, number, drainer._replace(step="sent", rows=rows))._replace(log=log)


def _deciding(scene: Scene, s: State, number: int, drainer: Drainer) -> Next:
    """COMMIT in the database: the entries are deleted, or those of a lost transaction are not lost any more."""
    if drainer.fence != s.fence and "drain-fenced" not in scene.without:
        yield "is fenced", _with_drainer(s, number, _idle_again(drainer))
        return
    journal, lost = (tuple(row for row in rows if row not in drainer.rows) for rows in (s.journal, s.lost))
    t = _with_drainer(s, number, drainer._replace(step="decided"))
    yield "commits in the database", t._replace(journal=journal, lost=lost)


def _finishing(scene: Scene, s: State, number: int, drainer: Drainer) -> Next:
    idle = _with_drainer(s, number, _idle_again(drainer))
    if s.is_up or drainer.is_elsewhere:
        yield "commits at Kafka", idle._replace(log=_ended(s, drainer.fence, commits=True))
    if LOSE in s.budget:
        t = idle._replace(log=_ended(s, drainer.fence, commits=False), lost=drainer.rows)
        yield "loses its transaction, which Kafka has aborted", _spent(t, LOSE)
    if "confirmed" in scene.without and not s.journal and s.gate.is_open and not _is_locked(s):
        yield "closes the gate before Kafka's commit", s._replace(gate=s.gate._replace(is_open=False))


def _closing(scene: Scene, s: State, number: int, drainer: Drainer) -> Next:
    is_kept = any(s.units[number].step != "done" for number in scene.always)
    if _is_locked(s) or (is_kept and CLOSE not in s.budget):
        return
    s = _spent(s, CLOSE) if is_kept else s
    idle = _with_drainer(s, number, drainer._replace(step="idle"))
    is_current = drainer.fence == s.fence or "close-fenced" in scene.without
    is_empty = not s.journal or "empty-under-lock" in scene.without
    if is_current and is_empty and s.gate.is_open:
        yield "closes the gate", idle._replace(gate=s.gate._replace(is_open=False))
    elif drainer.step == "closing":
        yield "does not close the gate", idle


def _is_locked(s: State) -> bool:
    return any(unit.is_locking for unit in s.units)


def _idle_again(drainer: Drainer) -> Drainer:
    return drainer._replace(step="idle", rows=())


def _taken_over(s: State, *, keeps: bool, is_elsewhere: bool = False) -> State:
    """A claim, and then recovery: what the database has decided is committed at Kafka later, the rest is aborted."""
    fence = s.fence + 1
    current = next(drainer for drainer in s.drainers if drainer.fence == s.fence)
    old = tuple(drainer for drainer in s.drainers if drainer is not current)
    if current.step == "decided":
        log = tuple((unit, fence if (by, status) == (current.fence, OPEN) else by, status) for unit, by, status in s.log)
        new = Drainer("decided", fence, current.rows, is_elsewhere)
        kept = _idle_again(current)
    else:
        log = _ended(s, current.fence, commits=False)
        new = Drainer("idle", fence, (), is_elsewhere)
        kept = current
    return s._replace(fence=fence, drainers=(*old, *((kept,) if keeps else ()), new), log=log)


def _ended(s: State, fence: int, *, commits: bool) -> tuple[tuple[int, int, str], ...]:
    """The log after the open entries of a drainer were committed or aborted."""
    if not commits:
        return tuple(entry for entry in s.log if not (entry[1] == fence and entry[2] == OPEN))
    return tuple((unit, by, COMMITTED if by == fence else status) for unit, by, status in s.log)


# --- parts ----------------------------------------------------------------------------------------------------------------


def _with(s: State, number: int, unit: Unit) -> State:
    return s._replace(units=(*s.units[:number], unit, *s.units[number + 1 :]))


def _with_drainer(s: State, number: int, drainer: Drainer) -> State:
    return s._replace(drainers=(*s.drainers[:number], drainer, *s.drainers[number + 1 :]))


def _spent(s: State, event: str) -> State:
    budget = list(s.budget)
    budget.remove(event)
    return s._replace(budget=tuple(budget))


# --- scenes ---------------------------------------------------------------------------------------------------------------

_TWO: Final = (READ_COMMITTED, READ_COMMITTED)
_ISOLATION: Final = {
    "READ COMMITTED": _TWO,
    "snapshots": (SNAPSHOT, SNAPSHOT),
    "both": (READ_COMMITTED, SNAPSHOT),
}
_BUDGETS: Final = {
    "brokers that go down once": (DOWN,),
    "flapping brokers": (DOWN, DOWN),
    "flapping brokers, and a drainer that dies": (DOWN, DOWN, CRASH),
    "a lost transaction, and two drainers that die": (DOWN, LOSE, CRASH, CRASH),
}
SCENES: Final[dict[str, Scene]] = {
    f"{budget}, {isolation}": Scene(units, _BUDGETS[budget]) for isolation, units in _ISOLATION.items() for budget in _BUDGETS
}
SCENES |= {
    f"a writer that starts, perhaps while Kafka is down, {isolation}": Scene(units, (DOWN, DOWN, KILL), one_id=True)
    for isolation, units in _ISOLATION.items()
}
SCENES["a writer and a drainer with another cluster's address"] = Scene(_TWO, (DOWN, CRASH, WRONG), elsewhere=frozenset({1}))
SCENES |= {
    f"a pool that writes into the journal always beside another, {isolation}, {number}": Scene(
        units, (DOWN, CRASH, CLOSE), always=frozenset({number})
    )
    for isolation, units in _ISOLATION.items()
    for number in (0, 1)
}
SCENES["two that write into the journal always, and one that does not"] = Scene(
    (*_TWO, READ_COMMITTED), (CLOSE,), always=frozenset({0, 1})
)
"""Each is explored completely within seconds."""

LEARNED_OTHERWISE: Final = Scene((READ_COMMITTED, SNAPSHOT), (DOWN,), channel=True)
"""A unit whose snapshot is older than the gate's opening learns of a journaled unit by another way: its order is not kept."""

NEEDS: Final = {
    "all-through-journal": (Scene(_TWO, (DOWN,)), OVERTAKEN),
    "check-again": (Scene(_TWO, (DOWN,)), OVERTAKEN),
    "epoch": (Scene(_TWO, (DOWN,)), OVERTAKEN),
    "share-lock": (Scene(_TWO, (DOWN,)), OVERTAKEN),
    "empty-under-lock": (Scene(_TWO, (DOWN,)), OVERTAKEN),
    "confirmed": (Scene(_TWO, (DOWN, LOSE)), OVERTAKEN),
    "close-fenced": (Scene(_TWO, (DOWN, CRASH, LOSE)), OVERTAKEN),
    "drain-fenced": (Scene(_TWO, (DOWN, CRASH)), MISSING),
    "republish-first": (Scene(_TWO, (DOWN, LOSE)), OVERTAKEN),
    "CL-id": (Scene(_TWO, elsewhere=frozenset({1})), MISSING),
    "CL-drain": (Scene((READ_COMMITTED,), (DOWN, WRONG)), MISSING),
    "recover-first": (Scene(_TWO, (DOWN, KILL), one_id=True), MISSING),
    "all-read-gate": (Scene(_TWO, (CLOSE,), always=frozenset({0})), OVERTAKEN),
}
"""For each rule the scene that shows that it is needed, and what is found without it."""


def without(rule: str) -> Found:
    """Search the scene that needs a rule, without the rule."""
    scene, violation = NEEDS[rule]
    return search(replace(scene, without=frozenset({rule})), wanted=violation)
