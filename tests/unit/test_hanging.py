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
from dualwrite.admin.hanging import (
    CoordinatorReports,
    Holder,
    Reason,
    confirmed,
    coordinator_reports,
    holders_of,
    is_late,
)
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


def described(status: S = S.ONGOING, *, producer_id: int = 7, epoch: int = 3, topic: str | None = "t") -> DescribedTransaction:
    partitions = frozenset() if topic is None else frozenset({(topic, 0)})
    return DescribedTransaction("id", 2, TransactionDescription(status, producer_id, epoch, 60_000, 1_000, partitions))


@table(
    ("answer", "expected"),
    [
        (described(), None),
        # EndTxn v5 and a timeout raise the epoch at the coordinator before the marker is written, in Kafka 4.0.0 twice
        *[(described(status, epoch=epoch), None) for status in ENDING for epoch in (3, 4, 5)],
        # no marker will be written
        *[(described(status, topic="another"), Reason.WITHOUT_PARTITION) for status in (S.ONGOING, *ENDING)],
        *[(described(status, epoch=4, topic=None), Reason.WITHOUT_PARTITION) for status in DONE],
        *[(described(S.ONGOING, epoch=epoch), Reason.OTHER_EPOCH) for epoch in (4, 5)],
        *[(described(status, epoch=5), Reason.OTHER_EPOCH) for status in (S.COMPLETE_ABORT, S.EMPTY)],
        (described(producer_id=8), Reason.OTHER_PRODUCER),
        (DescribedTransaction("id", 2, None), Reason.UNKNOWN_ID),
        # only a coordinator hands out epochs: one with an older epoch is cut off from the others, or has lost data
        *[(described(status, epoch=2), Reason.OLDER_EPOCH) for status in S],
        (None, Reason.NOT_DESCRIBED),
        (DescribedTransaction("id", 2, None, UNANSWERED), Reason.NOT_DESCRIBED),
    ],
)
def test_whether_a_transaction_hangs_by_its_coordinators_answer(
    answer: DescribedTransaction | None, expected: Reason | None
) -> None:
    reports = CoordinatorReports({7: LISTING}, {} if answer is None else {"id": answer}, all_listed=True)
    found = reports.holder(OPENED)
    assert found.hanging is expected
    assert (found.as_hanging and found.as_hanging.reason) is expected


def test_what_proves_nothing() -> None:
    doubts = {Reason.NOT_LISTED, Reason.NOT_DESCRIBED, Reason.SEVERAL_COORDINATORS, Reason.OLDER_EPOCH, Reason.NOT_CONFIRMED}
    assert {reason for reason in Reason if not reason.is_conclusive} == doubts


@table("all_listed", [False, True])
def test_an_unlisted_id_is_a_proof_only_if_the_list_is_complete(all_listed: bool) -> None:
    found = CoordinatorReports({}, {"id": described()}, all_listed).holder(OPENED)
    assert found.hanging is (Reason.UNKNOWN_PRODUCER if all_listed else Reason.NOT_LISTED)


@pytest.mark.parametrize("doubtful", [frozenset(), frozenset({7})])
def test_what_one_of_several_coordinators_contradicts_proves_nothing(doubtful: frozenset[int]) -> None:
    reports = CoordinatorReports({7: LISTING}, {"id": described(epoch=4)}, True, doubtful)
    assert reports.holder(OPENED).hanging is (Reason.SEVERAL_COORDINATORS if doubtful else Reason.OTHER_EPOCH)
    assert replace(reports, described={"id": described()}).holder(OPENED).hanging is None


