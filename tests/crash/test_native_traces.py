"""The model's traces about taking over a native producer's id, replayed on a real broker and PostgreSQL (rules F5, NG).

As in test_traces.py, the process that overtakes a claimant runs inside a failpoint's action, where the claimant would be
paused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import dualwrite
from crash.databases import Databases
from crash.scene import InThread, Scene
from dualwrite.deadline import Limit
from dualwrite.devcluster import DevCluster
from dualwrite.kafka.base import EndingTransaction, EndTxnResult, InitProducerIdResult, NewProducerId
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.client.kafka_errors import ErrorCode
from dualwrite.kafka.native.native_producer import NativeProducer
from dualwrite.state import TransactionStatus
from dualwrite.testing import failpoints
from fixtures.pace import LIMIT, happened

Ended = list[tuple[int, bool, EndTxnResult]]


pytestmark = pytest.mark.usefixtures("native", "one_lane")  # the traces are about one id


@pytest.fixture
def scene(databases: Databases, broker: DevCluster) -> Scene:
    """An id that has been used, so that it is taken over by EndTxn."""
    made = databases.scene("postgresql", broker)
    made.write_here(1)
    assert made.unfinished() == []  # its markers are written, so recovery does not wait for them
    return made


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Ended:
    """Every EndTxn that recovery or a take-over in this process sends: epoch, whether to commit, the answer."""
    seen: Ended = []
    real = WireTransactionCoordinator.end_all

    def end_all(self: WireTransactionCoordinator, endings: Sequence[EndingTransaction], **limit: Any) -> list[EndTxnResult]:
        answers = real(self, endings, **limit)
        seen.extend((asked.epoch, asked.commit, answer) for asked, answer in zip(endings, answers, strict=True))
        return answers

    monkeypatch.setattr(WireTransactionCoordinator, "end_all", end_all)
    return seen


def test_a_zombies_late_take_over_does_not_end_its_successors_prepared_transaction(scene: Scene, ended: Ended) -> None:
    """The zombie has described the id and decided; its EndTxn is sent after the successor has prepared and committed."""

    def overtake() -> None:
        worker = scene.write(2, 1, "after_db_commit=kill")
        worker.killed()

    with failpoints.armed("recover_after_decision", failpoints.only_at(1, overtake)), pytest.raises(dualwrite.FencedError):
        scene.connect()
    (_, commit, answer), *more = ended
    assert not commit
    assert not answer.proven  # a compare-and-set on the epoch that was described: the successor was faster
    assert not more
    assert scene.described().status is TransactionStatus.ONGOING
    assert scene.recover()["outcomes"] == ["COMMITTED"]
    assert scene.agree() == [1, 2]


def test_two_claimants_that_abort_the_same_epoch_get_the_same_answer_and_one_goes_on(scene: Scene, ended: Ended) -> None:
    """The successor has aborted the described epoch and is paused; the zombie aborts the same one, and adopts the answer.

    Only then does the successor continue and write; the zombie checks its fencing token after that, before it sends anything.
    """
    go_on = threading.Event()
    successors: list[dualwrite.DualWriter] = []
    opening = InThread(lambda: successors.append(scene.connect()))
    paused = threading.Event()

    def open_the_successor() -> None:
        opening.start()
        happened(paused)

    def pause_the_successor() -> None:
        paused.set()
        happened(go_on)

    def let_it_write() -> None:
        go_on.set()
        opening.result()
        for number in (2, 3):
            scene.event(successors[0], number)

    with (
        failpoints.armed("recover_after_decision", failpoints.only_at(1, open_the_successor)),
        failpoints.armed("before_take_over", failpoints.only_at(2, pause_the_successor)),  # the zombie was here before
        failpoints.armed("after_take_over", failpoints.only_at(1, let_it_write)),
        pytest.raises(dualwrite.FencedError),
    ):
        scene.connect()
    theirs, late = ended[:2]
    assert theirs[:2] == late[:2] == (theirs[0], False)
    assert theirs[2] == late[2]  # EndTxn v5 is idempotent: both get the same producer id and epoch to continue with
    assert late[2].proven
    scene.event(successors[0], 4)
    successors[0].close()
    assert scene.agree() == [1, 2, 3, 4]


def test_a_shared_epoch_would_mix_transactions(scene: Scene, broker: DevCluster) -> None:
    """Why that must be prevented: the second producer's batch is acknowledged with the first one's offset, and never stored."""
    first, second = (NativeProducer(KafkaConfig.of(scene.bootstrap), f"shared-{scene.transactional_id}") for _ in range(2))
    try:
        assert first.create(timeout=LIMIT)
        second.adopt(*first.identity, timeout_ms=60_000)
        for sharing, value in ((first, b"1"), (second, b"2")):
            sharing.begin_transaction()
            sharing.send(scene.topic, value, partition=0)
            assert sharing.prepare_transaction(timeout=LIMIT) is not None
        first.commit_transaction(timeout=LIMIT)
        assert scene.messages() == [1, 1]  # the one of the fixture, and the first producer's; the second's is nowhere
    finally:
        first.close()
        second.close()


def test_an_id_that_is_created_twice_at_once_has_one_holder(databases: Databases, broker: DevCluster) -> None:
    """Both found the id unknown; the later one gets the answer that it exists, and then finds its claim replaced."""
    scene = databases.scene("postgresql", broker)
    real = WireTransactionCoordinator.create_all
    successors: list[dualwrite.DualWriter] = []

    def create_all(self: WireTransactionCoordinator, *arguments: Any, **limit: Any) -> list[InitProducerIdResult]:
        if not successors:
            successors.append(None)  # type: ignore[arg-type]  # a mark: the one inside creates without delay
            successors[0] = scene.connect()
        return real(self, *arguments, **limit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WireTransactionCoordinator, "create_all", create_all)
        with pytest.raises(dualwrite.FencedError):
            scene.connect()
    with successors[0] as successor:
        scene.event(successor, 1)
    assert scene.agree() == [1]


Registered = list[NewProducerId]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], bool]], Registered]:
    """Play a broker without an InitProducerId that can only create: every registration is a plain one.

    `before` is called with the number of each before it is sent; if it returns False, the request is delayed in the network.
    """

    def play(before: Callable[[int], bool]) -> Registered:
        seen: Registered = []

        def create_all(
            self: WireTransactionCoordinator, new: Sequence[NewProducerId], *, timeout: Limit | None = None
        ) -> list[InitProducerIdResult]:
            (each,) = new
            seen.append(each)
            if not before(len(seen)):
                return [InitProducerIdResult(ErrorCode.NETWORK_EXCEPTION, "NETWORK_EXCEPTION")]
            return [sent_plainly(self, each)]

        monkeypatch.setattr(WireTransactionCoordinator, "create_all", create_all)
        return seen

    return play


def sent_plainly(coordinator: WireTransactionCoordinator, new: NewProducerId) -> InitProducerIdResult:
    return coordinator.init_producer_id(
        new.kafka_transactional_id, timeout_ms=new.timeout_ms, two_phase=new.two_phase, timeout=LIMIT
    )


def test_a_zombies_late_registration_does_not_end_its_successors_prepared_transaction(
    databases: Databases, broker: DevCluster, plain: Callable[[Callable[[int], bool]], Registered]
) -> None:
    """Both found the id unknown. The successor has a generation of its own."""
    scene = databases.scene("postgresql", broker)

    def overtaken(_: int) -> bool:
        scene.write(1, 1, "after_db_commit=kill").killed()
        return True

    plain(overtaken)
    with pytest.raises(dualwrite.FencedError):
        scene.connect()
    assert scene.recover()["outcomes"] == ["COMMITTED"]
    assert scene.agree() == [1]


def test_a_registration_without_an_answer_does_not_end_a_later_transaction(
    databases: Databases, broker: DevCluster, plain: Callable[[Callable[[int], bool]], Registered]
) -> None:
    """It arrives when the writer, under its next generation, has prepared a transaction and committed the database."""
    scene = databases.scene("postgresql", broker)
    seen = plain(lambda number: number > 1)
    with scene.connect() as writer, scene.coordinator() as coordinator:
        first, second = (each.kafka_transactional_id for each in seen)
        assert writer.kafka_transactional_ids == (second,)
        assert first != second
        arrives = failpoints.only_at(1, lambda: sent_plainly(coordinator, seen[0]))
        with failpoints.armed("after_db_commit", arrives):
            scene.event(writer, 1)
        scene.event(writer, 2)
    assert scene.agree() == [1, 2]
