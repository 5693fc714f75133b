"""`acknowledge="decided"`: a block ends with the database's commit; Kafka's is confirmed later, whatever happens in between."""

# ruff: noqa: PT012  (a block of several statements is what is tested: its end must raise)

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import dualwrite
from dualwrite import (
    BrokerUnavailableError,
    ConfigurationError,
    DualWriter,
    FencedError,
    InDoubtTransactionError,
    LostTransactionError,
    Outcome,
    Phase,
    Timeouts,
)
from dualwrite.devcluster import DevCluster
from dualwrite.recipe import idle, lanes
from dualwrite.recipe.phases import Change
from dualwrite.testing import failpoints
from fixtures.broker import started
from fixtures.pace import LIMIT, limit, until, until_recorded
from writer.cases import both_databases
from writer.scene import Scene

with_lanes = pytest.mark.parametrize("lanes", [1, 3])
confirmed_at_once = pytest.mark.usefixtures("soon")


@pytest.fixture(scope="module")
def own_broker() -> Iterator[DevCluster]:
    """A broker to pause and kill."""
    with started() as cluster:
        yield cluster


@pytest.fixture
def own_scene(new_scene: Callable[..., Scene], own_broker: DevCluster) -> Iterator[Scene]:
    yield new_scene("postgresql", own_broker.bootstrap_servers)
    own_broker.resume()
    own_broker.start(timeout=LIMIT)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer without transactions confirms its last one after a moment, instead of a second."""
    monkeypatch.setattr(idle, "CONFIRM_AFTER", 0.05)


def connected(scene: Scene, **changes: Any) -> DualWriter:
    return scene.connect(acknowledge="decided", **changes)


def phases(writer: DualWriter) -> list[Phase]:
    return [lane.phase for lane in writer._lanes]


def raised(error: Exception) -> Callable[..., None]:
    def fail(**_: Any) -> None:
        raise error

    return fail


def write_while_silent(scene: Scene, broker: DevCluster, writer: DualWriter, number: int) -> None:
    """A transaction that the database commits just after the broker has stopped responding."""
    with failpoints.armed("before_kafka_commit", broker.pause):
        scene.write(writer, number)


@with_lanes
@both_databases
def test_transactions_follow_each_other(scene: Scene) -> None:
    with connected(scene) as writer:
        for number in range(1, 9):
            scene.write(writer, number)
            assert writer.phase is Phase.READY
            assert Phase.CONFIRMING in phases(writer)
        with writer.transaction() as tx:  # nothing was sent
            scene.insert(tx, 9)
        with pytest.raises(ZeroDivisionError), writer.transaction() as tx:
            scene.both(tx, 99)
            raise ZeroDivisionError
        scene.write(writer, 10)
        writer.reopen()
        scene.write(writer, 11)
    assert scene.rows() == [*range(1, 12)]
    assert scene.messages() == [*range(1, 9), 10, 11]
    scene.assert_resolved()


@confirmed_at_once
def test_a_writer_without_transactions_confirms_its_last_one(scene: Scene) -> None:
    with connected(scene) as writer:
        scene.write(writer, 1)
        until(lambda: phases(writer) == [Phase.READY], "it is confirmed", pause=0.01)
        assert scene.agree() == [1]
        scene.write(writer, 2)
    assert scene.agree() == [1, 2]


def test_kafka_commits_before_its_response_is_read(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "CONFIRM_AFTER", LIMIT)
    with connected(scene) as writer:
        scene.write(writer, 1)
        until_recorded(scene.messages, [1])
        assert phases(writer) == [Phase.CONFIRMING]


def test_a_recovery_that_fails_does_not_delay_the_commits_of_other_lanes(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "CONFIRM_AFTER", LIMIT)  # the test calls what the thread would call
    monkeypatch.setattr(lanes, "CHECK_LIMIT", LIMIT)
    with connected(scene, lanes=2) as writer:
        scene.write(writer, 1)
        confirmed, broken = writer._lanes
        assert (confirmed.phase, broken.phase) == (Phase.CONFIRMING, Phase.READY)
        broken.advance(Change.BROKEN)
        with failpoints.armed("recover_after_claim", raised(BrokerUnavailableError("no leader"))):
            writer._clear_if_idle()
        assert (confirmed.phase, broken.phase) == (Phase.READY, Phase.NEEDS_RECOVERY)
        assert scene.agree() == [1]
        scene.write(writer, 2)
    assert scene.agree() == [1, 2]


def test_a_commit_without_a_response_does_not_delay_those_of_other_lanes(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "CONFIRM_AFTER", LIMIT)
    monkeypatch.setattr(lanes, "CHECK_LIMIT", LIMIT)
    with connected(scene, lanes=2) as writer:
        scene.write(writer, 1, 2)
        silent = next(iter(writer._lanes))
        with monkeypatch.context() as patched:
            patched.setattr(silent.ownership.producer, "commit_transaction", raised(BrokerUnavailableError("silent")))
            writer._clear_if_idle()
            assert phases(writer) == [Phase.CONFIRMING, Phase.READY]
        scene.write(writer, 3)
    assert scene.agree() == [1, 2, 3]


def test_what_is_refused(scene: Scene) -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)acknowledge is 'soon'.*visible, decided"):
        scene.connect(acknowledge="soon")
    with pytest.raises(ConfigurationError, match="requires two-phase commit"):
        connected(scene, two_phase=False)
    with pytest.raises(TypeError, match="PoolOptions"):
        dualwrite.create_pool(scene.engine, kafka=scene.servers, prefix="p", acknowledge="decided")
    assert scene.state_rows() == []


@pytest.mark.slow
@with_lanes
def test_a_block_ends_before_kafka_responds(own_scene: Scene, own_broker: DevCluster) -> None:
    scene = own_scene
    with connected(scene) as writer:
        scene.write(writer, 1)
        write_while_silent(scene, own_broker, writer, 2)
        assert scene.rows() == [1, 2]
        assert Phase.CONFIRMING in phases(writer)
        own_broker.resume()
        scene.write(writer, 3, 4, 5)
    assert scene.agree() == [1, 2, 3, 4, 5]
    scene.assert_resolved()


@pytest.mark.slow
@confirmed_at_once
def test_consumers_get_the_messages_after_the_broker_was_killed(own_scene: Scene, own_broker: DevCluster) -> None:
    """Without another transaction: the request is lost with the broker, and sent again."""
    scene = own_scene
    with connected(scene) as writer:
        write_while_silent(scene, own_broker, writer, 1)
        own_broker.kill()
        assert writer.phase is Phase.READY
        own_broker.start(timeout=LIMIT)
        until_recorded(scene.messages, [1])
        until(lambda: phases(writer) == [Phase.READY], "it is confirmed", pause=0.01)
        scene.write(writer, 2)
    assert scene.agree() == [1, 2]


@pytest.mark.slow
def test_the_next_transaction_waits_for_the_lost_commit(own_scene: Scene, own_broker: DevCluster) -> None:
    """The broker is killed before the request, and after it."""
    scene = own_scene
    with connected(scene) as writer:
        with failpoints.armed("before_kafka_commit", own_broker.kill):
            scene.write(writer, 1)
        own_broker.start(timeout=LIMIT)
        write_while_silent(scene, own_broker, writer, 2)
        own_broker.kill()
        own_broker.start(timeout=LIMIT)
        scene.write(writer, 3)
    assert scene.agree() == [1, 2, 3]
    scene.assert_resolved()


@pytest.mark.slow
def test_closing_while_kafka_does_not_respond(own_scene: Scene, own_broker: DevCluster) -> None:
    """Whoever recovers next commits it."""
    scene = own_scene
    patient = Timeouts(claim=LIMIT, kafka=LIMIT, delivery=LIMIT)
    writer = connected(scene, timeouts=patient)
    for lane in writer._lanes:
        lane.ownership.parties.timeouts = replace(patient, kafka=limit(1))
    write_while_silent(scene, own_broker, writer, 1)
    with pytest.raises(InDoubtTransactionError, match="could not be resolved"):
        writer.close()
    own_broker.resume()
    found = [outcome.outcome for outcome in scene.recover()]
    assert found in ([Outcome.COMMITTED], [Outcome.ALREADY_COMMITTED])  # the request may have been executed
    assert scene.agree() == [1]
    scene.assert_resolved()


@both_databases
def test_a_successor_recovers_what_is_not_confirmed(scene: Scene) -> None:
    with connected(scene) as writer:
        scene.write(writer, 1)
        with connected(scene) as successor:
            scene.write(successor, 2)
            with pytest.raises(FencedError):
                scene.write(writer, 3)
            scene.write(successor, 4)
    assert scene.agree() == [1, 2, 4]
    scene.assert_resolved()


@pytest.mark.usefixtures("losses_stay")
def test_a_commit_that_an_operator_has_prevented_is_recorded_as_lost(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    with connected(scene) as writer:
        scene.write(writer, 1)
        with failpoints.armed("before_kafka_commit", scene.abort):
            scene.write(writer, 2)
        with caplog.at_level(logging.ERROR):
            scene.write(writer, 3)
        assert "its messages are lost" in caplog.text
    assert scene.rows() == [1, 2, 3]
    assert scene.messages() == [1, 3]
    with pytest.raises(LostTransactionError):
        connected(scene)


def test_an_interrupt_before_and_after_the_request(scene: Scene) -> None:
    with connected(scene) as writer:
        for number, point in enumerate(["before_kafka_commit", "decided_after_request"]):
            with failpoints.armed(point, failpoints.raises(KeyboardInterrupt())), pytest.raises(KeyboardInterrupt):
                scene.write(writer, number)
        scene.write(writer, 2)
    assert scene.agree() == [0, 1, 2]
    scene.assert_resolved()


def test_groups_of_a_pool_end_with_the_decision(scene: Scene) -> None:
    options = dualwrite.PoolOptions(acknowledge="decided")
    kafka = {"bootstrap.servers": scene.servers}
    with dualwrite.create_pool(scene.engine, kafka=kafka, prefix=scene.transactional_id, options=options) as pool:
        for number in range(1, 9):
            pool.run(scene.both, number)
    assert scene.agree() == [*range(1, 9)]
