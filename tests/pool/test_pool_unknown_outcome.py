"""The COMMIT of a group has an unknown outcome: each caller gets committed or in doubt, never a wrong outcome.

`tests/crash/test_unknown_outcome.py` has the other databases: a pool's writers do with them what a single one does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import sqlalchemy as sa

from crash.databases import Databases
from crash.scene import Scene
from dualwrite import PoolOptions, Timeouts, Transaction, WriterPool
from dualwrite.devcluster import DevCluster
from dualwrite.errors import FencedError, InDoubtTransactionError, StoreCommitFailedError, StoreUnavailableError
from dualwrite.testing import failpoints
from dualwrite.testing.proxy import Link, TcpProxy
from fixtures.pace import LIMIT, done, happened, until, until_recorded
from fixtures.tiers import thinned
from pool.pool_scene import assert_reports_true, both, grouped, open_pool, psycopg_store

HANDLES = ("postgresql", "psycopg")
"""With psycopg, the units' statements go through libpq's pipeline."""

pytestmark = pytest.mark.usefixtures("producer")


@dataclass
class Proxied:
    """A scene whose pool connects through a proxy; the test's own checks bypass it."""

    scene: Scene
    proxy: TcpProxy
    url: str
    is_psycopg: bool
    cuts: int = 0
    has_run: bool = False
    """Whether one of our units has."""

    def break_the_next_commit(self, when: str, then: Callable[[], None] = lambda: None, *, for_good: bool = False) -> Any:
        """Cut the connection when the next COMMIT of our units passes, then call `then`; `for_good`: and refuse others."""

        def cut(link: Link) -> None:
            self.cuts += 1
            if for_good:
                self.proxy.refuse()
                self.proxy.cut()
            then()
            link.cut()

        broken: list[None] = []

        def arm() -> None:
            if self.has_run and not broken:  # once: the units may then run one by one
                broken.append(None)
                self.proxy.on_client_bytes(b"COMMIT\0", cut, when=when)  # type: ignore[arg-type]  # a literal

        return failpoints.armed("before_db_commit", arm)

    def unit(self, tx: Transaction, number: int, error: Exception | None = None) -> int:
        self.has_run = True
        both(tx, self.scene, number)
        if error is not None:
            raise error
        return number


@pytest.fixture
def proxied(databases: Databases, broker: DevCluster, handle: str) -> Iterator[Proxied]:
    scene = databases.scene("postgresql", broker)
    address = sa.make_url(scene.url)
    with TcpProxy("127.0.0.1", address.port or 0) as proxy:
        url = address.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
        yield Proxied(scene, proxy, url, handle == "psycopg")


@pytest.fixture
def size() -> int:
    """The number of the pool's writers."""
    return 1


@pytest.fixture
def pool(proxied: Proxied, claim: float, size: int) -> Iterator[WriterPool[Any]]:
    with ExitStack() as stack:
        database: Any = proxied.url
        if proxied.is_psycopg:
            database = stack.enter_context(psycopg_store(proxied.url, min_size=1, timeout=claim))
        options = PoolOptions(timeout=LIMIT, lease=600)  # a renewal commits too
        timeouts = Timeouts(claim=claim, kafka=LIMIT, delivery=LIMIT)
        yield stack.enter_context(open_pool(proxied.scene, database, size=size, options=options, timeouts=timeouts))


# --- the connection breaks, and the database can be asked -------------------------------------------------------------------


@pytest.mark.parametrize("claim", [LIMIT], ids=["patient"])
@pytest.mark.parametrize("fails", [False, True], ids=["hopeful", "careful"])
@pytest.mark.parametrize(
    ("handle", "when"),
    thinned(
        product(HANDLES, ("before", "after", "answered")),
        kept=[*product(HANDLES, ("before", "answered"))],
        quick=[("psycopg", "before"), ("psycopg", "answered")],
    ),
)
def test_the_connection_breaks_around_the_commit(proxied: Proxied, pool: WriterPool[Any], when: str, fails: bool) -> None:
    """If it is found out that the group was rolled back, its units run one by one."""
    units = [partial(proxied.unit, number=1), partial(proxied.unit, number=2, error=KeyError(2) if fails else None)]
    with proxied.break_the_next_commit(when):
        futures = grouped(pool, *units, partial(proxied.unit, number=3))
    assert proxied.cuts == 1
    assert [done(futures[0]), done(futures[2])] == [1, 3]
    expected = {1, 3} if fails else {1, 2, 3}
    if fails:
        assert isinstance(futures[1].exception(), KeyError)
    assert pool.run(partial(proxied.unit, number=4)) == 4
    assert set(proxied.scene.agree()) == {*expected, 4}


