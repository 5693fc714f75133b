"""The engine of relays, without a relay: batches by rows and by size, for whoever drains a table of his own."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from relay_scene import RelayScene

from dualwrite.relay.drain import BatchOptions, Drain, sql_store
from dualwrite.relay.layout import GENERIC
from dualwrite.relay.outbox_table import OutboxTable


def drained(scene: RelayScene, **options: int) -> list[int]:
    """Publish all rows; the number of rows of each transaction."""
    with scene.writer() as writer:
        drain = Drain(writer, OutboxTable(sql_store(writer.store), GENERIC), options=BatchOptions(**options))
        found = []
        while (turn := drain.turn()).rows:
            found.append(turn.rows)
        assert not drain.has_rows()
        return found


def test_a_batch_ends_before_it_is_too_large_but_never_before_its_first_row(on_sqlite: RelayScene) -> None:
    scene = on_sqlite
    with scene.engine.begin() as connection:
        for size in (40_000, 300_000, 1_000, 60_000, 60_000):
            number = next(scene.numbers)
            scene.insert_on(connection, [number], value=b" " * (size - 1) + b"%d" % number)
    assert drained(scene, size=100_000) == [1, 1, 2, 1]
    scene.check(range(5))


@contextmanager
def memory() -> Iterator[Callable[[], int]]:
    """A function that returns how many bytes the block had at most."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_no_more_is_read_than_fits_into_a_batch(scene: RelayScene) -> None:
    """100 rows are looked at first, and more and more as long as they are small."""
    numbers = scene.insert(100)
    for _ in range(60):
        number = next(scene.numbers)
        with scene.engine.begin() as connection:
            scene.insert_on(connection, [number], value=b" " * 300_000 + b"%d" % number)
        numbers.append(number)
    with memory() as peak:
        assert drained(scene, size=1_000_000)[:3] == [100, 3, 3]
        assert peak() < 9_000_000  # all together have 18 MB
    scene.check(numbers)


def test_large_dead_letters_are_replayed_in_parts(on_sqlite: RelayScene) -> None:
    scene = on_sqlite
    for number in range(40):
        with scene.engine.begin() as connection:
            scene.insert_on(connection, [number], topic="no topic!", value=b" " * 300_000 + b"%d" % number)
    with scene.relay() as relay:
        relay.run(until_empty=True)
        ids = relay.dead_letters.ids()
        assert relay.dead_letters.oldest(1, with_rows=False)[0].row == {}
    with scene.relay(layout=replace(GENERIC, topic=scene.topic)) as relay, memory() as peak:
        assert relay.replay([*ids, 10_000]) == 40
        assert peak() < 16_000_000  # of JSON, rows and messages with 12 MB each, and its copies
    scene.check(range(40))
