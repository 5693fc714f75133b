"""Random steps of several writers, with crashes, pauses and recoveries, on each database, against a model of the promise.

For each event the model knows only what its writer reported: committed, rolled back, or nothing (killed, in doubt). The promise
is that both sides have the same events, each once: all that were reported as committed, and none reported as rolled back.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from crash.cases import BEFORE_COMMIT_POINT, PAST_COMMIT_POINT
from crash.databases import DATABASES, Databases
from crash.scene import Scene, Worker
from dualwrite.devcluster import DevCluster
from fixtures.pace import LIMIT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.usefixtures("native")]

EXAMPLES = int(os.environ.get("DUALWRITE_PROMISE_EXAMPLES", "2"))
STEPS = int(os.environ.get("DUALWRITE_PROMISE_STEPS", "15"))
COMMITTED = "committed"
ROLLED_BACK = "rolled back"
UNKNOWN = "unknown"
TOLD_ROLLED_BACK = frozenset({"FencedError", "StoreCommitFailedError", "StoreUnavailableError", "WriterClosedError"})
TOLD_NOTHING = frozenset({"InDoubtTransactionError"})
REFUSED_TO_OPEN = frozenset({"ClaimTimeoutError", "FencedError", "StoreUnavailableError"})
"""Why a claim may fail while a paused process holds the row's lock, or while another process claims."""

POINTS = [*BEFORE_COMMIT_POINT, *PAST_COMMIT_POINT]


