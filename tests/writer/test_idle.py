"""An idle writer clears the state of its last transaction from the row, without disturbing those who use it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import dualwrite
from dualwrite import DualWriter, FencedError, Phase, StoreUnavailableError
from dualwrite.recipe import idle
from fixtures.pace import LIMIT, done, happened, until
from writer.cases import producers_and_databases
from writer.scene import Scene


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane is idle after a moment, instead of a minute."""
    monkeypatch.setattr(idle, "CLEAR_AFTER", 0.05)


def clear_now(writer: DualWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the thread does once the writer is idle, at once and in this thread."""
    with monkeypatch.context() as patched:
        patched.setattr(idle, "CLEAR_AFTER", 0.0)
        writer._clear_if_idle()


def is_cleared(scene: Scene) -> bool:
    return all(row.prepared_state is None and row.delivery is None for row in scene.state_rows())


@pytest.mark.parametrize("lanes", [2])
@producers_and_databases
def test_the_states_of_an_idle_writer_are_cleared_and_it_continues(scene: Scene, soon: None) -> None:
    with scene.connect() as writer:
        for first in (1, 4):
            scene.write(writer, first, first + 1, first + 2)
            until(lambda: is_cleared(scene), "the states are cleared", pause=0.01)
            assert writer.phase is Phase.READY
    assert scene.agree() == [1, 2, 3, 4, 5, 6]
    scene.assert_resolved()


def test_nothing_is_cleared_while_a_transaction_is_open(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    with scene.connect() as writer, ThreadPoolExecutor(1) as another:
        scene.write(writer, 1)
        before = scene.state_row()
        assert before.prepared_state is not None
        with writer.transaction() as tx:
            scene.both(tx, 2)
            done(another.submit(clear_now, writer, monkeypatch))
            assert scene.state_row() == before
        during = scene.state_row()
        assert during.prepared_state not in (None, before.prepared_state)
        clear_now(writer, monkeypatch)
        assert is_cleared(scene)
    assert scene.agree() == [1, 2]


def test_a_thread_waits_while_states_are_cleared(scene: Scene, soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go_on = threading.Event(), threading.Event()
    with scene.connect() as writer, ThreadPoolExecutor(1) as user:
        resolve = writer.store.record_resolution

        def slow(*arguments: Any) -> None:
            entered.set()
            assert go_on.wait(LIMIT)
            resolve(*arguments)

        monkeypatch.setattr(writer.store, "record_resolution", slow)
        scene.write(writer, 1)
        happened(entered)
        using = user.submit(scene.write, writer, 2)
        assert not using.done()
        go_on.set()
        done(using)
        monkeypatch.undo()
    assert scene.agree() == [1, 2]


def test_clearing_in_many_short_pauses_disturbs_no_transaction(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread comes all the time, while two threads take turns with the writer."""
    monkeypatch.setattr(idle, "CLEAR_AFTER", 0.001)
    turn = threading.Lock()
    with scene.connect() as writer:

        def work(first: int) -> None:
            for number in range(first, first + 20):
                with turn:
                    scene.write(writer, number)

        with ThreadPoolExecutor(2) as users:
            for working in [users.submit(work, first) for first in (0, 100)]:
                working.result()
    assert scene.agree() == [*range(20), *range(100, 120)]
    scene.assert_resolved()


@pytest.mark.parametrize(
    "error", [StoreUnavailableError("It is away."), RuntimeError("A bug in a store.")], ids=["away", "bug"]
)
def test_clearing_is_retried_after_an_error_of_the_database(
    scene: Scene, soon: None, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with scene.connect() as writer:
        with monkeypatch.context() as away:
            failed = threading.Event()

            def fail(*_: object) -> None:
                failed.set()
                raise error

            away.setattr(writer.store, "record_resolution", fail)
            scene.write(writer, 1)
            happened(failed)
            scene.write(writer, 2)
        until(lambda: is_cleared(scene), "the states are cleared", pause=0.01)
    assert scene.agree() == [1, 2]


def test_a_fenced_writer_clears_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    with scene.connect() as writer:
        scene.write(writer, 1)
        with scene.connect() as successor:
            scene.write(successor, 2)
            row = scene.state_row()
            clear_now(writer, monkeypatch)
            assert scene.state_row() == row
            with pytest.raises(FencedError):
                scene.write(writer, 3)
            clear_now(writer, monkeypatch)  # not in this phase
            assert writer.phase is Phase.FENCED
    assert scene.agree() == [1, 2]


def test_closing_the_last_writer_ends_the_thread(scene: Scene, soon: None) -> None:
    with scene.connect() as writer:
        scene.write(writer, 1)
        assert any(thread.name == "dualwrite idle writers" and thread.daemon for thread in threading.enumerate())
    assert not [thread for thread in threading.enumerate() if thread.name == "dualwrite idle writers"]


def test_idle_states_of_a_pool_are_cleared(scene: Scene, soon: None) -> None:
    kafka = {"bootstrap.servers": scene.servers}
    with dualwrite.create_pool(scene.engine, prefix=scene.transactional_id, size=2, kafka=kafka) as pool:
        for number in (1, 2, 3):
            pool.run(scene.both, number)

            def are_cleared() -> bool:
                rows = map(pool.store.read, pool.store.list(f"{scene.transactional_id}."))
                return all(row is not None and row.prepared_state is None for row in rows)

            until(are_cleared, "the states of the pool's writers are cleared", pause=0.01)
    assert scene.agree() == [1, 2, 3]
