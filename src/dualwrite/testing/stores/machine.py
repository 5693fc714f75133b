"""A Hypothesis state machine: random steps of several writers, crashes and recoveries, compared with a model.

::

    def test_random_steps():
        with MyScene() as scene:
            run_random_steps(scene)

Any writer may do anything between the steps of another, and may be paused for long and continue as a zombie. Kafka is
simulated in the model: this tests what the database guarantees. Kafka's part is tested by the suite of producers, and both
together by whole writers on a real broker. The steps and the model are in `simulation`.

After every step the row and the user's data are what the model says; what Kafka has committed is in the database, and what it
has aborted is not. At the end of each run all writers stop where they are, one recovers, and database and topic agree.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from dualwrite.state import ProducerKind
from dualwrite.testing.stores.scene import StoreScene
from dualwrite.testing.stores.simulation import WRITERS, Simulation, Writer

EXAMPLES_VARIABLE: Final = "DUALWRITE_STATE_MACHINE_EXAMPLES"
"""Environment variable: how many runs, instead of the default."""

_EXAMPLES: Final = 25
_STEPS: Final = 25
_WHOLE_RECIPE: Final = 8
_WHO: Final = st.integers(0, WRITERS - 1)

Condition = Callable[[Simulation, Writer], bool]

_INTERFERENCES: Final[dict[str, Condition]] = {
    "claims": lambda _, writer: writer.open is None,
    "claims_again": lambda s, writer: s.is_free and writer.claim is not None and writer.open is None,
    "writes": lambda _, writer: writer.open is not None and writer.recorded is None,
    "rolls_back": lambda _, writer: writer.open is not None,
    "commits_without_an_answer": lambda s, writer: s.scene.capabilities.cuts_commits and writer.recorded is not None,
    "closes": lambda s, writer: s.is_free and writer.is_idle and writer.ready,
    "finds_lost": lambda s, writer: s.is_free and writer.claim is not None,
    "acknowledges": lambda s, _: s.is_free and s.row is not None,
    "forgets": lambda s, _: s.is_free and s.row is not None,
    "crashes": lambda s, writer: s.scene.capabilities.crashes and writer.claim is not None,
}
"""What a writer, or another user of its store, may do in addition to the recipe, and under which condition."""


class StoreMachine(RuleBasedStateMachine):
    """See the module's docstring."""

    def __init__(self, scene: StoreScene) -> None:
        super().__init__()
        self.simulation = Simulation(scene)

    @rule(
        who=_WHO,
        steps=st.integers(1, _WHOLE_RECIPE),
        sends=st.booleans(),
        kind=st.sampled_from(ProducerKind),
        reuse=st.booleans(),
        closes=st.booleans(),
    )
    def continues_recipe(self, who: int, steps: int, sends: bool, kind: ProducerKind, reuse: bool, closes: bool) -> None:
        """A writer continues the recipe by some steps; with `closes` it closes instead of beginning a transaction."""
        for _ in range(steps):
            writer = self.simulation.writers[who]
            match self._next(writer):
                case None:
                    return
                case "begins" if closes and self.simulation.is_free:
                    self._run_step("closes", writer)
                    return
                case "begins":
                    self._run_step("begins", writer, sends=sends)
                case "resolves":
                    self._run_step("resolves", writer, kind, reuse=reuse)
                case step:
                    self._run_step(step, writer)

    @rule(who=_WHO, what=st.sampled_from(sorted(_INTERFERENCES)), number=st.integers(0, 3), arrives=st.booleans())
    def interferes(self, who: int, what: str, number: int, arrives: bool) -> None:
        """Something happens that is not part of the recipe: `what` if possible, else the next possible thing."""
        writer = self.simulation.writers[who]
        names = sorted(_INTERFERENCES)
        later = names[names.index(what) :] + names[: names.index(what)]
        for name in later:
            if _INTERFERENCES[name](self.simulation, writer):
                match name:
                    case "finds_lost":
                        self._run_step(name, writer, number)
                    case "commits_without_an_answer":
                        self._run_step(name, writer, arrives=arrives)
                    case _:
                        self._run_step(name, writer)
                return

    def _next(self, writer: Writer) -> str | None:
        """The recipe's next step, or None if it would have to wait for another's transaction."""
        simulation = self.simulation
        alone = simulation.holder() in (None, writer)
        steps: list[tuple[bool, str, bool]] = [
            (writer.claim is None, "claims", True),
            (writer.committed, "commits_at_kafka", True),
            (writer.recorded is not None, "commits", True),
            (writer.open is not None, "records", alone),
            (writer.ready, "begins", simulation.may_begin),
            (writer.row is not None, "resolves", alone),
            (writer.described is not None, "reads", True),
        ]
        return next((name if can else None for due, name, can in steps if due), "describes")

    def _run_step(self, step: str, writer: Writer, *arguments: Any, **choices: Any) -> None:
        note(f"    {writer.name} {step} {' '.join(map(str, [*arguments, *choices.values()]))}")
        getattr(self.simulation, step)(writer, *arguments, **choices)
        self.simulation.check()

    def teardown(self) -> None:
        """End a run."""
        self.simulation.end()


def run_random_steps(scene: StoreScene, *, examples: int | None = None, steps: int = _STEPS) -> None:
    """Run the machine on a scene.

    Args:
        scene: The scene to run on.
        examples: How many runs; None: the value of the environment variable EXAMPLES_VARIABLE, or 25.
        steps: How many times, in each run, a writer continues or something else happens.
    """
    chosen = settings(
        max_examples=examples or int(os.environ.get(EXAMPLES_VARIABLE, _EXAMPLES)),
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )

    class MachineOnScene(StoreMachine):
        def __init__(self) -> None:
            super().__init__(scene)

    run_state_machine_as_test(MachineOnScene, settings=chosen)
