"""`Relay`: it runs until it is stopped, until the outbox is empty, or once; and what others insert meanwhile."""

from __future__ import annotations

import asyncio
import os

import pytest
import sqlalchemy as sa
from relay_scene import RelayScene, key_of, running

import dualwrite
from dualwrite import Relay
from dualwrite.errors import ConfigurationError, FencedError, UsageError
from dualwrite.relay import BatchOptions, Notifier, create_table
from fixtures.pace import until, until_recorded


def empty(scene: RelayScene) -> None:
    until(lambda: scene.waiting() == 0, "the outbox to be empty")


def test_a_relay_publishes_what_is_there_and_what_comes(scene: RelayScene) -> None:
    scene.insert(20)
    with running(scene, batch=BatchOptions(rows=7)) as relay:
        empty(scene)
        scene.insert(15)
        empty(scene)
    assert relay.published == 35
    scene.check(range(35))


def test_it_can_end_when_the_outbox_is_empty_and_run_again(on_sqlite: RelayScene) -> None:
    with on_sqlite.relay() as relay:
        for _ in range(2):
            on_sqlite.insert(10)
            relay.run(until_empty=True)
            assert on_sqlite.waiting() == 0
    on_sqlite.check(range(20))


def test_one_turn_publishes_one_batch(on_sqlite: RelayScene) -> None:
    on_sqlite.insert(10)
    with on_sqlite.relay(batch=BatchOptions(rows=6)) as relay:
        assert [relay.run_once() for _ in range(3)] == [6, 4, 0]
    on_sqlite.check(range(10))


@pytest.mark.parametrize("first", ["lower", "higher"])
def test_ids_that_commit_out_of_order_skip_nothing(on_postgres: RelayScene, first: str) -> None:
    scene = on_postgres
    lower, higher = scene.engine.connect(), scene.engine.connect()
    with running(scene), lower, higher:
        scene.insert_on(lower, [0, 5])  # takes the lower ids
        scene.insert_on(higher, [1, 6])
        one, other = (lower, higher) if first == "lower" else (higher, lower)
        one.commit()
        until_recorded(scene.message_numbers, [0, 5] if first == "lower" else [1, 6], "what was committed first")
        other.commit()
        empty(scene)
        until_recorded(scene.message_numbers, [0, 1, 5, 6], "what was committed later")
    scene.check([0, 1, 5, 6])


def test_a_row_waits_for_its_time_without_the_others(on_postgres: RelayScene) -> None:
    scene = on_postgres
    with scene.engine.begin() as connection:
        scene.insert_on(connection, [0])
        connection.execute(sa.text("UPDATE outbox SET not_before = now() + interval '1 hour'"))
    scene.numbers = iter(range(1, 100))  # type: ignore[assignment]
    scene.insert(4)
    with scene.relay() as relay:
        relay.run(until_empty=True)
        status = relay.status()
        assert (status.waiting, status.later, status.dead) == (0, 1, 0)
        scene.check(range(1, 5))
        with scene.engine.begin() as connection:
            connection.execute(sa.text("UPDATE outbox SET not_before = now()"))
        relay.run(until_empty=True)
    assert key_of(0) == key_of(5)
    assert scene.published()["k0"] == [0]


def test_when_a_relay_stops_another_one_goes_on(scene: RelayScene) -> None:
    with running(scene, lease=60) as first:
        scene.insert(5)
        until(lambda: first.published == 5)
        with running(scene, lease=60) as second:
            scene.insert(5)
            until(lambda: first.published == 10)
            assert not second.shards
            first.stop()
            until(lambda: not first.shards)
            scene.insert(5)
            until(lambda: second.published == 5)
    scene.check(range(15))


def test_a_notification_wakes_the_relay_up(on_postgres: RelayScene) -> None:
    scene = on_postgres
    with scene.engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE outbox"))
    create_table(scene.engine, channel="it's new")
    with running(scene, listen="it's new", poll=1000, longest_poll=1000, lease=60) as relay:
        scene.insert(3)
        until(lambda: relay.published == 3)  # found at its start, or by its first connection
        scene.insert(3)
        until(lambda: relay.published == 6)
        with scene.engine.begin() as connection:
            query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"
            assert connection.scalar(sa.text(query))
        scene.insert(3)
        until(lambda: relay.published == 9)  # when it listens again
    scene.check(range(9))


def insert_and_notify(scene: RelayScene, notifier: Notifier) -> None:
    scene.insert(1)
    notifier.notify()


def test_a_notifier_wakes_the_relay_up_without_a_trigger(on_postgres: RelayScene, caplog: pytest.LogCaptureFixture) -> None:
    scene = on_postgres
    with running(scene, listen="quiet", poll=1000, longest_poll=1000, lease=60) as relay:
        url = scene.engine.url.update_query_dict({"application_name": "ringing"})
        with Notifier(url, "quiet") as notifier:
            for number in (1, 2):
                insert_and_notify(scene, notifier)
                until(lambda number=number: relay.published == number)
            with scene.engine.begin() as connection:
                query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'ringing'"
                assert connection.scalar(sa.text(query))
            notifier.notify()
            until(lambda: "can't notify" in caplog.text, "its connection is found to be broken")
            insert_and_notify(scene, notifier)
            until(lambda: relay.published == 3)
            insert_and_notify(scene, notifier)  # `close` waits for that
        until(lambda: relay.published == 4)
        notifier.notify()
    assert [record.levelname for record in caplog.records if "can't notify" in record.getMessage()] == ["WARNING"]
    scene.check(range(4))


