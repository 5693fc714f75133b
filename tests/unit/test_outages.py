"""An outage is logged once when it begins and once when it is over, however many calls wait or fail."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from weakref import ref

import pytest

from dualwrite.deadline import Deadline
from dualwrite.errors import (
    BrokerUnavailableError,
    DeliveryError,
    HostClockError,
    MessageRefusedError,
    ProducerFencedError,
    StoreCommitUnknownError,
    StoreLockedError,
    StoreNotWritableError,
    StoreUnavailableError,
)
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.observability import Event, OutageBegan, OutageEnded, observing, outages
from dualwrite.observability.outages import (
    BEGIN,
    DATABASE,
    DELIVERY,
    REQUEST,
    Side,
    SideCall,
    database_at,
    is_no_answer,
    kafka_at,
    level_of,
)
from fixtures.pace import LIMIT, happened, joined, until
from fixtures.tables import table

NO_BROKER = BrokerUnavailableError("No broker.")


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "SLOW", 0.05)
    monkeypatch.setattr(outages, "_SETTLING_SECONDS", 0.05)
    monkeypatch.setattr(outages, "_LOOK_INTERVAL", 0.01)


class Lines:
    """The texts of the warnings about a side."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def of(self, side: Side) -> list[str]:
        texts = [record.getMessage() for record in self._caplog.records if record.name == "dualwrite.outages"]
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


def test_a_database_that_takes_no_writes_until_it_does(lines: Lines) -> None:
    """That it answers a reader does not end it."""
    database = database_at("not writable")
    fail(database, DATABASE, StoreNotWritableError("The disk is full."))
    with pytest.raises(StoreNotWritableError, match=r"(?s)not writable takes no writes.*The disk is full"):
        database.check_writes()
    answer(database, BEGIN)
    assert database._answered is None
    lines.are(database, "takes no writes: The disk is full")
    answer(database, DATABASE)
    database.check_writes()
    lines.are(database, "takes no writes", "takes writes again, after")


def test_a_refused_write_counts_for_probes_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that fails keeps traffic away, and so the write that would show that it is over."""
    database = database_at("not writable, without traffic")
    fail(database, DATABASE, StoreNotWritableError("The disk is full."))
    monkeypatch.setattr(outages, "_REFUSAL_COUNTS_SECONDS", 0.0)
    database.check_writes()


REFUSALS = [
    *(MessageRefusedError("No."), HostClockError("No."), ProducerFencedError("No.")),
    *(StoreLockedError("No."), ValueError()),
]


@table("error", REFUSALS, ids=type)
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


def test_what_a_quota_holds_back_is_no_outage(lines: Lines) -> None:
    """A call that waits, and one that takes too long, which says what has held it back."""
    kafka = kafka_at("throttled:9092")
    error = DeliveryError("Too late.", cause="unknown")
    with suppress(DeliveryError), kafka.call(DELIVERY) as call:
        kafka.throttled(LIMIT, "producer_byte_rate of client.id 'shop'")
        assert call.limit(Deadline(0), long := Deadline(LIMIT)) is long
        call.began -= LIMIT
        kafka.look()
        raise error
    assert not is_no_answer(error)
    assert level_of(error) == logging.INFO
    assert not kafka.is_out
    assert pickle.loads(pickle.dumps(error)).throttled == error.throttled
    assert "by the quota producer_byte_rate of client.id 'shop'" in str(error)
    kafka.throttled(LIMIT, "producer_byte_rate of client.id 'shop'")
    lines.are(kafka, " throttles: the quota producer_byte_rate of client.id 'shop' holds requests back")


def test_a_broker_that_is_gone_is_an_outage_although_another_one_throttles(lines: Lines) -> None:
    kafka = kafka_at("half:9092")
    kafka.throttled(LIMIT, "producer_byte_rate")
    with kafka.call(DELIVERY) as call:
        call.error = NO_BROKER
        assert call.limit(short := Deadline(0), Deadline(LIMIT)) is short
        lines.are(kafka, "throttles", "does not answer")


def test_after_a_quota_has_held_back_requests_no_answer_is_an_outage(lines: Lines) -> None:
    kafka = kafka_at("later:9092")
    with kafka.call(DELIVERY):
        kafka.throttled(0.01, "producer_byte_rate")
        lines.are(kafka, "throttles", "does not answer")


def test_several_ids_about_which_nobody_answers_do_not_end_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe asks about all ids of a pool at once."""
    side = kafka_at("127.0.0.1:1")
    answers: list[str] = []
    monkeypatch.setattr(Side, "answered", lambda self, kind: answers.append(kind) if self is side else None)
    side.failed(REQUEST, NO_BROKER)
    config = KafkaConfig.of("127.0.0.1:1")
    with closing(WireTransactionCoordinator(config, timeout=0.2)) as coordinator, pytest.raises(BrokerUnavailableError):
        coordinator.describe_all(["shop-0", "shop-1"])
    assert answers == []


def test_calls_that_begin_while_the_thread_looks_do_not_end_it() -> None:
    """Objects that the look makes may start the garbage collector, and with it other threads' code."""
    side, begun = kafka_at("collected:9092"), list[SideCall]()

    def begins(*_: object) -> None:
        if len(begun) < 100:
            begun.append(call := side.call(REQUEST))
            side.calls[id(call)] = ref(call)

    thresholds = gc.get_threshold()
    for _ in range(30):
        begins()
    kept = [(each, each) for each in range(3000)]  # so that Python has no used tuples to take
    gc.callbacks.append(begins)
    try:
        gc.set_threshold(1)
        assert side.look()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(begins)
    assert len(begun) > 30
    assert kept


def test_an_unexpected_error_does_not_end_the_thread(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    look, failed = Side.look, list[Side]()

    def fails_twice(side: Side) -> bool:
        if len(failed) < 2:
            failed.append(side)
            raise RuntimeError("unexpected")
        return look(side)

    monkeypatch.setattr(Side, "look", fails_twice)
    side = kafka_at("watched:9092")
    with side.call(REQUEST):
        until(lambda: side.is_out)
    until(lambda: not side.is_out)
    assert len([record for record in caplog.records if record.name == "dualwrite.outages" and record.exc_info]) == 1
