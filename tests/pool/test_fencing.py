"""Another process claims the ids of a pool, or of a writer, while units run and before they do: every path ends alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count, product
from typing import Any

import psycopg
import pytest

import dualwrite
from crash.scene import Scene
from crash.worker import timeouts
from dualwrite import DualWriter, PoolOptions, Transaction, WriterPool, aio
from dualwrite.errors import FencedError
from dualwrite.stores.sql import SqlStateStore
from dualwrite.testing import failpoints
from dualwrite.testing.topics import read_committed
from fixtures.pace import LIMIT, done, until
from fixtures.tiers import thinned
from pool.aio_scene import in_loop
from pool.pool_scene import both, grouped, open_pool

HANDLES = ["postgresql", "psycopg", "mariadb", "rocksdb", "zookeeper"]
"""Not SQLite, where a unit that has written locks the whole file."""


@pytest.fixture
def handle(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def database(request: pytest.FixtureRequest) -> str:
    handle = request.getfixturevalue("handle") if "handle" in request.fixturenames else "postgresql"
    return "postgresql" if handle == "psycopg" else handle


@contextmanager
def opened(scene: Scene, handle: str) -> Iterator[WriterPool[Any]]:
    if handle != "psycopg":
        with open_pool(scene, size=1) as pool:
            yield pool
        return
    address = scene.url.replace("+psycopg", "")
    with SqlStateStore.from_psycopg(lambda: psycopg.connect(address)) as store, open_pool(scene, store, size=1) as pool:
        yield pool


def claim(scene: Scene) -> None:
    """As another pool of the prefix does when the leases have expired: by a recoverer."""
    dualwrite.recover(scene.events.database, kafka=scene.settings, prefix=scene.transactional_id).raise_for_problems()


def claim_then_write(tx: Transaction, scene: Scene, number: int) -> None:
    claim(scene)
    both(tx, scene, number)


def write_then_claim(tx: Transaction, scene: Scene, number: int) -> None:
    both(tx, scene, number)
    claim(scene)


def paths(pool: WriterPool[Any], scene: Scene) -> Iterator[Callable[[Callable[..., Any], int], object]]:
    """The ways to run a unit on a pool; each raises what the unit's caller gets."""

    def in_a_block(unit: Callable[..., Any], number: int) -> None:
        with pool.transaction() as tx:
            unit(tx, scene, number)

    def in_a_group(unit: Callable[..., Any], number: int) -> None:
        first, second = grouped(pool, partial(both, scene=scene, number=number), partial(unit, scene=scene, number=number))
        assert type(first.exception()) is type(second.exception())
        first.result()

    def in_a_coroutine(unit: Callable[..., Any], number: int) -> None:
        async def work(tx: aio.AsyncTransaction[Any]) -> None:
            await tx.run_sync(unit, scene, number)

        async def main() -> None:
            await aio.AsyncWriterPool(pool).run(work)

        in_loop(main())

    yield lambda unit, number: pool.run(unit, scene, number)
    yield lambda unit, number: done(pool.with_options(key="k").submit(unit, scene, number))
    yield in_a_group
    yield in_a_block
    yield in_a_coroutine


@pytest.mark.parametrize(
    ("handle", "producer"),
    thinned(
        product(HANDLES, ["native", "librdkafka"]),
        kept=[("postgresql", "native"), ("rocksdb", "native")],
        quick=[("postgresql", "native")],
    ),
    indirect=True,
)
def test_an_id_that_is_claimed_while_a_unit_runs(scene: Scene, handle: str) -> None:
    """FencedError on every path, whether Kafka or the database has noticed it first; `attempts` run the unit again."""
    numbers = count()
    committed = []
    with opened(scene, handle) as pool:
        for run, unit in product(paths(pool, scene), (claim_then_write, write_then_claim)):
            with pytest.raises(FencedError) as caught:
                run(unit, next(numbers))
            assert str(caught.value.current_owner).startswith("recoverer")
        for point in ("group_after_units", "after_prepare"):
            claims = [partial(claim, scene)]
            with failpoints.armed(point, lambda: claims and claims.pop()()):  # noqa: B023  (called in the block)
                committed.append(pool.transactional(attempts=3)(both)(scene, next(numbers)))
            assert not claims
    name = f"{scene.transactional_id}.writer"
    with dualwrite.connect(scene.events.database, kafka=scene.settings, transactional_id=name, timeouts=timeouts()) as writer:
        with pytest.raises(FencedError), writer.transaction() as tx:
            claim_then_write(tx, scene, next(numbers))
        with writer.reopen().transaction() as tx:
            committed.append(both(tx, scene, next(numbers)))
    assert scene.agree() == committed


