"""An outage is logged once when it begins and once when it is over, however many calls wait or fail."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from dualwrite import outages
from dualwrite.errors import (
    BrokerUnavailableError,
    MessageRefusedError,
    ProducerFencedError,
    StoreCommitUnknownError,
    StoreLockedError,
    StoreUnavailableError,
)
from dualwrite.observability import Event, OutageBegan, OutageEnded, observing
from dualwrite.outages import DATABASE, DELIVERY, REQUEST, Side, database_at, kafka_at
from fixtures.pace import happened, joined, until
from fixtures.tables import table

NO_BROKER = BrokerUnavailableError("No broker.")


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "SLOW", 0.05)
    monkeypatch.setattr(outages, "_SETTLING", 0.05)
    monkeypatch.setattr(outages, "_LOOK_INTERVAL", 0.01)


class Lines:
    """The texts of the warnings about a side."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def of(self, side: Side) -> list[str]:
        texts = [record.getMessage() for record in self._caplog.records if record.name == outages.__name__]
        return [text.removeprefix(side._name) for text in texts if text.startswith(side._name)]

    def are(self, side: Side, *parts: str) -> None:
        until(lambda: len(self.of(side)) >= len(parts), lambda: f"{self.of(side)}")
        assert len(self.of(side)) == len(parts)
        for line, part in zip(self.of(side), parts, strict=True):
            assert part in line


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Lines]:
    with caplog.at_level(logging.WARNING):
        yield Lines(caplog)


def answer(side: Side, kind: str) -> None:
    with side.call(kind):
        pass


def fail(side: Side, kind: str, error: Exception) -> None:
    with suppress(type(error)), side.call(kind):
        raise error


def test_calls_that_wait_are_one_outage(lines: Lines) -> None:
    kafka = kafka_at("waiting:9092")
    assert kafka_at("waiting:9092") is kafka
    with ExitStack() as calls:
        for _ in range(3):
            calls.enter_context(kafka.call(DELIVERY)).error = NO_BROKER
        lines.are(kafka, "does not answer: messages were not acknowledged within")
        assert str(NO_BROKER) in lines.of(kafka)[0]
        assert kafka.is_out
    lines.are(kafka, "does not answer", "answers again, after")
    assert not kafka.is_out


@table("error", [StoreUnavailableError("No."), StoreCommitUnknownError("No.")], ids=type)
def test_calls_that_fail_are_one_outage(lines: Lines, error: Exception) -> None:
    database = database_at(f"failing with {type(error).__name__}")
    for _ in range(3):
        fail(database, DATABASE, error)
    lines.are(database, "does not answer: ")
    answer(database, DATABASE)
    lines.are(database, "does not answer", "answers again")


def test_a_call_that_has_sent_nothing_is_no_answer(lines: Lines) -> None:
    database = database_at("silent")
    fail(database, DATABASE, StoreUnavailableError("No."))
    with database.call(DATABASE) as call:
        call.has_answer = False
    assert database._answered is None
    answer(database, DATABASE)
    lines.are(database, "does not answer", "answers again")


def test_one_call_that_had_too_little_time_is_no_outage_but_several_are(lines: Lines) -> None:
    kafka = kafka_at("brief:9092")
    fail(kafka, REQUEST, NO_BROKER)
    assert not kafka.is_out
    until(lambda: fail(kafka, REQUEST, NO_BROKER) or kafka.is_out, "the outage begins")
    lines.are(kafka, "a request was not answered")