# --- the database stays away ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("claim", [1.0], ids=["impatient"])
@pytest.mark.parametrize(
    ("handle", "when"),
    thinned(
        product(HANDLES, ("before", "answered")),
        kept=[("postgresql", "answered"), ("psycopg", "before")],
    ),
)
def test_the_database_stays_unreachable(proxied: Proxied, pool: WriterPool[Any], when: str) -> None:
    """Units that succeeded are in doubt; a unit that failed raises its own error, since its part was certainly rolled back."""
    with proxied.break_the_next_commit(when, for_good=True):
        futures = grouped(
            pool,
            partial(proxied.unit, number=1),
            partial(proxied.unit, number=2, error=KeyError(2)),
            partial(proxied.unit, number=3),
        )
    assert proxied.cuts == 1
    for future in (futures[0], futures[2]):
        error = future.exception()
        assert isinstance(error, InDoubtTransactionError)
        assert error.database_committed is None
        assert not error.retriable
    assert futures[0].exception() is not futures[2].exception()
    assert isinstance(futures[1].exception(), KeyError)
    proxied.proxy.refuse(refusing=False)
    expected = {1, 3} if when == "answered" else set()
    assert assert_reports_true(proxied.scene) == expected
    error = pool.submit(partial(proxied.unit, number=4)).exception(LIMIT)
    assert error is None or isinstance(error, FencedError | StoreUnavailableError), error
    expected |= {4} if error is None else set()

    def runs_again() -> bool:
        try:
            return pool.run(partial(proxied.unit, number=5)) == 5
        except (StoreUnavailableError, FencedError):  # psycopg's pool pauses before it connects again; each lane is fenced once
            return False

    until(runs_again, "the pool's connections are back")
    assert set(proxied.scene.agree()) == {*expected, 5}


@pytest.mark.parametrize(("claim", "size"), [(1.0, 2)], ids=["impatient"])
@pytest.mark.parametrize("handle", ["postgresql"])
def test_a_call_in_doubt_is_resolved_although_no_other_follows(proxied: Proxied, pool: WriterPool[Any]) -> None:
    with proxied.break_the_next_commit("answered", for_good=True):
        error = pool.submit(partial(proxied.unit, number=1)).exception(LIMIT)
    assert isinstance(error, InDoubtTransactionError)
    proxied.proxy.refuse(refusing=False)
    until_recorded(proxied.scene.messages, [1], "consumers get the message")
    assert proxied.scene.agree() == [1]


@pytest.mark.slow
@pytest.mark.parametrize("claim", [1.0], ids=["impatient"])
@pytest.mark.parametrize("handle", ["postgresql"])
def test_only_a_unit_whose_own_commit_was_sent_is_in_doubt(proxied: Proxied, pool: WriterPool[Any]) -> None:
    """The group was rolled back because of two of its units; the first one runs alone, and the others don't run again."""
    scene, runs = proxied.scene, []
    table = f"strict_{scene.transactional_id.replace('-', '_')}"
    with scene.engine.begin() as connection:
        connection.execute(sa.text(f"CREATE TABLE {table} (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)"))

    def strict(tx: Transaction, number: int) -> None:
        runs.append(number)
        proxied.has_run = len(runs) > 3
        tx.db.execute(sa.text(f"INSERT INTO {table} VALUES (:row)"), {"row": min(number, 2)})
        both(tx, scene, number)

    with proxied.break_the_next_commit("answered", for_good=True):
        futures = grouped(pool, *(partial(strict, number=number) for number in (1, 2, 3)))
    assert runs == [1, 2, 3, 1]
    assert isinstance(futures[0].exception(), InDoubtTransactionError)
    for future in futures[1:]:
        error = future.exception()
        assert isinstance(error, StoreCommitFailedError)
        assert error.retriable
    proxied.proxy.refuse(refusing=False)
    assert assert_reports_true(scene) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("claim", [1.0], ids=["impatient"])
@pytest.mark.parametrize("handle", ["postgresql"])
def test_a_pools_writer_whose_own_claim_got_no_answer_keeps_its_id(proxied: Proxied, pool: WriterPool[Any]) -> None:
    """It is not fenced by a claim that it made itself: it resolves the group and goes on, under the same lease."""
    ids = pool.transactional_ids

    def lose_the_claim() -> None:
        proxied.proxy.on_client_bytes(b"COMMIT\0", lose_the_database, when="answered")

    def lose_the_database(link: Link) -> None:
        proxied.proxy.refuse()
        proxied.proxy.cut()
        link.cut()

    with proxied.break_the_next_commit("answered", lose_the_claim):
        (future,) = grouped(pool, partial(proxied.unit, number=1))
    assert isinstance(future.exception(), InDoubtTransactionError)
    proxied.proxy.refuse(refusing=False)
    assert pool.run(partial(proxied.unit, number=2)) == 2
    assert pool.transactional_ids == ids
    assert set(proxied.scene.agree()) == {1, 2}


# --- an unexpected error ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["before_db_commit", "after_db_commit", "before_kafka_commit"])
def test_an_unexpected_error_of_the_commit_is_in_doubt(scene: Scene, point: str) -> None:
    """Whether it came before the COMMIT or after it: a pool that can't tell says so."""

    def unit(tx: Transaction, number: int) -> None:
        has_run.set()
        both(tx, scene, number)

    def wrong() -> None:
        if has_run.is_set() and not raised.is_set():
            raised.set()
            raise ValueError("a bug")

    has_run, raised = threading.Event(), threading.Event()
    with open_pool(scene, size=1) as pool:
        with failpoints.armed(point, wrong):
            futures = grouped(pool, *(partial(unit, number=number) for number in (1, 2)))
        happened(raised)
        for future in futures:
            error = future.exception()
            assert isinstance(error, InDoubtTransactionError)
            assert not error.retriable
            assert error.database_committed is None
        assert pool.run(both, scene, 3) == 3
    assert set(scene.agree()) == ({3} if point == "before_db_commit" else {1, 2, 3})
