"""The engine of relays, without a relay: batches by rows and by size, for whoever drains a table of his own."""

from __future__ import annotations

from relay_scene import RelayScene

from dualwrite.outbox.drain import BatchOptions, Drain, sql_store
from dualwrite.outbox.layout import GENERIC
from dualwrite.outbox.outbox_table import OutboxTable


def drained(scene: RelayScene, **options: int) -> list[int]:
    """Publish all rows; the number of rows of each transaction."""
    with scene.writer() as writer:
        drain = Drain(writer, OutboxTable(sql_store(writer.store), GENERIC), options=BatchOptions(**options))
        found = []
        while (turn := drain.turn()).rows:
            found.append(turn.rows)
        assert not drain.has_rows()
        return found


def test_each_row_is_published_once_in_order_and_deleted(scene: RelayScene) -> None:
    numbers = scene.insert(25)
    assert drained(scene, rows=10) == [10, 10, 5]
    scene.check(numbers)
    assert scene.waiting() == 0


def test_a_batch_ends_before_it_is_too_large_but_never_before_its_first_row(on_sqlite: RelayScene) -> None:
    scene = on_sqlite
    with scene.engine.begin() as connection:
        for size in (40_000, 300_000, 1_000, 60_000, 60_000):
            number = next(scene.numbers)
            scene.insert_on(connection, [number], value=b" " * (size - 1) + b"%d" % number)
    assert drained(scene, size=100_000) == [1, 1, 2, 1]
    scene.check(range(5))
