"""When an open transaction hangs: the decision by itself."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest

from dualwrite.admin import hanging
from dualwrite.admin.facts import (
    ActiveProducer,
    DescribedTransaction,
    OpenTransaction,
    PartitionProducers,
    TransactionListing,
)
from dualwrite.admin.hanging import CoordinatorSide, HangingTransaction, Reason, confirmed, coordinator_side, is_late
from dualwrite.admin.listing import Listed
from dualwrite.admin.requests import Brokers
from dualwrite.deadline import Deadline
from dualwrite.errors import BrokerUnavailableError
from dualwrite.kafka.client.brokers import Network
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.state import TransactionDescription, TransactionStatus
from fixtures.tables import table

S = TransactionStatus
ENDING = (S.PREPARE_COMMIT, S.PREPARE_ABORT, S.PREPARE_EPOCH_FENCE)
DONE = (S.EMPTY, S.COMPLETE_COMMIT, S.COMPLETE_ABORT, S.DEAD)
OPENED = OpenTransaction("t", 0, 1, ActiveProducer(7, 3, 0, 1_000, None, 550))
LISTING = TransactionListing("id", 2, 7, "Ongoing")
UNANSWERED = BrokerUnavailableError("no answer")


def described(status: S = S.ONGOING, *, producer_id: int = 7, epoch: int = 3, topic: str = "t") -> DescribedTransaction:
    return DescribedTransaction(
        "id", 2, TransactionDescription(status, producer_id, epoch, 60_000, 1_000, frozenset({(topic, 0)}))
    )


def reason_of(answer: DescribedTransaction | None) -> Reason | None:
    side = CoordinatorSide({7: LISTING}, {} if answer is None else {"id": answer}, all_listed=True)
    verdict = side.verdict(OPENED)
    return None if verdict is None else verdict.reason


def test_a_transaction_that_the_coordinator_has_open_does_not_hang() -> None:
    assert reason_of(described()) is None


@table("status", ENDING)
@table("epoch", [3, 4, 5])
def test_a_transaction_whose_marker_is_pending_does_not_hang(status: S, epoch: int) -> None:
    """EndTxn v5 and a timeout raise the epoch at the coordinator before the marker is written, in Kafka 4.0.0 twice."""
    assert reason_of(described(status, epoch=epoch)) is None


@pytest.mark.parametrize("status", [S.ONGOING, *ENDING])
def test_without_the_partition_no_marker_will_be_written(status: S) -> None:
    assert reason_of(described(status, topic="another")) is Reason.WITHOUT_PARTITION


@pytest.mark.parametrize("status", DONE)
def test_after_the_end_no_marker_will_be_written(status: S) -> None:
    assert (
        reason_of(DescribedTransaction("id", 2, TransactionDescription(status, 7, 4, 60_000, 1_000)))
        is Reason.WITHOUT_PARTITION
    )


@pytest.mark.parametrize(("status", "epoch"), [(S.ONGOING, 4), (S.ONGOING, 5), (S.COMPLETE_ABORT, 5), (S.EMPTY, 5)])
def test_a_transaction_of_another_epoch(status: S, epoch: int) -> None:
    assert reason_of(described(status, epoch=epoch)) is Reason.OTHER_EPOCH


@table("status", S)
def test_a_coordinator_with_an_older_epoch_proves_nothing(status: S) -> None:
    """Only a coordinator hands out epochs: this one is cut off from the others, or has lost data."""
    assert reason_of(described(status, epoch=2)) is Reason.OLDER_EPOCH
    assert not Reason.OLDER_EPOCH.is_conclusive


def test_another_producer_id_or_a_forgotten_id_hangs() -> None:
    assert reason_of(described(producer_id=8)) is Reason.OTHER_PRODUCER
    assert reason_of(DescribedTransaction("id", 2, None)) is Reason.UNKNOWN_ID


@table("all_listed", [False, True])
def test_an_unlisted_id_is_a_proof_only_if_the_list_is_complete(all_listed: bool) -> None:
    verdict = CoordinatorSide({}, {"id": described()}, all_listed).verdict(OPENED)
    assert verdict is not None
    assert verdict.reason is (Reason.UNKNOWN_PRODUCER if all_listed else Reason.NOT_LISTED)
    assert verdict.reason.is_conclusive is all_listed


@pytest.mark.parametrize("answer", [None, DescribedTransaction("id", 2, None, UNANSWERED)])
def test_a_coordinator_that_does_not_answer_proves_nothing(answer: DescribedTransaction | None) -> None:
    assert reason_of(answer) is Reason.NOT_DESCRIBED
    assert not Reason.NOT_DESCRIBED.is_conclusive


@pytest.mark.parametrize("doubtful", [frozenset(), frozenset({7})])
def test_what_one_of_several_coordinators_contradicts_proves_nothing(doubtful: frozenset[int]) -> None:
    side = CoordinatorSide({7: LISTING}, {"id": described(epoch=4)}, True, doubtful)
    verdict = side.verdict(OPENED)
    assert verdict is not None
    assert verdict.reason is (Reason.SEVERAL_COORDINATORS if doubtful else Reason.OTHER_EPOCH)
    assert not Reason.SEVERAL_COORDINATORS.is_conclusive
    assert replace(side, described={"id": described()}).verdict(OPENED) is None


@pytest.mark.parametrize(("listing", "describing"), [((2,), 2), ((2,), 3), ((2, 3), 2), ((2, 3), 3)])
def test_several_coordinators_are_noticed(listing: tuple[int, ...], describing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them is a former coordinator that is cut off from the others."""
    listed = Listed([replace(LISTING, coordinator=node) for node in listing])
    monkeypatch.setattr(hanging, "list_transactions", lambda *_: listed)
    monkeypatch.setattr(hanging, "describe_transactions", lambda *_: [replace(described(), coordinator=describing)])
    monkeypatch.setattr(Brokers, "coordinators", lambda _: {})
    with closing(Network(KafkaConfig.of("127.0.0.1:1"))) as network:
        side = coordinator_side(Brokers(network, Deadline.after(1), 1), [OPENED])
    assert (side.doubtful == {7}) is ((listing, describing) != ((2,), 2))