class Actor:
    """A process that executes one command after another, its scene, and what it is doing."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.worker = Worker([scene.url, scene.bootstrap], module="crash.actor")
        self.is_open = False
        self.paused_with: int | None = None  # the event that it was writing when it was stopped

    def tell(self, **command: Any) -> None:
        self.worker.tell(json.dumps(command))

    def answer(self) -> dict[str, Any] | None:
        """Its answer, or None where it died."""
        line = self.worker.next_line("an answer")
        return json.loads(line) if line else None

    def ask(self, **command: Any) -> dict[str, Any]:
        self.tell(**command)
        answer = self.answer()
        assert answer is not None, f"it died of {command}"
        return answer


@dataclass
class Told:
    """The outcome of each event of one id, as far as its writer reported it."""

    events: dict[int, str] = field(default_factory=dict)

    def of(self, what: str) -> set[int]:
        return {number for number, told in self.events.items() if told == what}


class Promise(RuleBasedStateMachine):
    """The machine; a test gives it `make_scene`."""

    make_scene: Callable[[], Scene]

    @initialize()
    def begin(self) -> None:
        first = type(self).make_scene()
        self.scenes = [first, Scene(first.events, first.bootstrap)]
        self.told = {scene.transactional_id: Told() for scene in self.scenes}
        self.actors: list[Actor] = []
        self.opened: list[Scene] = []
        self.number = 0

    # --- processes ------------------------------------------------------------------------------------------------

    @property
    def one_process(self) -> bool:
        return self.scenes[0].events.one_process

    def awake(self) -> list[Actor]:
        return [actor for actor in self.actors if actor.paused_with is None]

    def ready(self) -> list[Actor]:
        return [actor for actor in self.awake() if actor.is_open]

    def paused(self) -> list[Actor]:
        return [actor for actor in self.actors if actor.paused_with is not None]

    def gone(self, actor: Actor) -> None:
        actor.worker.kill()
        self.actors.remove(actor)

    # --- steps ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.actors) < (1 if self.one_process else 3))
    @rule(which=st.sampled_from([0, 0, 0, 1]))
    def start(self, which: int) -> None:
        self.actors.append(Actor(self.scenes[which]))
        self.open(self.actors[-1])

    @precondition(lambda self: self.awake())
    @rule(data=st.data())
    def take_the_id(self, data: st.DataObject) -> None:
        self.open(data.draw(st.sampled_from(self.awake())))

    def open(self, actor: Actor) -> None:
        answer = actor.ask(do="open", id=actor.scene.transactional_id)
        actor.is_open = "ok" in answer
        if actor.is_open and actor.scene not in self.opened:
            self.opened.append(actor.scene)
        if not actor.is_open:
            assert answer["error"] in REFUSED_TO_OPEN, answer
            assert self.paused(), answer  # no other process can interfere
            self.gone(actor)

    @precondition(lambda self: self.ready())
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        actor = data.draw(st.sampled_from(self.ready()))
        number = self.next_number(actor)
        actor.tell(do="write", number=number, at=None, action="")
        self.hear(actor, number)

    @precondition(lambda self: self.ready())
    @rule(data=st.data(), at=st.sampled_from(POINTS))
    def die(self, data: st.DataObject, at: str) -> None:
        actor = data.draw(st.sampled_from(self.ready()))
        number = self.next_number(actor)
        actor.tell(do="write", number=number, at=at, action="kill")
        self.hear(actor, number)

    @precondition(lambda self: self.ready() and self.scenes[0].events.locks_rows)
    @rule(data=st.data(), at=st.sampled_from(POINTS))
    def pause(self, data: st.DataObject, at: str) -> None:
        actor = data.draw(st.sampled_from(self.ready()))
        number = self.next_number(actor)
        actor.tell(do="write", number=number, at=at, action="stop")
        if actor.worker.wait_until_stopped(or_says=True):
            actor.paused_with = number
        else:
            self.hear(actor, number)

    @precondition(lambda self: self.paused())
    @rule(data=st.data())
    def wake(self, data: st.DataObject) -> None:
        actor = data.draw(st.sampled_from(self.paused()))
        number, actor.paused_with = actor.paused_with, None
        assert number is not None
        actor.worker.resume()
        self.hear(actor, number)

    @precondition(lambda self: self.actors)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        self.gone(data.draw(st.sampled_from(self.actors)))

    @precondition(lambda self: self.ready())
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        actor = data.draw(st.sampled_from(self.ready()))
        answer = actor.ask(do="close")
        assert "ok" in answer, answer
        self.gone(actor)

    @precondition(lambda self: self.awake() and self.opened)
    @rule(data=st.data())
    def recover(self, data: st.DataObject) -> None:
        actor, scene = data.draw(st.sampled_from(self.awake())), data.draw(st.sampled_from(self.opened))
        answer = actor.ask(do="recover", id=scene.transactional_id)["ok"]
        assert answer["unacknowledged"] == []
        assert answer["error"] is None or self.paused(), answer

    # --- outcomes -------------------------------------------------------------------------------------------------

    def next_number(self, actor: Actor) -> int:
        self.number += 1
        self.told[actor.scene.transactional_id].events[self.number] = UNKNOWN
        return self.number

    def hear(self, actor: Actor, number: int) -> None:
        events = self.told[actor.scene.transactional_id].events
        answer = actor.answer()
        if answer is None:  # it was killed at a failpoint
            self.gone(actor)
        elif "ok" in answer:
            events[number] = COMMITTED
        elif answer["error"] in TOLD_ROLLED_BACK:
            events[number] = ROLLED_BACK
        else:
            assert answer["error"] in TOLD_NOTHING, answer

    def teardown(self) -> None:
        for actor in list(getattr(self, "actors", [])):
            self.gone(actor)
        for scene in getattr(self, "scenes", []):
            told = self.told[scene.transactional_id]
            if not told.events:
                continue
            report = self.recovered(scene)
            assert (report["error"], report["unacknowledged"]) == (None, []), report
            there = set(scene.agree())
            assert told.of(COMMITTED) <= there, f"told as committed, and not there: {told.of(COMMITTED) - there}"
            assert not told.of(ROLLED_BACK) & there, f"told as rolled back, and there: {told.of(ROLLED_BACK) & there}"
            scene.write_here(self.number + 1)
            assert set(scene.agree()) == there | {self.number + 1}

    def recovered(self, scene: Scene) -> dict[str, Any]:
        """Recover; retry while the database is still ending the transactions of killed processes."""
        deadline = time.monotonic() + LIMIT
        while True:
            report = scene.recover()
            if report["error"] is None or time.monotonic() > deadline:
                return report


@pytest.mark.parametrize("database", DATABASES)
def test_random_steps_keep_both_sides_consistent(databases: Databases, broker: DevCluster, database: str) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]  # hypothesis leaves it untyped
        type("Promise", (Promise,), {"make_scene": staticmethod(lambda: databases.scene(database, broker))}),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            phases=[
                Phase.explicit,
                Phase.reuse,
                Phase.generate,
            ],  # shrinking a failure takes minutes; the steps are printed anyway
            suppress_health_check=list(HealthCheck),
            derandomize=bool(os.environ.get("CI")),
        ),
    )
