"""The model of several lanes: which writer owns which row while several open one id, and recover lanes later.

It follows `dualwrite.recipe.lanes.Lanes` and `TxnStateStore.claim_lanes`. What a lane does by itself is in the model
of the recipe; here a row is only its fencing token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

from model.search import Found, explore

RULES: Final = {
    "list-late": "the id's rows are listed after lane 0 is claimed",
    "claim-rows": "lanes that have a row are claimed, whether the writer uses them or not",
    "check": "a lane's claim is checked once it is started, before the first transaction",
    "check-first": "lane 0 is checked before each further claim",
    "repeat": "an interrupted opening is repeated from the first step",
    "tombstone": "forgetting a row raises its fencing token",
}

INTERRUPT: Final = "interrupt"
RECOVER: Final = "recover"
RECOVERER: Final = "recoverer"
FORGET: Final = "forget"

TWO_OPEN: Final = "two writers have opened, and each owns a lane that it uses"
SEVERAL_TAKEN: Final = "an opening that was overtaken claims more than one lane of its successor"


@dataclass(frozen=True)
class Scene:
    """Who opens the id.

    Args:
        lanes: The number of lanes of each writer.
        together: Whether all lanes are claimed in one transaction.
        budget: What may happen, each entry once.
        journal: Whether a writer begins transactions that go into the journal once it has claimed its lanes, before Kafka is
            asked.
        without: Rules that are removed.
    """

    lanes: tuple[int, ...]
    together: bool
    budget: tuple[str, ...] = ()
    journal: bool = False
    without: frozenset[str] = frozenset()


class Row(NamedTuple):
    """A lane's row: its fencing token, 0 without a row; a forgotten row is not listed."""

    fence: int = 0
    is_listed: bool = False


class Writer(NamedTuple):
    """A writer.

    Args:
        step: "opening", "listed", "claiming", "starting", "open" or "failed".
        fences: The fencing tokens of its claims, by lane; 0 without a claim.
        left: The lanes that are still to be claimed, or to be started.
        has_checked: Whether lane 0 was checked for the next claim.
        expected: The fencing token that lane 0 must have when it is claimed; 0: any.
        late: How many lanes it has claimed since another writer has claimed lane 0.
    """

    step: str
    fences: tuple[int, ...]
    left: tuple[int, ...] = ()
    has_checked: bool = False
    expected: int = 0
    late: int = 0


class State(NamedTuple):
    """The rows, the writers, and what may still happen."""

    rows: tuple[Row, ...]
    writers: tuple[Writer, ...]
    budget: tuple[str, ...]


Next = Iterator[tuple[str, State]]


def search(scene: Scene, *, wanted: str = "") -> Found:
    """Explore every interleaving of a scene."""
    most = max(scene.lanes)
    first = State((Row(),) * most, (Writer("opening", (0,) * most),) * len(scene.lanes), scene.budget)
    return explore(first, partial(successors, scene), partial(violated, scene), wanted=wanted)


def violated(scene: Scene, s: State) -> str:
    """What is broken in a state."""
    if any(writer.late > 1 for writer in s.writers):
        return SEVERAL_TAKEN
    owners = [
        number
        for number, writer in enumerate(s.writers)
        if (writer.step == "open" or (scene.journal and writer.step == "starting"))
        and any(_is_ours(s, writer, lane) for lane in range(scene.lanes[number]))
    ]
    return TWO_OPEN if len(owners) > 1 else ""


def successors(scene: Scene, s: State) -> Next:
    """Every next state."""
    steps: dict[str, Callable[[Scene, State, int], Next]] = {
        "opening": _opening,
        "listed": _opening,
        "claiming": _claiming,
        "starting": _starting,
        "open": _recovering,
        "failed": lambda *_: iter(()),
    }
    for number, writer in enumerate(s.writers):
        yield from steps[writer.step](scene, s, number)
        if INTERRUPT in s.budget and writer.step in ("claiming", "starting"):
            yield f"writer {number} is interrupted", _spent(_interrupted(scene, s, number), INTERRUPT)
    for lane, row in enumerate(s.rows):
        if RECOVERER in s.budget and row.is_listed:
            yield f"a recoverer claims lane {lane}", _spent(_with_row(s, lane, Row(row.fence + 1, True)), RECOVERER)
        if FORGET in s.budget and row.is_listed:
            fence = row.fence if "tombstone" in scene.without else row.fence + 1
            yield f"lane {lane} is forgotten", _spent(_with_row(s, lane, Row(fence, False)), FORGET)


# --- opening --------------------------------------------------------------------------------------------------------------


def _opening(scene: Scene, s: State, number: int) -> Next:
    """Claim lane 0; in one transaction, list the rows and claim them all: nobody else can claim lane 0 before its COMMIT."""
    writer = s.writers[number]
    if "list-late" in scene.without and writer.step == "opening":
        left = (0, *_further(scene, s, number))
        yield f"writer {number} lists the rows", _with(s, number, writer._replace(step="listed", left=left))
    elif writer.expected not in (0, s.rows[0].fence):
        yield f"writer {number} is fenced", _with(s, number, writer._replace(step="failed"))
    elif scene.together:
        for lane in writer.left or (0, *_further(scene, s, number)):
            s = _claimed(s, number, lane)
        yield f"writer {number} claims all lanes", _to_start(scene, s, number)
    else:
        s = _claimed(s, number, 0)
        left = writer.left[1:] or (-1,)
        yield f"writer {number} claims lane 0", _with(s, number, s.writers[number]._replace(step="claiming", left=left))


