"""Observers: which events each kind of work has, with which contents; and that observers can't fail the work."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

import dualwrite
from crash.scene import Scene
from crash.worker import timeouts
from dualwrite import ConfigurationError, DualWriter, StoreCommitFailedError
from dualwrite.observability import (
    Buffered,
    DatabaseCommitted,
    Event,
    GroupFormed,
    LeaseTaken,
    MessagesDelivered,
    StateRecorded,
    TransactionBegun,
    TransactionCommitted,
    TransactionEvent,
    TransactionRecovered,
    TransactionRolledBack,
    UnitEnded,
    add_observer,
    observing,
    remove_observer,
)
from dualwrite.observability.observers import notify
from dualwrite.testing import failpoints
from fixtures.pace import LIMIT
from pool.pool_scene import both, both_producers, grouped, open_pool, then_raise


def open_writer(scene: Scene, **options: Any) -> DualWriter[Any]:
    """A writer on the scene's id."""
    given = {"transactional_id": scene.transactional_id, "timeouts": timeouts(), "lanes": 1, **options}
    return dualwrite.connect(scene.events.database, kafka=scene.settings, **given)


def kinds(events: list[Event]) -> list[type[Event]]:
    """The events of transactions, by their class."""
    return [type(event) for event in events if isinstance(event, TransactionEvent)]


COMMITTED = [TransactionBegun, MessagesDelivered, StateRecorded, DatabaseCommitted, TransactionCommitted]


# --- transactions -----------------------------------------------------------------------------------------------------------


@both_producers
def test_a_transaction_reports_each_of_its_steps(scene: Scene, events: list[Event]) -> None:
    with open_writer(scene) as writer, writer.transaction() as tx:
        both(tx, scene, 1)
        both(tx, scene, 2)
    assert kinds(events) == COMMITTED
    of_it = [event for event in events if isinstance(event, TransactionEvent)]
    assert {event.transactional_id for event in of_it} == {scene.transactional_id}
    assert len({event.number for event in of_it}) == 1
    last = of_it[-1]
    assert isinstance(last, TransactionCommitted)
    assert (last.messages, last.outcome, last.was_in_doubt) == (2, "published", False)
    assert all(seconds > 0 for seconds in last.steps)
    assert sum(last.steps) <= last.seconds
    steps = [event.seconds for event in of_it if isinstance(event, MessagesDelivered | StateRecorded | DatabaseCommitted)]
    assert steps == list(last.steps[1:4])


def test_an_error_of_the_block_or_of_a_step_is_reported_as_raised(scene: Scene, events: list[Event]) -> None:
    error = ValueError("no")
    with open_writer(scene) as writer:
        with pytest.raises(ValueError, match="no"), writer.transaction() as tx:
            then_raise(tx, scene, 1, error)
        assert kinds(events) == [TransactionBegun, TransactionRolledBack]
        rolled_back = events[-1]
        assert isinstance(rolled_back, TransactionRolledBack)
        assert rolled_back.error is error
        events.clear()
        refused = StoreCommitFailedError("refused", transactional_id=scene.transactional_id)
        with (
            failpoints.armed("before_db_commit", raises(refused)),
            pytest.raises(StoreCommitFailedError),
            writer.transaction() as tx,
        ):
            both(tx, scene, 1)
        assert kinds(events) == [*COMMITTED[:3], TransactionRolledBack]
    assert scene.agree() == []


def test_what_is_found_committed_after_an_unknown_outcome_is_reported_as_committed(scene: Scene, events: list[Event]) -> None:
    cut = failpoints.armed("after_db_commit", raises(ConnectionError("cut")))
    with open_writer(scene) as writer, cut, suppress(ConnectionError), writer.transaction() as tx:
        both(tx, scene, 1)
    assert kinds(events) == COMMITTED
    last = next(event for event in events if isinstance(event, TransactionCommitted))
    assert last.was_in_doubt
    assert any(isinstance(event, TransactionRecovered) and event.outcome == "COMMITTED" for event in events)
    assert scene.agree() == [1]


