"""The clock of the relay's host is wrong: its rows wait, and none becomes a dead letter."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa
from relay_scene import RelayScene, running

from dualwrite.errors import HostClockError
from fixtures.host_clock import clock_ahead
from fixtures.pace import until


def test_rows_wait_until_the_clock_is_right(on_sqlite: RelayScene, caplog: pytest.LogCaptureFixture) -> None:
    scene = on_sqlite
    scene.insert(20)
    with caplog.at_level(logging.WARNING, "dualwrite"), running(scene) as relay:
        with clock_ahead(2):
            scene.insert(5)
            until(lambda: "this host's clock is 2:00:00 ahead" in caplog.text or scene.waiting() == 5, "an attempt")
            scene.insert(5)
            until(lambda: "this host's clock is 2:00:00 ahead" in caplog.text, "an attempt")
        until(lambda: scene.waiting() == 0, "the outbox to be empty")
    assert (relay.published, relay.status().dead) == (30, 0)
    scene.check(range(30))


def test_a_run_until_it_is_empty_ends(on_sqlite: RelayScene) -> None:
    scene = on_sqlite
    scene.insert(20)
    with scene.relay() as relay:
        with clock_ahead(2), pytest.raises(HostClockError, match="2:00:00 ahead"):
            relay.run(until_empty=True)
        assert scene.waiting() == 20
        relay.run(until_empty=True)
    scene.check(range(20))


def test_a_rows_own_time_is_the_rows_fault(on_sqlite: RelayScene) -> None:
    """Also on such a host: only the row is moved, and the others wait."""
    scene = on_sqlite
    with scene.engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE outbox ADD COLUMN happened timestamp"))
        scene.insert_on(connection, [0, 1, 2])
        later = (datetime.now(UTC) + timedelta(days=2)).isoformat()
        connection.execute(sa.text("UPDATE outbox SET happened = :later WHERE id = 2"), {"later": later})
    layout = replace(scene.layout, timestamp="happened")
    with scene.relay(layout=layout) as relay:
        with clock_ahead(2), pytest.raises(HostClockError):
            relay.run(until_empty=True)
        assert relay.status().dead <= 1
        relay.run(until_empty=True)
        assert relay.status().dead == 1
    scene.check([0, 2])
