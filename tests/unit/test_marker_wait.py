"""A producer looks for the markers of its last transaction only where they have taken longer than the time that has passed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from dualwrite.deadline import Deadline
from dualwrite.errors import BrokerUnavailableError
from dualwrite.kafka.native import retry_policy
from dualwrite.kafka.native.retry_policy import AT_FIRST, CHECK_AGAIN_AFTER, MarkerWait
from dualwrite.state import TransactionDescription, TransactionStatus


class Kafka:
    """A clock, and a coordinator whose markers take `markers_take` seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.markers_take = 0.0
        self.looks = 0
        self.is_away = False
        self.round_trip = 0.0
        self._ended_at = 0.0
        self.wait = MarkerWait(self._describe)
        monkeypatch.setattr(retry_policy.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(retry_policy.time, "sleep", self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def _describe(self, limit: Deadline) -> TransactionDescription:
        self.looks += 1
        if self.is_away or limit.expired or limit.left < self.round_trip:
            raise BrokerUnavailableError("away" if self.is_away else "no time left")
        self.now += self.round_trip
        is_written = self.now >= self._ended_at + self.markers_take
        status = TransactionStatus.COMPLETE_COMMIT if is_written else TransactionStatus.PREPARE_COMMIT
        return TransactionDescription(status, 1, 1, 1, 1)

    def late_messages_of(self, takes: Sequence[float], *, pause: float) -> int:
        """How many messages come too early, and are answered late, if the markers take so many seconds."""
        late = 0
        for self.markers_take in takes:
            self._ended_at = self.now
            self.wait.transaction_ended()
            self.now += pause
            self.wait.wait(Deadline.after(60))
            is_late = self.now < self._ended_at + self.markers_take
            late += is_late
            taken = 0.0205 if is_late else 0.0005
            self.now += taken
            self.wait.flushed(taken)
        return late

    def looks_of(self, *, pause: float, transactions: int = 1) -> int:
        """How many looks so many transactions make, each so many seconds after the end of the one before."""
        before = self.looks
        for _ in range(transactions):
            self._ended_at = self.now
            self.wait.transaction_ended()
            self.now += pause
            self.wait.wait(Deadline.after(60))
        return self.looks - before


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> Kafka:
    return Kafka(monkeypatch)


def test_markers_written_in_time_are_not_checked_every_time(kafka: Kafka) -> None:
    kafka.markers_take = 0.001
    assert kafka.looks_of(pause=0.005) == 1
    assert kafka.looks_of(pause=0.006, transactions=CHECK_AGAIN_AFTER) == 0


def test_markers_are_checked_again_from_time_to_time(kafka: Kafka) -> None:
    kafka.looks_of(pause=0.005)
    assert kafka.looks_of(pause=0.006, transactions=CHECK_AGAIN_AFTER + 1) == 1
    kafka.looks_of(pause=0.006, transactions=CHECK_AGAIN_AFTER)
    kafka.markers_take = 0.03
    assert kafka.looks_of(pause=0.006) > 1
    assert kafka.looks_of(pause=0.04) == 1, "twice as long as they took"


def test_after_a_pause_markers_are_not_checked(kafka: Kafka) -> None:
    assert kafka.looks_of(pause=2 * AT_FIRST, transactions=200) == 0


def test_slow_markers_are_waited_for(kafka: Kafka) -> None:
    kafka.markers_take = 0.02
    before = kafka.now
    kafka.looks_of(pause=0.001)
    assert before + 0.02 <= kafka.now < before + 0.05


def test_the_wait_is_limited(kafka: Kafka) -> None:
    kafka.markers_take = 1000.0
    before = kafka.now
    assert kafka.looks_of(pause=0.001) <= 12
    assert kafka.now < before + 0.2


@pytest.mark.parametrize("round_trip", [0.0, 0.0005, 0.006, 0.01, 0.02])
def test_markers_slower_than_the_limit_are_waited_for_each_time(kafka: Kafka, round_trip: float) -> None:
    """The coordinator responds each time, so this is not a slow connection."""
    kafka.markers_take, kafka.round_trip = 0.2, round_trip
    for pause in (0.001, 0.09, 0.09):
        before = kafka.now
        assert kafka.looks_of(pause=pause) > 1
        assert kafka.now >= before + pause + 0.099 - round_trip
    assert kafka.looks_of(pause=0.11) == 0, "longer than the limit is never waited"


def test_a_coordinator_that_does_not_respond_in_time_is_asked_more_and_more_rarely(kafka: Kafka) -> None:
    """Each time costs the connection. Once it responds, it is asked as before."""
    kafka.is_away = True
    for skipped in (CHECK_AGAIN_AFTER, 2 * CHECK_AGAIN_AFTER, 4 * CHECK_AGAIN_AFTER):
        assert kafka.looks_of(pause=0.001) == 1
        assert kafka.looks_of(pause=0.001, transactions=skipped) == 0
    kafka.is_away = False
    kafka.markers_take = 0.02
    assert kafka.looks_of(pause=0.001) > 1
    kafka.is_away = True
    assert kafka.looks_of(pause=0.001) == 1
    assert kafka.looks_of(pause=0.001, transactions=CHECK_AGAIN_AFTER + 1) == 1


def test_markers_that_sometimes_take_longer_than_the_pause_make_few_messages_late(kafka: Kafka) -> None:
    """As with one id on a fast broker: a late message costs as much as fifty checks."""
    chance = random.Random(3)
    takes = [chance.choice((0.0003, 0.0004, 0.0005, 0.0012)) for _ in range(1000)]
    assert kafka.late_messages_of(takes, pause=0.0006) < 40
    assert 0 < kafka.looks < 2500


def test_a_slow_broker_after_a_long_pause_says_nothing_about_markers(kafka: Kafka) -> None:
    kafka.looks_of(pause=2 * AT_FIRST)
    kafka.wait.flushed(1.0)
    assert kafka.looks_of(pause=2 * AT_FIRST, transactions=10) == 0