def test_recovery_reports_what_a_dead_process_has_left(scene: Scene, events: list[Event]) -> None:
    scene.write(failpoints="after_db_commit=kill").killed()
    scene.recover()
    recovered = [event for event in events if isinstance(event, TransactionRecovered)]
    assert [event.outcome for event in recovered] == ["COMMITTED"]
    assert {event.transactional_id.partition("~")[0] for event in recovered} == {scene.transactional_id}


# --- pools ------------------------------------------------------------------------------------------------------------------


def test_a_group_reports_its_size_and_the_end_of_each_unit(scene: Scene, events: list[Event]) -> None:
    with open_pool(scene, size=1) as pool:
        assert [event.transactional_id for event in events if isinstance(event, LeaseTaken)] == list(pool.transactional_ids)
        error = KeyError("no")
        grouped(
            pool,
            partial(both, scene=scene, number=1),
            partial(then_raise, scene=scene, number=2, error=error),
            partial(both, scene=scene, number=3),
        )
        ended = [event for event in events if isinstance(event, UnitEnded) and event.unit != "held.<locals>.hold"]
        assert [event.error for event in ended] == [None, error, None]
        assert {event.prefix for event in ended} == {scene.transactional_id}
        assert all(0 <= event.waited <= event.seconds for event in ended)
        groups = [event for event in events if isinstance(event, GroupFormed)]
        assert groups[-1].units == 3
        assert groups[-1].number in {event.number for event in events if isinstance(event, TransactionCommitted)}
    assert scene.agree() == [1, 3]


# --- observers that fail ----------------------------------------------------------------------------------------


def test_an_observer_that_fails_is_logged_once_and_the_work_goes_on(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    def failing(_: Event) -> None:
        raise RuntimeError("disk full")

    with observing(failing), open_pool(scene, size=1) as pool:
        for number in (1, 2):
            pool.run(both, scene, number)
    assert scene.agree() == [1, 2]
    (record,) = [each for each in caplog.records if each.name.startswith("dualwrite.observability")]
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None


def test_a_buffered_observer_does_not_delay_the_work_and_counts_what_it_drops() -> None:
    release, seen = threading.Event(), []

    def slow(event: Event) -> None:
        release.wait(LIMIT)
        seen.append(event)

    buffered = Buffered(slow, capacity=3)
    for number in range(10):
        buffered(LeaseTaken("shop", f"shop.{number}"))
    assert buffered.dropped >= 6  # the thread may have taken one before the buffer was full
    release.set()
    buffered.close()
    assert len(seen) + buffered.dropped == 10
    with pytest.raises(ConfigurationError, match="capacity"):
        Buffered(slow, capacity=0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_buffered_observer_goes_on_in_a_forked_child() -> None:
    release, seen = threading.Event(), []

    def slow(event: Event) -> None:
        release.wait(LIMIT)
        seen.append(event)

    buffered = Buffered(slow, capacity=2)
    for number in range(5):
        buffered(LeaseTaken("shop", f"shop.{number}"))  # the thread has one, and the buffer is full
    if not (child := os.fork()):
        seen.clear()
        release.set()
        buffered(LeaseTaken("shop", "of the child"))
        buffered.close()
        os._exit(7 if [event.transactional_id for event in seen if isinstance(event, LeaseTaken)] == ["of the child"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    release.set()
    buffered.close()
    assert len(seen) + buffered.dropped == 5


def test_an_observer_is_told_only_while_it_is_added() -> None:
    seen: list[Event] = []
    add_observer(seen.append)
    add_observer(seen.append)
    event = LeaseTaken("shop", "shop.1")
    notify(event)
    remove_observer(seen.append)
    notify(event)
    assert seen == [event]


def raises(error: BaseException) -> Any:
    """An action of a failpoint."""

    def action() -> None:
        raise error

    return action
