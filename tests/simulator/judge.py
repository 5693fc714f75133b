"""The promise, judged after a run: both sides of each transaction, and what callers and rows say about it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dualwrite.stores.base import LostKind
from simulator.world import SimulationError

if TYPE_CHECKING:
    from dualwrite.stores.base import LostTransaction
    from simulator.run import Run, Unit


def judge(run: Run) -> None:
    """Compare rows and messages, once everything was recovered.

    Raises:
        SimulationError: The promise is broken.
    """
    if run.world.broken is not None:
        raise SimulationError(run.world.broken)
    if hanging := run.cluster.hanging():
        raise SimulationError(f"after recovery something is open: {hanging}")
    if run.unreported:
        raise SimulationError(f"a writer has gone on, and did not report that the database has forgotten {run.unreported}")
    visible = run.cluster.visible()
    seen = Counter(number for partition in visible for number in partition)
    entries = run.entries()
    reported = {kind: {n for each in entries if each.kind is kind for n in run.messages_of(each)} for kind in LostKind}
    for unit in run.units:
        broken = _broken(run, unit, seen.pop(unit.number, 0), reported)
        if broken is not None:
            raise SimulationError(f"transaction {unit.number} {broken}")
    if seen:
        raise SimulationError(f"unknown messages are visible: {dict(seen)}")
    if any(run.other.visible()):
        raise SimulationError("messages are visible on another cluster")
    _check_entries(run, entries)
    if run.scene.lanes == 1 and run.scene.beside == "nothing":
        _check_order(run, visible)


def _check_entries(run: Run, entries: list[LostTransaction]) -> None:
    """What is in the rows as lost or unverified could not be found out, or published."""
    deleted = any(partition.deleted for partition in run.cluster.partitions.values())
    for entry in entries:
        if entry.kind is not LostKind.FORGOTTEN and entry.delivery is not None and not deleted:
            raise SimulationError(f"{entry.state} is {entry.kind.value}, although its messages are in the log")


def _broken(  # noqa: C901, PLR0911  (each is one part of the promise)
    run: Run, unit: Unit, shown: int, reported: dict[LostKind, set[int]]
) -> str | None:
    """What is wrong with one transaction."""
    is_row, wanted, number = unit.number in unit.database.numbers, len(unit.partitions), unit.number
    if shown > wanted:
        return "is visible twice"
    if shown not in (0, wanted):
        return "is visible in part"
    if shown and number in run.acknowledged:
        return "is visible, and an operator has acknowledged it as lost"
    if shown and number in reported[LostKind.LOST]:
        return "is in the row as lost, and visible"
    if is_row and number in reported[LostKind.FORGOTTEN]:
        return "is in the row as forgotten, and the database has it"
    if shown and not is_row and number not in run.gone:
        return "is visible, and its row is not committed"
    is_known = number in run.acknowledged or any(number in numbers for numbers in reported.values())
    if is_row and not shown and not is_known:
        return "is committed, its messages are missing, and nobody is told"
    if unit.outcome == "ok" and not (shown and (is_row or number in run.gone)):
        return "was acknowledged, and is missing"
    if unit.outcome == "rolled back" and (shown or is_row):
        return "was reported as rolled back, and is committed"
    may_be_found_later = run.scene.beside in (
        "a forgotten id",
        "retention",
    )  # as the log can be read then
    if unit.outcome == "lost" and shown and unit.on_lost == "republish" and not may_be_found_later:
        return "was reported as lost, and is visible"
    return None


def _check_order(run: Run, visible: list[list[int]]) -> None:
    """Each partition has the messages in the order of the commits; if writers only report losses, those that were sent once."""
    order = {number: at for at, number in enumerate(run.database.order)}
    given_up = {unit.number for unit in run.units if unit.outcome == "lost"}
    for numbers, partition in zip(visible, run.cluster.partitions.values(), strict=True):
        sent = Counter(record.number for record in partition.log)
        again = run.scene.on_lost == "report"
        for kept in (
            [n for n in numbers if n not in given_up and (not again or sent[n] == 1)],
            [n for n in numbers if sent[n] > 1],
        ):
            if kept != sorted(kept, key=order.__getitem__):
                raise SimulationError(f"messages are visible in another order than that of their commits: {kept}")
