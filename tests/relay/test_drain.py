"""The engine of relays: batches, order, and rows that can't be sent, on real databases and a real broker."""

from __future__ import annotations

import sqlalchemy as sa
from relay_scene import RelayScene

import dualwrite
from dualwrite.outbox.dead_letters import DeadLetters
from dualwrite.outbox.drain import BatchOptions, Drain, sql_store
from dualwrite.outbox.layout import GENERIC
from dualwrite.outbox.outbox_table import OutboxTable


def drained(scene: RelayScene, **options: int) -> list[int]:
    """Publish all rows; the number of rows of each transaction."""
    with scene.writer() as writer:
        store = sql_store(writer.store)
        drain = Drain(
            writer, OutboxTable(store, GENERIC), options=BatchOptions(**options), dead_letters=DeadLetters(store, scene.name)
        )
        found = []
        while (turn := drain.turn()).rows:
            found.append(turn.rows)
        assert not drain.has_rows()
        return found


def test_each_row_is_published_once_in_order_and_deleted(scene: RelayScene) -> None:
    numbers = scene.insert(25)
    assert drained(scene, rows=10) == [10, 10, 5]
    scene.check(numbers)
    assert scene.rows() == 0


def test_rows_that_cannot_be_sent_go_to_the_dead_letters_and_the_others_on(on_postgres: RelayScene) -> None:
    scene = on_postgres
    before = scene.insert(20)
    with scene.engine.begin() as connection:
        scene.insert_on(connection, [-1], topic="no such topic!")
        scene.insert_on(connection, [-2], headers="3")
    large = scene.insert(7)
    with scene.engine.begin() as connection:
        connection.execute(sa.text("UPDATE outbox SET value = :v WHERE id = 26"), {"v": bytes(2_000_000)})
    after = scene.insert(20)
    drained(scene)
    scene.check([*before, *(each for each in large if each != large[3]), *after])
    with dualwrite.store_from_url(scene.url) as store:
        dead = DeadLetters(sql_store(store), scene.name).oldest()
    assert [(each.source_id, each.error_kind) for each in dead] == [
        ("21", "InvalidMessageError"),
        ("22", "InvalidMessageError"),
        ("26", "MessageTooLargeError"),
    ]
    assert dead[2].row["value"] == bytes(2_000_000)
    assert dead[2].topic == scene.topic
