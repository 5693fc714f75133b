"""On psycopg connections a group's messages are sent while the database still works on its statements."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from confluent_kafka import Consumer, TopicPartition

from crash.scene import Scene
from dualwrite import Transaction
from dualwrite.stores.sql import SqlStateStore
from dualwrite.testing.proxy import Link, TcpProxy
from fixtures.pace import LIMIT, until
from pool.pool_scene import held, open_pool

INSERT = "INSERT INTO events VALUES (%s, %s)"


def writes(tx: Transaction, scene: Scene, number: int | str) -> None:
    tx.db.execute(INSERT, (scene.transactional_id, number))
    tx.send(scene.topic, str(number), partition=0)


@pytest.fixture
def proxy(scene: Scene) -> Iterator[TcpProxy]:
    address = sa.engine.make_url(scene.url)
    assert address.host is not None
    assert address.port is not None
    with TcpProxy(address.host, address.port) as opened:
        yield opened


@pytest.fixture
def store(scene: Scene, proxy: TcpProxy) -> Iterator[SqlStateStore]:
    url = sa.engine.make_url(scene.url).set(drivername="postgresql", host="127.0.0.1", port=proxy.port)
    address = url.render_as_string(hide_password=False)
    with SqlStateStore.from_psycopg(lambda: psycopg.connect(address)) as made:
        yield made


def high_watermark(scene: Scene) -> int:
    consumer = Consumer({**scene.settings, "group.id": "watermarks", "isolation.level": "read_uncommitted"})
    try:
        return int(consumer.get_watermark_offsets(TopicPartition(scene.topic, 0), timeout=LIMIT)[1])
    finally:
        consumer.close()


@pytest.mark.parametrize("last_one", [7, "none"], ids=["all succeed", "one fails"])
def test_messages_reach_the_broker_while_the_database_is_silent(
    scene: Scene, store: SqlStateStore, proxy: TcpProxy, last_one: int | str
) -> None:
    """If a statement turns out to have failed, the messages that are already there are aborted, and the units run again."""
    silent: list[Link] = []
    is_silent = threading.Event()

    def hold_answers_back(link: Link) -> None:
        link.blackhole("server_to_client")
        silent.append(link)
        is_silent.set()

    with open_pool(scene, store, size=1) as pool:
        pool.run(writes, scene, 1)
        before = high_watermark(scene)
        with held(pool):
            proxy.on_client_bytes(b"INSERT INTO events", hold_answers_back)
            futures: list[Any] = [pool.submit(partial(writes, scene=scene, number=number)) for number in (5, 6, last_one)]
        assert is_silent.wait(LIMIT)
        try:
            until(lambda: high_watermark(scene) > before, "the messages are at the broker")
            assert not any(future.done() for future in futures)
        finally:
            silent[0].resume()
        errors = [future.exception(LIMIT) for future in futures]
    assert errors[:2] == [None, None]
    assert (errors[2] is None) == (last_one == 7)
    assert scene.agree() == ([1, 5, 6, 7] if last_one == 7 else [1, 5, 6])
