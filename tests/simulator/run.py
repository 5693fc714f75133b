"""One run: who takes part, what they do, and whether the promise was kept in the end."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from dualwrite.observability.events import Event, TransactionEvent, TransactionRecovered
from dualwrite.observability.observers import observing
from dualwrite.recipe.republish import RecoveryPublisher
from dualwrite.recovery import clusters
from dualwrite.recovery.recoverer import Recoverer
from dualwrite.recovery.report import RecoveryReport
from dualwrite.settings import OnLost, Timeouts
from dualwrite.state import ProducerKind
from dualwrite.stores.base import LostKind, LostTransaction, StateRow, TxnStateStore
from dualwrite.transactional_id import TransactionalId
from dualwrite.writer import DualWriter
from simulator.brokers import Cluster
from simulator.choices import Choices
from simulator.clients import TOPIC, SimulatedCoordinator, producers
from simulator.databases import Database, MemoryStore
from simulator.judge import judge
from simulator.world import Faults, Process, SimulationError, World

ID: Final = "shop"
TIMEOUTS: Final = Timeouts(claim=30.0, kafka=30.0, delivery=30.0)


@dataclass
class Unit:
    """One transaction of a user.

    Attributes:
        outcome: What its caller was told: "ok", "rolled back", "lost", or "unknown" as long as it was told nothing.
        told: The same with the error's text.
    """

    number: int
    partitions: tuple[int, ...]
    database: Database
    on_lost: OnLost
    outcome: str = "unknown"
    told: str = ""


_HEARD: Final = {
    "ok": "TransactionCommitted",
    "rolled back": "TransactionRolledBack",
    "lost": "TransactionLost",
    "unknown": "TransactionInDoubt",
}
"""The event of each outcome."""


def _outcome(error: Exception | None) -> str:
    """What a caller is told."""
    match error:
        case None:
            return "ok"
        case InDoubtTransactionError():
            return "unknown"
        case CommittedTransactionsForgottenError():
            return "rolled back"
        case LostTransactionError() | UnverifiedTransactionError():
            return "lost"
    return "rolled back"


class _UsersError(Exception):
    """What a block raises."""


SURROUNDINGS: Final = (
    "nothing",
    "an operator",
    "retention",
    "a forgotten id",
    "a database that goes back",
    "a wrong cluster",
    "two databases",
    "a copied database",
)
"""What happens beside the processes and the network; one of them in a run."""

_AFTER_TIMEOUTS: Final = ("an operator", "retention", "a forgotten id", "a copied database")
"""Those that matter most where a transaction was lost."""

_FOCUS: Final = ("", "", "", "losses", "evidence")
"""What is made frequent in a run: that transactions are lost, and reported; or that two recover while evidence goes."""


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
        focus: One of _FOCUS.
        hides: Whether the log can't be read at first.
        beside: One of SURROUNDINGS.
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
    focus: str
    hides: bool
    beside: str

    @classmethod
    def drawn(cls, choices: Choices) -> Scene:
        """A scene."""
        focus = _FOCUS[choices.below(len(_FOCUS))]
        loses, erases = focus == "losses", focus == "evidence"
        beside = SURROUNDINGS[choices.below(len(SURROUNDINGS)) if choices.happens(0.6) and not loses else 0]
        beside = "retention" if erases else beside
        is_late = beside in _AFTER_TIMEOUTS
        kind = (ProducerKind.NATIVE_TWO_PHASE, ProducerKind.NATIVE, ProducerKind.LIBRDKAFKA)[choices.below(3)]
        kind = ProducerKind.NATIVE if (is_late or loses) and kind is ProducerKind.NATIVE_TWO_PHASE else kind
        is_old = kind is ProducerKind.LIBRDKAFKA and choices.happens(0.4)
        if erases:  # in the log, and at the coordinator
            kind, is_old = ProducerKind.LIBRDKAFKA, True
        times_out = kind is not ProducerKind.NATIVE_TWO_PHASE and (is_late or loses or choices.happens(0.6))
        often = (0.0, 0.01, 0.04, 0.12)
        return cls(
            kind=kind,
            store=("rows", "late rows", "keys")[choices.weighted((0.35, 0.1))],
            writers=((2,), (3, 1), (2, 2), (1, 1), (1, 1, 1))[choices.below(3 if focus else 5)],
            recoverers=2 if focus else choices.below(3),
            lanes=1 + choices.happens(0.2),
            on_lost="report" if choices.happens(0.8 if loses else 0.2) else "republish",
            ends_by_epoch=not is_old,
            is_slow=choices.happens(0.3),
            is_plain=choices.happens(0.2),
            first_epoch=32762 + choices.below(5) if choices.happens(0.1) else 0,
            times_out=times_out,
            focus=focus,
            hides=erases and choices.happens(0.5),
            beside=beside,
            faults=Faults(
                lost=often[choices.below(3)],
                unanswered=often[choices.below(3) + is_late],
                delayed=often[choices.below(4)],
                dies=(0.0, 0.005, 0.02, 0.04)[choices.below(3) + (beside == "retention")],
                pauses=(0.0, 0.02, 0.1)[choices.below(3)],
                switches=(0.3, 0.05, 0.9)[choices.below(3)],
                lingers=(0.0, 0.04, 0.3)[choices.below(3)],
                oversleeps=(0.5 if loses else (0.0, 0.1, 0.3)[choices.below(3)]) if times_out else 0.0,
                events=((0.05, 0.1, 0.15, 0.2) if is_late else (0.02, 0.05, 0.1, 0.0))[choices.below(4)],
            ),
        )


class Run:
    """One run of a scene."""

    def __init__(self, choices: Choices, *, trace: bool = False) -> None:
        self.scene = scene = Scene.drawn(choices)
        self.choices = choices
        self.world = world = World(choices, scene.faults, trace=trace)
        self.cluster, self.other = self._cluster("kafka"), self._cluster("another")
        self.database, self.second = Database("first", "a" * 12), Database("second", "b" * 12)
        self.cluster.aborted, self.cluster.opened = self._aborted, self._opened_at
        self.units: list[Unit] = []
        self.heard: dict[Process | None, str] = {}
        self.lanes: dict[Process | None, str] = {}
        self.acknowledged: set[int] = set()
        self.acknowledged_to: dict[Process, dict[str, set[int]]] = {}
        self.gone: set[int] = set()
        self.unreported: set[int] = set()
        if scene.is_slow:
            world.events += [
                each.write_markers for each in (self.cluster, self.other)[: 1 + (scene.beside == "a wrong cluster")]
            ]
        if scene.times_out:
            world.events += [self.cluster.time_out, self._lets_time_pass]
        beside = {
            "an operator": (self._acknowledges,),
            "retention": (self.cluster.delete_records, self._acknowledges, self._hides_log),
            "a forgotten id": (self._forgets, self._hides_log),
            "a database that goes back": (self._goes_back,),
        }
        world.events += beside.get(scene.beside, ())
        self.cluster.is_readable = not scene.hides

    def _cluster(self, name: str) -> Cluster:
        scene, world = self.scene, self.world
        return Cluster(
            name,
            lambda: world.now,
            ends_by_epoch=scene.ends_by_epoch,
            is_slow=scene.is_slow,
            is_plain=scene.is_plain,
            first_epoch=scene.first_epoch,
            adds_in_produce=scene.kind.takes_over,
        )

    # --- what is judged at once ---------------------------------------------------------------------------------------------

    def _aborted(self, numbers: set[int]) -> None:
        """A request has aborted an open transaction: only a timeout may do that to one that the database has committed."""
        self.world.turns += 1
        if wrong := {n for n in numbers if n in self.units[n - 1].database.numbers}:
            self.world.breaks(f"transaction {wrong} is committed, and a request aborts it")

    def _opened_at(self, name: str) -> None:
        """A message has opened a transaction: not on a generation on which nothing is open any more."""
        of = TransactionalId.of_kafka(name)
        database = self.database if of is not None and of.store_id == self.database.store_id else self.second
        row = None if of is None else database.row(of.row)
        if of is not None and row is not None and of.generation <= row.resolved_generation:
            self.world.breaks(f"a message opens a transaction on {name}, which is resolved")

    def _hears(self, event: Event) -> None:
        """What observers are told of a process's last transaction, and of recovery."""
        if isinstance(event, TransactionEvent):
            self.heard[self.world.current] = type(event).__name__
            self.lanes[self.world.current] = event.lane
        elif isinstance(event, TransactionRecovered):
            is_known = self.cluster.has_forgotten or self.other.has_forgotten
            if event.outcome == LostKind.UNVERIFIED.value and not is_known:
                self.world.breaks("a transaction is UNVERIFIED, although the coordinator has forgotten nothing")

    def _check_fenced(self, process: Process, database: Database, error: FencedError) -> None:
        """Somebody else has claimed the id of a writer that is fenced."""
        row = database.row(error.facts.get("lane") or ID)
        is_newest = row is not None and row.fence == error.facts.get("current_fence")
        if row is not None and is_newest and database.claimants.get(row.claim_token) is process:
            self.world.breaks(f"{process.name} was fenced by its own claim")

    # --- what happens beside the processes ----------------------------------------------------------------------------------

    def _lets_time_pass(self) -> str:
        self.world.now += 25.0
        done = self.cluster.time_out() if self.choices.happens(0.7) else None
        return f"25 s pass{'' if done is None else f'; {done}'}"

    def _acknowledges(self) -> str | None:
        store = self.store(self.database)
        for name in [] if self.database.locks else store.list():
            removed = store.acknowledge(name)
            if removed:
                numbers = {n for entry in removed if entry.kind is LostKind.LOST for n in self.messages_of(entry)}
                self.acknowledged |= numbers
                return f"an operator acknowledges {[str(entry.state) for entry in removed]}: {numbers}"
        return None

    def _forgets(self) -> str | None:
        self.world.lose_late()
        self.world.now += 8 * 86_400
        return self.cluster.forget_ids()

    def _hides_log(self) -> str:
        self.cluster.is_readable = not self.cluster.is_readable
        return f"the log can{'' if self.cluster.is_readable else 't'} be read"

    def _goes_back(self) -> str | None:
        gone = self.database.go_back()
        if gone is None:
            return None
        self.gone |= gone
        return f"the database goes back, and has forgotten {gone}"

    def store(self, database: Database) -> TxnStateStore:
        """A process's connection to a database."""
        store = self.scene.store
        return MemoryStore(self.world, database, locks=store != "keys", begins_late=store == "late rows")

    # --- processes --------------------------------------------------------------------------------------------------------

    def writes(self, process: Process, count: int, database: Database, cluster: Cluster) -> None:
        """A service: opens a writer, runs transactions, closes it; after an error that says so, opens it again."""
        coordinator = SimulatedCoordinator(self.world, cluster)
        made = producers(self.world, cluster, coordinator, self.scene.kind)
        writer: DualWriter[Any] = DualWriter(
            self.store(database),
            transactional_id=ID,
            producers=made,
            coordinator=coordinator,
            lanes=self.scene.lanes,
            timeouts=TIMEOUTS,
            on_lost=self.scene.on_lost,
        )
        if not self._opened(process, writer.open):
            return
        for _ in range(count):
            if self._transaction(process, writer, database) and not self._opened(process, writer.reopen):
                return
            if self.choices.happens(0.1):
                self.world.now += 2.0
            if self.choices.happens(0.1):
                writer._clear_if_idle()  # what the thread for idle writers calls
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

    def _transaction(self, process: Process, writer: DualWriter[Any], database: Database) -> bool:
        """Run one transaction; whether the writer must be opened again."""
        choices = self.choices
        unit = Unit(len(self.units) + 1, ((0,), (1,), (0, 1))[choices.below(3)], database, self.scene.on_lost)
        self.units.append(unit)
        self.heard[process] = ""
        error: Exception | None = None
        try:
            with writer.transaction() as tx:
                if choices.happens(0.3):
                    self._sends(tx, unit)
                    tx.db.write(unit.number)
                else:
                    tx.db.write(unit.number)
                    self._sends(tx, unit)
                if choices.happens(0.05):
                    raise _UsersError  # noqa: TRY301  (as a user's block does)
        except (DualWriteError, _UsersError) as raised:
            error = raised
        unit.outcome, unit.told = _outcome(error), "ok" if error is None else f"{type(error).__name__}: {error}"
        self.world.note(process.name, f"transaction {unit.number}: {unit.outcome} ({unit.told})")
        if (heard := self.heard[process]) not in ("", _HEARD[unit.outcome]):
            self.world.breaks(f"the caller of transaction {unit.number} was told {unit.told}, and observers {heard}")
        of_lanes = self.acknowledged_to.setdefault(process, {})
        known = of_lanes.setdefault(self.lanes.get(process, ID), set())
        if isinstance(error, CommittedTransactionsForgottenError):
            for each in of_lanes.values():
                each.difference_update(self.gone)
        elif isinstance(error, FencedError):
            of_lanes.clear()  # of the row of another claim nobody can say that it is behind
            self._check_fenced(process, database, error)
            return choices.happens(0.5)
        elif error is None:
            self.unreported |= known & self.gone
            known.add(unit.number)
        return False

    def _sends(self, tx: Any, unit: Unit) -> None:
        for partition in unit.partitions:
            tx.send(TOPIC, str(unit.number), partition=partition)

    def recovers(self, process: Process, database: Database, cluster: Cluster) -> None:
        """A process that recovers what is there."""
        try:
            report = self.recoverer(
                database, cluster, publishes=self.choices.happens(1.0 if self.scene.focus == "losses" else 0.7)
            ).recover()
        except DualWriteError as error:
            self.world.note(process.name, f"can't recover: {error}")
            return
        self.world.note(process.name, f"has recovered: {_in_words(report)}")

    def recoverer(self, database: Database, cluster: Cluster, *, publishes: bool) -> Recoverer:
        """A recoverer, which may publish again what is lost."""
        store, coordinator = self.store(database), SimulatedCoordinator(self.world, cluster)
        made = producers(self.world, cluster, coordinator, self.scene.kind)
        publisher = RecoveryPublisher(store, coordinator, lambda _: made, TIMEOUTS) if publishes else None
        return Recoverer(store, coordinator, timeouts=TIMEOUTS, republisher=publisher)

    # --- the run ----------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run everything, then recover on a quiet network; raises SimulationError if the promise is broken."""
        world, scene, below = self.world, self.scene, self.choices.below
        with world.clocks(), observing(self._hears):
            programs = [partial(self.writes, count=count) for count in scene.writers]
            programs += [self.recovers] * scene.recoverers
            for number, program in enumerate(programs):
                is_odd = number == len(programs) - 1
                cluster = self.other if is_odd and scene.beside == "a wrong cluster" else self.cluster
                database = self.second if is_odd and scene.beside == "two databases" else self.database
                name = f"{'writer' if number < len(scene.writers) else 'recoverer'} {number + 1}"
                process = world.start(name, partial(program, database=database, cluster=cluster))
                process.wakes_at = world.now + (0.0, 0.01, 0.03, 0.1)[below(4)]
                process.wall_clock = 0.0 if below(4) else 3600.0
                if scene.focus and program == self.recovers:  # once there is something to recover
                    process.wakes_at, process.waits_for = (
                        world.now + 100.0,
                        partial(self._has_turned, 1 + (scene.focus == "losses") + below(2)),
                    )
            world.run()
            self._quieten()
            databases = [self.database, self.second]
            if scene.beside == "a copied database":
                databases[1] = self._copied()
            if "another" in {row.cluster_id for row in self._rows() if row is not None}:  # the wrong one was there first
                self.cluster, self.other = self.other, self.cluster
            reports = [self._recovered(database) for database in databases]
            for report in (each for found in reports for each in found.ids):
                if report.error is not None:
                    raise SimulationError(f"recovery has failed: {report.error}")
            judge(self)

    def _has_turned(self, times: int) -> bool:
        return self.world.turns >= times

    def _recovered(self, database: Database) -> RecoveryReport:
        report = self.recoverer(database, self.cluster, publishes=True).recover()
        self.world.note("recovery", f"of the {database.name} database: {_in_words(report)}")
        self.cluster.write_markers()
        return report

    def _copied(self) -> Database:
        """A copy of the database, which gets a store id of its own."""
        copy = replace(self.database, name="copied", texts=dict(self.database.texts), locks={})
        clusters.new_store_id(self.store(copy), timeout=2.0)
        return copy

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
        for cluster in (self.cluster, self.other):
            cluster.write_markers()
            cluster.is_slow, cluster.is_readable = False, True
        world.faults = Faults()
        world.events.clear()

    def entries(self) -> list[LostTransaction]:
        """What is in the rows as lost, unverified or forgotten."""
        return [entry for row in self._rows() if row is not None for entry in row.lost]

    def _rows(self) -> list[StateRow | None]:
        store = self.store(self.database)
        return [store.read(name) for name in store.list()]

    def messages_of(self, entry: LostTransaction) -> list[int]:
        """The transactions whose messages an entry is about."""
        places = () if entry.delivery is None else entry.delivery.places
        found = (self.cluster.partitions[place.partition].log[place.first_offset or 0].number for place in places)
        return [number for number in found if number is not None]


def _in_words(report: RecoveryReport) -> str:
    found = [f"{one.outcome.name} {one.state}" for each in report.ids for one in each.outcomes]
    return ", ".join((*found, *(f"{each.error}" for each in report.ids if each.error is not None))) or "nothing"


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
