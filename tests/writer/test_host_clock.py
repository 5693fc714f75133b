"""Kafka refuses timestamps far from its own time: if this host's clock has given them, the error says that, and by how much."""

from __future__ import annotations

import time
from typing import Any

import pytest
from scene import Scene

from dualwrite.errors import HostClockError, MessageRefusedError
from dualwrite.observability.outages import is_no_answer
from fixtures.broker import make_topic
from fixtures.host_clock import HOUR, clock_ahead
from fixtures.pace import LIMIT
from fixtures.tiers import thinned

NARROW = {"message_timestamp_before_max_ms": "3600000", "message_timestamp_after_max_ms": "3600000"}
CASES = [(producer, hours) for producer in ("native", "librdkafka") for hours in (2, -2)]


@pytest.fixture
def narrow(sqlite_scene: Scene, broker: Any) -> Scene:
    """A scene with a topic that takes timestamps of the last hour and of the next one."""
    make_topic(broker, sqlite_scene.topic, **NARROW)
    return sqlite_scene


@pytest.mark.parametrize(("producer", "hours"), thinned(CASES, quick=CASES[:1]))
def test_the_error_names_the_clock(narrow: Scene, producer: Any, hours: int) -> None:
    with narrow.connect(producer=producer) as writer:

        def put(*values: str) -> None:
            with writer.transaction() as tx:
                narrow.insert(tx, len(values))
                tx.send_many(narrow.topic, values)  # with librdkafka too, this gives them Python's time

        with clock_ahead(hours), pytest.raises(HostClockError) as caught:
            put("1", "2", "3")
        away = "2:00:00 ahead of" if hours > 0 else "2:00:00 behind"
        assert f"this host's clock is {away} the broker's" in str(caught.value)
        assert caught.value.ahead == pytest.approx(hours * HOUR, abs=LIMIT)
        assert caught.value.retriable
        assert not is_no_answer(caught.value)
        put("4")
    assert narrow.messages() == [4]


@pytest.mark.parametrize("producer", thinned(["native", "librdkafka"], quick=["native"]))
def test_a_timestamp_that_the_sender_gives_is_the_messages_own(narrow: Scene, producer: Any) -> None:
    with narrow.connect(producer=producer) as writer:

        def put(hours: float) -> None:
            with writer.transaction() as tx:
                tx.send_many(narrow.topic, ["before"])
                tx.send(narrow.topic, "own", timestamp=int((time.time() + hours * HOUR) * 1000))

        for hours in (-3, 3):
            with pytest.raises(MessageRefusedError):
                put(hours)