def _claiming(scene: Scene, s: State, number: int) -> Next:
    """List the rows (-1), and claim lane by lane, after a check of lane 0."""
    writer = s.writers[number]
    if writer.left == (-1,):
        left = _further(scene, s, number)
        listed = _with(s, number, writer._replace(left=left))
        yield f"writer {number} lists the rows", listed if left else _to_start(scene, listed, number)
    elif not writer.has_checked and "check-first" not in scene.without:
        yield _checked(s, number, 0, writer._replace(has_checked=True))
    else:
        lane, *left = writer.left
        s = _claimed(s, number, lane)
        s = _with(s, number, s.writers[number]._replace(left=tuple(left), has_checked=False))
        yield f"writer {number} claims lane {lane}", s if left else _to_start(scene, s, number)


def _starting(scene: Scene, s: State, number: int) -> Next:
    """Each lane is started and checked, side by side; when all are, the writer has opened."""
    writer = s.writers[number]
    for lane in writer.left:
        left = tuple(other for other in writer.left if other != lane)
        yield _checked(s, number, lane, writer._replace(left=left, step="starting" if left else "open"))


def _recovering(scene: Scene, s: State, number: int) -> Next:
    """Recover a single lane: claim it on condition that it is still ours."""
    writer = s.writers[number]
    for lane in range(scene.lanes[number]):
        if RECOVER in s.budget and _is_ours(s, writer, lane):
            yield f"writer {number} recovers lane {lane}", _spent(_claimed(s, number, lane), RECOVER)
        elif "repeat" in scene.without and not writer.fences[lane]:  # left by an interrupted opening
            yield f"writer {number} claims lane {lane}", _claimed(s, number, lane)


def _interrupted(scene: Scene, s: State, number: int) -> State:
    writer = s.writers[number]
    if "repeat" in scene.without:
        return _with(s, number, writer._replace(step="open", left=()))
    return _with(s, number, Writer("opening", writer.fences, expected=writer.fences[0]))


# --- parts ----------------------------------------------------------------------------------------------------------------


def _further(scene: Scene, s: State, number: int) -> tuple[int, ...]:
    """The lanes to claim after lane 0: our own ones, and those that have a row."""
    listed = "claim-rows" not in scene.without
    return tuple(lane for lane, row in enumerate(s.rows) if lane and (lane < scene.lanes[number] or (listed and row.is_listed)))


def _is_ours(s: State, writer: Writer, lane: int) -> bool:
    return writer.fences[lane] > 0 and writer.fences[lane] == s.rows[lane].fence


def _checked(s: State, number: int, lane: int, then: Writer) -> tuple[str, State]:
    is_ours = _is_ours(s, s.writers[number], lane)
    after = then if is_ours else s.writers[number]._replace(step="failed")
    return f"writer {number} checks lane {lane}{'' if is_ours else ' and is fenced'}", _with(s, number, after)


def _claimed(s: State, number: int, lane: int) -> State:
    writer = s.writers[number]
    is_late = lane > 0 and writer.step == "claiming" and not _is_ours(s, writer, 0)
    fence = s.rows[lane].fence + 1
    fences = (*writer.fences[:lane], fence, *writer.fences[lane + 1 :])
    return _with(_with_row(s, lane, Row(fence, True)), number, writer._replace(fences=fences, late=writer.late + is_late))


def _to_start(scene: Scene, s: State, number: int) -> State:
    writer = s.writers[number]
    if "check" in scene.without:
        return _with(s, number, writer._replace(step="open", left=()))
    return _with(s, number, writer._replace(step="starting", left=tuple(range(scene.lanes[number]))))


def _with(s: State, number: int, writer: Writer) -> State:
    return s._replace(writers=(*s.writers[:number], writer, *s.writers[number + 1 :]))


def _with_row(s: State, lane: int, row: Row) -> State:
    return s._replace(rows=(*s.rows[:lane], row, *s.rows[lane + 1 :]))


def _spent(s: State, event: str) -> State:
    budget = list(s.budget)
    budget.remove(event)
    return s._replace(budget=tuple(budget))


# --- scenes ---------------------------------------------------------------------------------------------------------------

SCENES: Final[dict[str, Scene]] = {
    f"{lanes} lanes, claimed {'together' if together else 'one by one'}": Scene(lanes, together, budget)
    for together, lanes, budget in (
        (True, (2, 2), (INTERRUPT, RECOVER, RECOVERER, FORGET)),
        (True, (3, 1), (INTERRUPT, RECOVER, RECOVERER, FORGET)),
        (True, (2, 1, 2), (INTERRUPT,)),
        (False, (2, 2), (INTERRUPT, RECOVER, FORGET)),
        (False, (3, 1), (INTERRUPT, RECOVERER)),
        (False, (3, 2), (INTERRUPT,)),
        (False, (2, 1, 2), ()),
    )
}
SCENES |= {
    f"{lanes} lanes, a journal": Scene(lanes, together=True, budget=(INTERRUPT, RECOVER, RECOVERER, FORGET), journal=True)
    for lanes in ((2, 2), (3, 1))
}
"""Each is explored completely within seconds."""

_one_by_one: Final = Scene((2, 2), together=False, budget=(INTERRUPT,))

NEEDS: Final = {
    "list-late": (Scene((1, 2), together=True), TWO_OPEN),
    "claim-rows": (Scene((1, 2), together=True), TWO_OPEN),
    "check": (_one_by_one, TWO_OPEN),
    "check-first": (Scene((3, 3), together=False), SEVERAL_TAKEN),
    "repeat": (_one_by_one, TWO_OPEN),
    "tombstone": (Scene((1, 2), together=True, budget=(FORGET,)), TWO_OPEN),
}
"""For each rule the scene that shows that it is needed, and what is found without it."""


def without(rule: str) -> Found:
    """Search the scene that needs a rule, without the rule."""
    scene, violation = NEEDS[rule]
    return search(replace(scene, without=frozenset({rule})), wanted=violation)
