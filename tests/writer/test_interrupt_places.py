"""An interrupt at places of a transaction, and of a writer's life, where Python looks for signals.

`test_interrupts.py` sends signals at random moments; this finds what is too short to be hit by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product

import pytest
from sqlalchemy import NullPool

from fixtures.tiers import thinned
from writer.cases import LIBRDKAFKA, NATIVE, POSTGRESQL, SQLITE
from writer.interruption import Interruption
from writer.scene import Scene

PLACES = 10
"""How many places a test takes, evenly distributed: a transaction has a thousand or more, a writer's life ten thousand."""

SHARES = 3
"""How many tests take different places, which follow one another: one in CI, all in a soak run."""

COMBINATIONS = [(3, NATIVE, POSTGRESQL), (1, LIBRDKAFKA, SQLITE)]
shares = pytest.mark.parametrize(
    ("lanes", "producer", "database", "share"),
    thinned(
        [(*combination, share) for combination, share in product(COMBINATIONS, range(SHARES))],
        kept=[(*COMBINATIONS[0], 0), (*COMBINATIONS[1], 1)],
        quick=[],
    ),
)


pytestmark = [
    # an interrupt inside a destructor, and of a driver that is opening or closing a connection, which it then just drops
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture
def scene(database: str, new_scene: Callable[..., Scene]) -> Scene:
    """A scene without a pool: SQLAlchemy's own loses slots, and may leave its lock locked, when it is interrupted."""
    return new_scene(database, engine_options={"poolclass": NullPool})


@shares
def test_an_interrupt_at_each_place_of_a_transaction(scene: Scene, share: int) -> None:
    done = []
    with scene.connect() as writer:
        scene.write(writer, *range(-5, 0))
        places = Interruption().run(partial(scene.write, writer, 0)).places
        for number in chosen(places, share):
            interruption = Interruption(number).run(partial(scene.write, writer, number))
            with shown(interruption):
                scene.write(writer, 10_000 + number)
            done += [10_000 + number, *([] if interruption.where else [number])]
    assert set(done) <= set(scene.agree())
    scene.assert_resolved()


@shares
def test_an_interrupt_at_each_place_of_a_writers_life(scene: Scene, share: int) -> None:
    done = []

    def live(number: int) -> None:
        with scene.connect() as writer:
            scene.write(writer, number)

    live(-1)
    places = Interruption().run(partial(live, 0)).places
    for number in chosen(places, share):
        interruption = Interruption(number).run(partial(live, number))
        with shown(interruption):
            live(100_000 + number)
        done += [100_000 + number, *([] if interruption.where else [number])]
    assert set(done) <= set(scene.agree())
    scene.assert_resolved()


def chosen(places: int, share: int) -> range:
    assert places > PLACES * SHARES / 2
    step = places // PLACES
    return range(1 + step * share // SHARES, places + 1, step)


@contextmanager
def shown(interruption: Interruption) -> Iterator[None]:
    """Add to an error where the interrupt was."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"after an interrupt at place {interruption.at}: {interruption.where}")
        raise