def test_a_notifier_in_a_forked_child(on_postgres: RelayScene) -> None:
    scene = on_postgres
    options = {"listen": "forked", "poll": 1000, "longest_poll": 1000, "lease": 60}
    with running(scene, **options) as relay, Notifier(scene.url, "forked") as notifier:
        insert_and_notify(scene, notifier)
        until(lambda: relay.published == 1)
        scene.insert(1)
        if (child := os.fork()) == 0:
            notifier.notify()
            notifier.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        until(lambda: relay.published == 2)
        insert_and_notify(scene, notifier)
        until(lambda: relay.published == 3)
    scene.check(range(3))


def test_only_postgresql_notifies(on_sqlite: RelayScene) -> None:
    with pytest.raises(ConfigurationError, match="poll"), on_sqlite.relay(listen="outbox"):
        pass
    with pytest.raises(ConfigurationError, match="NOTIFY"):
        Notifier(on_sqlite.url, "outbox")
    with pytest.raises(ConfigurationError, match="NOTIFY"):
        create_table(on_sqlite.engine, channel="outbox")


def test_a_relay_runs_once_at_a_time_and_not_in_an_event_loop(on_sqlite: RelayScene) -> None:
    with running(on_sqlite) as relay:
        until(lambda: relay.shards)
        with pytest.raises(UsageError, match="running already"):
            relay.run_once()

    async def in_a_loop() -> None:
        with on_sqlite.relay() as other:
            other.run()

    with pytest.raises(UsageError, match="to_thread"):
        asyncio.run(in_a_loop())


def test_two_relays_have_equal_shares_of_the_shards(on_postgres: RelayScene) -> None:
    scene = on_postgres
    with running(scene, shards=4) as first:
        until(lambda: len(first.shards) == 4)
        scene.insert(40)
        with running(scene, shards=4) as second:
            until(lambda: (len(first.shards), len(second.shards)) == (2, 2))
            scene.insert(40)
            empty(scene)
            assert len({each.owner for each in first.status().workers}) == 2
        until(lambda: len(first.shards) == 4)
        scene.insert(40)
        empty(scene)
    scene.check(range(120))


def test_shards_of_sqlite_need_an_expression(on_sqlite: RelayScene) -> None:
    with pytest.raises(ConfigurationError, match="shard_by"), on_sqlite.relay(shards=2):
        pass
    numbers = on_sqlite.insert(20)
    with on_sqlite.relay(shards=2, shard_by="unicode(substr(key, 2)) - 50") as relay:
        relay.run(until_empty=True)
    on_sqlite.check(numbers)


def test_a_relay_that_was_recovered_by_somebody_else_continues(on_sqlite: RelayScene) -> None:
    """`dualwrite recover` claims its id: it claims it again, since the lease is still its own."""
    scene = on_sqlite
    with running(scene) as relay:
        scene.insert(5)
        until(lambda: relay.published == 5)
        dualwrite.recover(scene.url, kafka=scene.servers, ids=[f"{scene.name}.1"])
        scene.insert(5)
        until(lambda: relay.published == 10)
    scene.check(range(10))


def test_single_turns_go_on_after_somebody_else_has_claimed_the_id(on_sqlite: RelayScene) -> None:
    scene = on_sqlite
    with scene.relay() as relay:
        scene.insert(5)
        assert relay.run_once() == 5
        dualwrite.recover(scene.url, kafka=scene.servers, ids=[f"{scene.name}.1"])
        scene.insert(5)
        with pytest.raises(FencedError):
            relay.run_once()
        assert relay.run_once() == 5
    scene.check(range(10))


def test_arguments_that_do_not_exist(on_sqlite: RelayScene) -> None:
    with pytest.raises(TypeError, match="'transactional_id'"):
        Relay(on_sqlite.url, kafka=on_sqlite.servers, transactional_id="x")


def test_a_row_that_somebody_has_locked_is_waited_for_in_the_order_of_its_key(
    on_postgres: RelayScene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scene = on_postgres
    short = "SELECT pg_catalog.set_config('lock_timeout', '50ms', true)"
    monkeypatch.setattr("dualwrite.relay.outbox_table.LIMITS", sa.text(short))
    scene.insert(10)
    with scene.engine.connect() as other:
        other.execute(sa.text("UPDATE outbox SET value = '1002' WHERE id = 3"))  # of key k2
        with running(scene, batch=BatchOptions(rows=2)):
            until(lambda: "was not released" in caplog.text, "it has waited in vain")
            assert scene.waiting() == 8
            other.commit()
            empty(scene)
    assert scene.published()["k2"] == [1002, 7]