def test_a_call_from_before_the_end_of_an_outage_does_not_begin_another(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it still waits, or fails now."""
    kafka = kafka_at("late:9092")
    kafka.failed(DELIVERY, NO_BROKER)
    answer(kafka, DELIVERY)
    lines.are(kafka, "does not answer", "answers again")
    monkeypatch.setattr(outages, "SLOW", 600)
    with kafka.call(REQUEST) as call:
        call.began -= 1000
        kafka.look()
        assert not kafka.is_out
    with suppress(BrokerUnavailableError), kafka.call(REQUEST) as call:
        call.began -= 1000
        raise NO_BROKER
    assert not kafka.is_out


def test_an_answer_of_another_kind_does_not_end_it(lines: Lines) -> None:
    """As for a partition without a leader, while the coordinator answers."""
    kafka = kafka_at("leaderless:9092")
    kafka.failed(DELIVERY, NO_BROKER)
    for _ in range(3):
        answer(kafka, REQUEST)
    assert kafka._answered is None
    answer(kafka, DELIVERY)
    lines.are(kafka, "does not answer", "answers again")


@table("error", [MessageRefusedError("No."), ProducerFencedError("No."), StoreLockedError("No."), ValueError()], ids=type)
def test_a_refusal_is_an_answer(lines: Lines, error: Exception) -> None:
    kafka = kafka_at(f"refusing-{type(error).__name__}:9092")
    kafka.failed(DELIVERY, NO_BROKER)
    fail(kafka, DELIVERY, error)
    lines.are(kafka, "does not answer", "answers again")


def test_a_wait_for_a_lock_is_no_outage_and_its_failure_is(lines: Lines) -> None:
    local, remote, slow = database_at("file", is_local=True), database_at("remote"), database_at("slow")
    with local.call(DATABASE), remote.call(DATABASE, may_wait=True), slow.call(DATABASE):
        until(lambda: slow.is_out, "the other one is noticed")
        assert not local.is_out
        assert not remote.is_out
    fail(local, DATABASE, StoreUnavailableError("The disk is full."))
    assert local.is_out


def test_outages_that_follow_each_other_are_not_all_logged(lines: Lines) -> None:
    kafka = kafka_at("flapping:9092")
    settling = []
    for _ in range(3):
        kafka.failed(REQUEST, NO_BROKER)
        settling.append(kafka._settling)
        answer(kafka, REQUEST)
        until(lambda: not kafka.is_out, "it is over")
    assert settling == [0.05, 0.1, 0.2]
    for _ in range(3):  # within the time in which it settles
        kafka.failed(REQUEST, NO_BROKER)
        answer(kafka, REQUEST)
    assert len(lines.of(kafka)) == 7
    until(lambda: not kafka.is_out, "it is over")


def test_a_call_that_an_interrupt_has_left_is_forgotten(lines: Lines) -> None:
    kafka = kafka_at("interrupted:9092")
    kafka.call(REQUEST).__enter__()
    kafka.look()
    assert not kafka.calls
    assert not lines.of(kafka)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_a_thread_of_its_own(lines: Lines) -> None:
    kafka = kafka_at("forked:9092")
    with kafka.call(REQUEST):
        until(lambda: kafka.is_out, "the parent notices")
        child = os.fork()
        if child == 0:  # pragma: no cover
            try:
                is_new = not kafka.is_out and outages._watch._thread is None
                call = kafka.call(REQUEST)
                call.__enter__()
                until(lambda: kafka.is_out, "the child notices")
                os._exit(0 if is_new else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    lines.are(kafka, "does not answer", "answers again")


def test_threads_share_an_outage(lines: Lines) -> None:
    kafka = kafka_at("threads:9092")
    release = threading.Event()

    def wait() -> None:
        with kafka.call(REQUEST):
            happened(release)

    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    lines.are(kafka, "does not answer")
    release.set()
    for thread in threads:
        joined(thread)
    lines.are(kafka, "does not answer", "answers again")


def test_observers_are_told_of_an_outage(lines: Lines) -> None:
    kafka = kafka_at("observed:9092")
    events: list[Event] = []
    with observing(events.append):
        fail(kafka, REQUEST, NO_BROKER)
        fail(kafka, REQUEST, NO_BROKER)
        with kafka.call(REQUEST):
            lines.are(kafka, "does not answer")
        lines.are(kafka, "does not answer", "answers again")
        until(lambda: len(events) == 2, lambda: f"{events}")
    began, ended = events
    assert isinstance(began, OutageBegan)
    assert isinstance(ended, OutageEnded)
    assert began.side == ended.side == "Kafka at observed:9092"
    assert ended.seconds > 0