# --- what is examined -----------------------------------------------------------------------------------------------------


def test_the_limit_counts_from_the_last_batch() -> None:
    assert not is_late(OPENED, 500, 1_500)
    assert is_late(OPENED, 500, 1_501)


@pytest.mark.parametrize("timestamp", [None, 1_000_000])
def test_without_a_timestamp_or_with_one_in_the_future_a_transaction_is_late(timestamp: int | None) -> None:
    assert is_late(replace(OPENED, producer=replace(OPENED.producer, last_timestamp_ms=timestamp)), 500, 1_500)


def test_without_a_limit_every_transaction_is_late() -> None:
    assert is_late(OPENED, 0, 1_000)


def test_a_producer_without_an_open_transaction() -> None:
    idle = replace(OPENED.producer, producer_id=8, transaction_start_offset=None)
    assert PartitionProducers("t", 0, 1, (OPENED.producer, idle)).opened == [OPENED]


# --- the second look --------------------------------------------------------------------------------------------------------

SUSPECT = HangingTransaction(OPENED, Reason.UNKNOWN_PRODUCER)


def again(*producers: ActiveProducer) -> dict[tuple[str, int], PartitionProducers]:
    return {("t", 0): PartitionProducers("t", 0, 1, producers)}


def test_a_transaction_that_is_still_open_is_confirmed() -> None:
    later = replace(OPENED.producer, last_timestamp_ms=2_000)
    assert confirmed([SUSPECT], again(later)) == [SUSPECT]


@pytest.mark.parametrize("change", [{"transaction_start_offset": None}, {"transaction_start_offset": 551}, {"epoch": 4}])
def test_a_transaction_that_has_ended_meanwhile_did_not_hang(change: dict[str, int | None]) -> None:
    assert confirmed([SUSPECT], again(replace(OPENED.producer, **change))) == []  # type: ignore[arg-type]  # keyword arguments
    assert confirmed([SUSPECT], again()) == []


@pytest.mark.parametrize("second", [{}, {("t", 0): PartitionProducers("t", 0, 1, problem=UNANSWERED)}])
def test_without_a_second_answer_nothing_is_decided(second: dict[tuple[str, int], PartitionProducers]) -> None:
    (found,) = confirmed([SUSPECT], second)
    assert found.reason is Reason.NOT_CONFIRMED
