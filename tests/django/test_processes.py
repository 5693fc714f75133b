"""Blocks of several threads and processes, options of the pool and of Django's backend, and names of Django's that we use."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import django
import pytest
from django.conf import settings
from django.db import connection, connections, transaction

import dualwrite
import dualwrite.django
from crash.scene import Scene
from django_project.shop.models import Event
from dualwrite.django import atomic
from fixtures.broker_door import BrokerBehindDoor
from fixtures.pace import until_recorded

pytestmark = pytest.mark.slow
since_5_1 = pytest.mark.skipif(django.VERSION < (5, 1), reason="this Django has no such option")
EVENTS = range(30)


def write(scene: Scene, number: int) -> str | None:
    with atomic() as tx:
        Event(number=number, writer=scene.transactional_id).save(force_insert=True)
        tx.send(scene.topic, str(number), key=scene.transactional_id)
    return tx.outcome


@pytest.mark.parametrize("database", ["postgresql", "mariadb"])
def test_threads_share_a_pool(shop: Scene) -> None:
    def one(number: int) -> str | None:
        try:
            return write(shop, number)
        finally:
            connection.close()

    with ThreadPoolExecutor(6) as threads:
        assert set(threads.map(one, EVENTS)) == {"published"}
    assert shop.agree() == list(EVENTS)


@since_5_1
@pytest.mark.shop(OPTIONS={"timeout": 60, "transaction_mode": "IMMEDIATE"})
@pytest.mark.parametrize("database", ["sqlite"])
def test_threads_on_sqlite(shop: Scene) -> None:
    """Each block takes the file's lock when it begins: a block that has read before another one wrote could not write."""
    test_threads_share_a_pool(shop)


@pytest.mark.parametrize("database", ["postgresql"])
def test_a_forked_process_makes_a_pool_of_its_own(shop: Scene) -> None:
    write(shop, 1)
    before = dualwrite.django.pool()
    connections.close_all()  # Django's own connections are the user's to care for
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert dualwrite.django.pool() is not before
            assert write(shop, 2) == "published"
            dualwrite.django.close_pools()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert dualwrite.django.pool() is before
    write(shop, 3)
    assert shop.agree() == [1, 2, 3]


@since_5_1
@pytest.mark.shop(OPTIONS={"pool": {"min_size": 1, "max_size": 2}})
@pytest.mark.parametrize("database", ["postgresql"])
def test_a_connection_of_djangos_own_pool(shop: Scene) -> None:
    try:
        write(shop, 1)
        connection.close()
        write(shop, 2)
        with pytest.raises(dualwrite.MessageTooLargeError), atomic() as tx:
            tx.send(shop.topic, b"x" * 1_100_000)
        write(shop, 3)
        assert shop.agree() == [1, 2, 3]
    finally:
        connections["default"].close_pool()


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "sqlite"])
def test_blocks_go_on_while_the_broker_is_down(
    shop: Scene, broker_behind_door: BrokerBehindDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry: dict[str, Any] = settings.DUALWRITE["default"]
    monkeypatch.setitem(entry, "OPTIONS", {"size": 1, "when_kafka_is_down": "journal"})
    monkeypatch.setitem(entry, "TIMEOUTS", {})
    monkeypatch.setitem(entry, "KAFKA", broker_behind_door.bootstrap_servers)
    assert write(shop, 1) == "published"
    broker_behind_door.kill()
    try:
        with pytest.raises(dualwrite.JournalSwitchedError):  # both sides are rolled back; only units of a pool run again
            write(shop, 2)
        assert write(shop, 2) == "journaled"
        assert write(shop, 3) == "journaled"
    finally:
        broker_behind_door.start()
    until_recorded(shop.messages, [1, 2, 3], "the journal is published")
    dualwrite.django.close_pools()  # while the door is open
    assert shop.agree() == [1, 2, 3]


def test_names_of_django_that_are_not_documented(shop: Scene) -> None:
    with transaction.atomic():
        assert connection.in_atomic_block
        assert [block._from_testcase for block in connection.atomic_blocks] == [False]
        assert connection.savepoint_ids == []
        assert connection.needs_rollback is False
    assert connection.execute_wrappers == []
    write(shop, 1)
    assert connection.execute_wrappers == []