@pytest.mark.parametrize("producer", thinned(["native", "librdkafka"], kept=["native"]), indirect=True)
def test_an_id_that_is_claimed_before_a_unit_runs(scene: Scene) -> None:
    """The unit has done nothing yet: it runs on the same id, which is claimed again, or on another one."""
    numbers = count()
    committed = []

    async def in_a_coroutine() -> None:
        async with aio.AsyncWriterPool(pool).transaction() as tx:
            committed.append(await tx.run_sync(both, scene, next(numbers)))

    def some_of_each_kind() -> None:
        keyed = pool.with_options(key="k")
        in_order = [keyed.submit(both, scene, next(numbers)) for _ in range(4)]
        committed.extend(done(future) for future in in_order)
        for _ in range(pool.size):
            with pool.transaction() as tx:
                committed.append(both(tx, scene, next(numbers)))
        claim(scene)
        in_loop(in_a_coroutine())
        committed.extend(pool.run(both, scene, next(numbers)) for _ in range(pool.size))

    with open_pool(scene) as pool:
        some_of_each_kind()
        ids = set(pool.transactional_ids)
        claim(scene)
        some_of_each_kind()
        assert set(pool.transactional_ids) == ids, "a recoverer needs an id only while it recovers"
        claim(scene)
        claims = [partial(claim, scene)]
        with failpoints.armed("after_take_over", lambda: claims and claims.pop()()):  # once more, while it is claimed again
            committed.append(pool.run(both, scene, next(numbers)))
        assert not claims
        until(lambda: pool.size == 2, "the pool has another id")
        assert set(pool.transactional_ids) != ids
        taken = pool.transactional_ids[0]
        with dualwrite.connect(scene.events.database, kafka=scene.settings, transactional_id=taken) as writer:

            def used() -> bool:
                committed.append(pool.run(both, scene, next(numbers)))
                return taken not in pool.transactional_ids

            until(used, "the writer that was fenced has been used")
            with writer.transaction() as tx:
                committed.append(both(tx, scene, next(numbers)))
    assert scene.agree() == committed
    in_the_topic = [int(message.value or b"") for message in read_committed(scene.settings, scene.topic)]
    assert in_the_topic == committed, "all have one key"


def test_ids_that_are_claimed_each_time(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends after the pool's time limit, on both paths, and the unit has not run."""
    begin, begin_untraced = DualWriter.checked_transaction, DualWriter.untraced_transaction

    def claimed_first(writer: DualWriter[Any]) -> Any:
        claim(scene)
        return begin(writer)

    def untraced_claimed_first(writer: DualWriter[Any]) -> Any:
        claim(scene)
        return begin_untraced(writer)

    with open_pool(scene, size=1, options=PoolOptions(timeout=1)) as pool:
        with monkeypatch.context() as patched:
            patched.setattr(DualWriter, "checked_transaction", claimed_first)
            patched.setattr(DualWriter, "untraced_transaction", untraced_claimed_first)
            with pytest.raises(FencedError), pool.transaction() as tx:
                both(tx, scene, 1)
            assert isinstance(pool.submit(both, scene, 2).exception(LIMIT), FencedError)
        assert pool.run(both, scene, 3) == 3
    assert scene.agree() == [3]


@pytest.mark.parametrize("handle", ["postgresql", "psycopg"], indirect=True)
def test_units_of_a_writer_that_was_fenced_after_it_has_just_committed(scene: Scene, handle: str) -> None:
    """BEGIN goes out with the first statement then, so the units have begun: they run again, on a writer taken again."""
    runs: list[int] = []

    def counted(tx: Transaction, number: int) -> int:
        runs.append(number)
        return both(tx, scene, number)

    with opened(scene, handle) as pool:
        pool.run(both, scene, 1)
        claim(scene)
        assert pool.run(counted, 2) == 2
        pool.run(both, scene, 3)
        claim(scene)
        assert [each.result(LIMIT) for each in grouped(pool, *(partial(counted, number=number) for number in (4, 5)))] == [4, 5]
    assert runs.count(2) <= 2
    assert scene.agree() == [1, 2, 3, 4, 5]


def test_a_block_of_a_writer_that_was_fenced_after_it_has_just_committed(scene: Scene) -> None:
    """A block does not run again, so it does not begin."""
    with open_pool(scene, size=1) as pool:
        for number in (1, 2, 3):  # on every connection that is open: one that has just committed needs no check
            pool.run(both, scene, number)
        claim(scene)
        with pool.transaction() as tx:
            both(tx, scene, 4)
    assert scene.agree() == [1, 2, 3, 4]