@pytest.mark.parametrize(("listing", "describing"), [((2,), 2), ((2,), 3), ((2, 3), 2), ((2, 3), 3)])
def test_several_coordinators_are_noticed(listing: tuple[int, ...], describing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them is a former coordinator that is cut off from the others."""
    listed = Listed([replace(LISTING, coordinator=node) for node in listing])
    monkeypatch.setattr(hanging, "list_transactions", lambda *_: listed)
    monkeypatch.setattr(hanging, "describe_transactions", lambda *_: [replace(described(), coordinator=describing)])
    monkeypatch.setattr(Brokers, "coordinators", lambda _: {})
    with closing(Network(KafkaConfig.of("127.0.0.1:1"))) as network:
        reports = coordinator_reports(Brokers(network, Deadline.after(1), 1), [OPENED])
    assert (reports.doubtful == {7}) is ((listing, describing) != ((2,), 2))


# --- what is examined -----------------------------------------------------------------------------------------------------


@table(
    ("timestamp", "limit", "now", "late"),
    [
        (1_000, 500, 1_500, False),
        (1_000, 500, 1_501, True),
        (None, 500, 1_500, True),
        (1_000_000, 500, 1_500, True),  # in the future
        (1_000, 0, 1_000, True),  # without a limit
    ],
)
def test_the_limit_counts_from_the_last_batch(timestamp: int | None, limit: int, now: int, late: bool) -> None:
    opened = replace(OPENED, producer=replace(OPENED.producer, last_timestamp_ms=timestamp))
    assert is_late(opened, limit, now) is late


def test_a_producer_without_an_open_transaction() -> None:
    idle = replace(OPENED.producer, producer_id=8, transaction_start_offset=None)
    assert PartitionProducers("t", 0, 1, (OPENED.producer, idle)).opened == [OPENED]


# --- the second look --------------------------------------------------------------------------------------------------------

SUSPECT = Holder(OPENED, hanging=Reason.UNKNOWN_PRODUCER)


def again(*producers: ActiveProducer) -> dict[tuple[str, int], PartitionProducers]:
    return {("t", 0): PartitionProducers("t", 0, 1, producers)}


def test_a_transaction_that_is_still_open_is_confirmed() -> None:
    later = replace(OPENED.producer, last_timestamp_ms=2_000)
    assert list(confirmed([SUSPECT], again(later))) == [SUSPECT]


@pytest.mark.parametrize("change", [{"transaction_start_offset": None}, {"transaction_start_offset": 551}, {"epoch": 4}])
def test_a_transaction_that_has_ended_meanwhile_did_not_hang(change: dict[str, int | None]) -> None:
    assert not list(confirmed([SUSPECT], again(replace(OPENED.producer, **change))))  # type: ignore[arg-type]  # keyword arguments
    assert not list(confirmed([SUSPECT], again()))


@pytest.mark.parametrize("second", [{}, {("t", 0): PartitionProducers("t", 0, 1, problem=UNANSWERED)}])
def test_without_a_second_answer_nothing_is_decided(second: dict[tuple[str, int], PartitionProducers]) -> None:
    (found,) = confirmed([SUSPECT], second)
    assert found.hanging is Reason.NOT_CONFIRMED


@pytest.mark.parametrize("problem", [None, UNANSWERED])
def test_what_seemed_to_hang_and_does_not_when_it_is_checked_again(
    problem: BrokerUnavailableError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not left out, also if nobody describes it any more."""
    second = {"id": replace(described(), description=None, problem=problem) if problem else described()}
    sides = iter([CoordinatorReports({}, {}, all_listed=True), CoordinatorReports({7: LISTING}, second, all_listed=True)])
    monkeypatch.setattr(hanging, "coordinator_reports", lambda *_: next(sides))
    monkeypatch.setattr(hanging, "producers_of", lambda *_: again(OPENED.producer).values())
    monkeypatch.setattr(hanging, "_RECHECK_PAUSE_SECONDS", 0.0)
    with closing(Network(KafkaConfig.of("127.0.0.1:1"))) as network:
        (found,) = holders_of(Brokers(network, Deadline.after(1), 1), [OPENED])
    assert found == Holder(OPENED, "id", 2, second["id"].description, Reason.NOT_DESCRIBED if problem else None)
