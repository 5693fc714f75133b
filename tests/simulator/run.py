"""One run: who takes part, what they do, and whether the promise was kept in the end."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from dualwrite.errors import (
    CommittedTransactionsForgottenError,
    DualWriteError,
    FencedError,
    InDoubtTransactionError,
    LostTransactionError,
    UnverifiedTransactionError,
)
from dualwrite.recipe.republish import RecoveryPublisher
from dualwrite.recovery.recoverer import Recoverer
from dualwrite.settings import OnLost, Timeouts
from dualwrite.state import ProducerKind
from dualwrite.stores.base import LostKind, TxnStateStore
from dualwrite.stores.identity import StoreIdentity
from dualwrite.writer import DualWriter
from simulator.brokers import Cluster
from simulator.choices import Choices
from simulator.clients import TOPIC, SimulatedCoordinator, producers
from simulator.databases import Database, MemoryKeyValueStore, MemoryStore
from simulator.world import Faults, Process, SimulationError, World

ID: Final = "shop"
TIMEOUTS: Final = Timeouts(claim=2.0, kafka=2.0, delivery=2.0)

logging.getLogger("dualwrite").setLevel(logging.CRITICAL + 1)


@dataclass
class Unit:
    """One transaction of a user.

    Attributes:
        outcome: What its caller was told: "ok", "rolled back", "lost", or "unknown" as long as it was told nothing.
    """

    number: int
    partitions: tuple[int, ...]
    outcome: str = "unknown"


class _UsersError(Exception):
    """What a block raises."""


@dataclass
class Scene:
    """Who takes part; drawn from the choices.

    Args:
        kind: The producers.
        store: "rows", "late rows" (a transaction begins with its first statement) or "keys".
        writers: How many transactions each writer runs.
        recoverers: How many processes recover.
        lanes: How many lanes a writer has.
        on_lost: What writers do about lost transactions.
    """

    kind: ProducerKind
    store: str
    writers: tuple[int, ...]
    recoverers: int
    lanes: int
    on_lost: OnLost
    ends_by_epoch: bool
    is_slow: bool
    is_plain: bool
    first_epoch: int
    faults: Faults
    times_out: bool

    @classmethod
    def drawn(cls, choices: Choices) -> Scene:
        """A scene."""
        kind = (ProducerKind.NATIVE_TWO_PHASE, ProducerKind.NATIVE, ProducerKind.LIBRDKAFKA)[choices.below(3)]
        often = (0.0, 0.01, 0.04, 0.12)
        return cls(
            kind=kind,
            store=("rows", "late rows", "keys")[choices.weighted((0.3, 0.15))],
            writers=((2,), (1, 1), (2, 2), (3, 1), (1, 1, 1))[choices.below(5)],
            recoverers=choices.below(3),
            lanes=1 + choices.happens(0.2),
            on_lost="report" if choices.happens(0.2) else "republish",
            ends_by_epoch=not (kind is ProducerKind.LIBRDKAFKA and choices.happens(0.4)),
            is_slow=choices.happens(0.3),
            is_plain=choices.happens(0.2),
            first_epoch=32762 + choices.below(5) if choices.happens(0.1) else 0,
            times_out=kind is not ProducerKind.NATIVE_TWO_PHASE and choices.happens(0.6),
            faults=Faults(
                lost=often[choices.below(3)],
                unanswered=often[choices.below(3)],
                delayed=often[choices.below(4)],
                dies=(0.0, 0.005, 0.02)[choices.below(3)],
                pauses=(0.0, 0.02, 0.1)[choices.below(3)],
                switches=(0.3, 0.05, 0.9)[choices.below(3)],
                events=(0.02, 0.1, 0.0)[choices.below(3)],
            ),
        )


class Run:
    """One run of a scene."""

    def __init__(self, choices: Choices, *, trace: bool = False) -> None:
        self.scene = scene = Scene.drawn(choices)
        self.choices = choices
        self.world = world = World(choices, scene.faults, trace=trace)
        now = lambda: world.now  # noqa: E731
        self.cluster = Cluster(
            "kafka",
            now,
            ends_by_epoch=scene.ends_by_epoch,
            is_slow=scene.is_slow,
            is_plain=scene.is_plain,
            first_epoch=scene.first_epoch,
            adds_in_produce=scene.kind.takes_over,
        )
        self.database = Database("shop", StoreIdentity("a" * 12))
        self.units: list[Unit] = []
        self.acknowledged: set[int] = set()
        if scene.is_slow:
            world.events.append(self.cluster.write_markers)
        if scene.times_out:
            world.events.append(self.cluster.time_out)

    def store(self) -> TxnStateStore:
        """A process's connection to the database."""
        if self.scene.store == "keys":
            return MemoryKeyValueStore(self.world, self.database)
        return MemoryStore(self.world, self.database, begins_late=self.scene.store == "late rows")

    # --- processes --------------------------------------------------------------------------------------------------------

    def writes(self, process: Process, count: int, on_lost: OnLost | None = None) -> None:
        """A service: opens a writer, runs transactions, closes it; after an error that says so, opens it again."""
        coordinator = SimulatedCoordinator(self.world, self.cluster)
        made = producers(self.world, self.cluster, coordinator, self.scene.kind)
        writer: DualWriter[Any] = DualWriter(
            self.store(),
            transactional_id=ID,
            producers=made,
            coordinator=coordinator,
            lanes=self.scene.lanes,
            timeouts=TIMEOUTS,
            on_lost=on_lost or self.scene.on_lost,
        )
        if not self._opened(process, writer.open):
            return
        for _ in range(count):
            if self._transaction(process, writer) and not self._opened(process, writer.reopen):
                return
            if self.choices.happens(0.1):
                self.world.now += 2.0
            if self.choices.happens(0.1):
                writer._clear_if_idle()  # noqa: SLF001  (what the thread for idle writers calls)
        try:
            writer.close()
        except DualWriteError as error:
            self.world.note(process.name, f"closing: {error}")

    def _opened(self, process: Process, opening: Any) -> bool:
        for _ in range(2):
            try:
                opening()
            except DualWriteError as error:
                self.world.note(process.name, f"can't open: {type(error).__name__}: {error}")
                self.world.pause(0.2)
            else:
                self.world.note(process.name, "is open")
                return True
        return False

    def _transaction(self, process: Process, writer: DualWriter[Any]) -> bool:
        """Run one transaction; whether the writer must be opened again."""
        choices = self.choices
        unit = Unit(len(self.units) + 1, ((0,), (1,), (0, 1))[choices.below(3)])
        self.units.append(unit)
        must_reopen = False
        try:
            with writer.transaction() as tx:
                if choices.happens(0.3):
                    self._sends(tx, unit)
                    tx.db.write(unit.number)
                else:
                    tx.db.write(unit.number)
                    self._sends(tx, unit)
                if choices.happens(0.05):
                    raise _UsersError
        except InDoubtTransactionError as error:
            told = f"{type(error).__name__}: {error}"
        except (LostTransactionError, UnverifiedTransactionError) as error:
            unit.outcome, told = "lost", f"{type(error).__name__}: {error}"
        except (DualWriteError, _UsersError) as error:
            unit.outcome, told = "rolled back", f"{type(error).__name__}: {error}"
            must_reopen = isinstance(error, FencedError) and choices.happens(0.5)
        else:
            unit.outcome = told = "ok"
        self.world.note(process.name, f"transaction {unit.number}: {unit.outcome} ({told})")
        return must_reopen

    def _sends(self, tx: Any, unit: Unit) -> None:
        for partition in unit.partitions:
            tx.send(TOPIC, str(unit.number), partition=partition)

    def recovers(self, process: Process) -> None:
        """A process that recovers what is there."""
        try:
            report = self.recoverer(publishes=self.choices.happens(0.7)).recover()
        except DualWriteError as error:
            self.world.note(process.name, f"can't recover: {error}")
            return
        self.world.note(process.name, f"has recovered: {report}")

    def recoverer(self, *, publishes: bool) -> Recoverer:
        store, coordinator = self.store(), SimulatedCoordinator(self.world, self.cluster)
        made = producers(self.world, self.cluster, coordinator, self.scene.kind)
        publisher = RecoveryPublisher(store, coordinator, lambda _: made, TIMEOUTS) if publishes else None
        return Recoverer(store, coordinator, timeouts=TIMEOUTS, republisher=publisher)

    # --- the run ----------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run everything, then recover on a quiet network; raises SimulationError if the promise is broken."""
        world, scene = self.world, self.scene
        with world.clocks():
            for number, count in enumerate(scene.writers):
                process = world.start(f"writer {number + 1}", partial(self.writes, count=count))
                process.wakes_at = world.now + (0.0, 0.0, 0.01, 0.1)[self.choices.below(4)]
            for number in range(scene.recoverers):
                process = world.start(f"recoverer {number + 1}", self.recovers)
                process.wakes_at = world.now + (0.0, 0.01, 0.03, 0.1)[self.choices.below(4)]
            world.run()
            self._quieten()
            report = self.recoverer(publishes=True).recover()
            world.note("recovery", f"{report}")
            self.cluster.write_markers()
            for each in report.ids:
                if each.error is not None:
                    raise SimulationError(f"recovery has failed: {each.error}")
            self.judge()

    def _quieten(self) -> None:
        """What is late arrives or is lost, and the network and the brokers work from now on."""
        world, late = self.world, self.world.late
        while late:
            one = late.pop(0)
            is_lost = self.choices.happens(0.3)
            world.note("network", f"{'loses' if is_lost else 'delivers late'}: {one.what}")
            if not is_lost:
                one.effect()
            elif one.lost is not None:
                one.lost()
        self.cluster.write_markers()
        self.cluster.is_slow = False
        self.cluster.is_readable = True
        world.faults = Faults()
        world.events.clear()

    # --- the promise ------------------------------------------------------------------------------------------------------

    def rows(self) -> dict[str, Any]:
        """The rows of the ids."""
        store = self.store()
        return {name: store.read(name) for name in store.list()}

    def judge(self) -> None:
        """Compare both sides."""
        seen, rows = Counter(self.cluster.visible()), self.rows()
        if hanging := self.cluster.hanging():
            raise SimulationError(f"after recovery something is open: {hanging}")
        entries = [entry for row in rows.values() for entry in row.lost]
        reported = {number for entry in entries for number in self._messages_of(entry)}
        for unit in self.units:
            shown, is_row = seen.pop(unit.number, 0), unit.number in self.database.numbers
            wanted = len(unit.partitions)
            name = f"transaction {unit.number}"
            if shown > wanted:
                raise SimulationError(f"{name} is visible twice")
            if shown not in (0, wanted):
                raise SimulationError(f"{name} is visible in part")
            if shown and not is_row:
                raise SimulationError(f"{name} is visible, and its row is not committed")
            if is_row and not shown and unit.number not in reported:
                raise SimulationError(f"{name} is committed, and its messages are missing; it is not reported")
            if shown and unit.number in reported:
                raise SimulationError(f"{name} is reported as lost, and visible")
            if unit.outcome == "ok" and not (is_row and shown):
                raise SimulationError(f"{name} was acknowledged, and is missing")
            if unit.outcome == "rolled back" and (is_row or shown):
                raise SimulationError(f"{name} was reported as rolled back, and is committed")
            if unit.outcome == "lost" and not is_row:
                raise SimulationError(f"{name} was reported as lost, and its row is not committed")
        if seen:
            raise SimulationError(f"unknown messages are visible: {dict(seen)}")
        for entry in entries:
            if entry.kind is LostKind.LOST:
                raise SimulationError(f"{entry.state} is lost, and could not be published again")

    def _messages_of(self, entry: Any) -> list[int]:
        places = () if entry.delivery is None else entry.delivery.places
        return [self.cluster.partitions[place.partition].log[place.first_offset].number or 0 for place in places]


def run(seed: int, played: Sequence[int] | None = None, *, trace: bool = False) -> tuple[str | None, Run]:
    """Run one seed, or choices of an earlier run: what was broken, or None."""
    choices = Choices(seed, played)
    made = Run(choices, trace=trace)
    try:
        made.run()
    except SimulationError as broken:
        return str(broken), made
    except Exception as error:  # noqa: BLE001  (a defect of the code, or of the simulator)
        if trace:
            made.world.trace += traceback.format_exc().splitlines()
        return f"a process has failed: {type(error).__name__}: {error}", made
    return None, made
