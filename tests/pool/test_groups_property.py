"""Units that succeed, fail and interfere, in any order and group: both sides hold exactly the reported outcomes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crash.scene import Scene
from dualwrite import PoolOptions, Transaction, WriterPool
from dualwrite.pool.group import SavepointPolicy
from dualwrite.stores.sql.isolation import Effect, SessionEffects
from fixtures.pace import LIMIT, until
from fixtures.tiers import thinned
from pool.pool_scene import both, held, open_pool, psycopg_store

numbers = itertools.count(1)


class NoNeedError(Exception):
    """A unit's own error."""


def succeeds(tx: Transaction, scene: Scene, number: int) -> None:
    both(tx, scene, number)


def fails_first(_tx: Transaction, _scene: Scene, _number: int) -> None:
    raise NoNeedError


def fails_last(tx: Transaction, scene: Scene, number: int) -> None:
    both(tx, scene, number)
    raise NoNeedError


def exits(tx: Transaction, scene: Scene, number: int) -> None:
    both(tx, scene, number)
    raise SystemExit(1)


def execute(tx: Transaction, sql: str) -> Any:
    """A statement on whatever handle the transaction has."""
    return tx.db.execute(sql) if isinstance(tx.db, psycopg.Connection) else tx.db.exec_driver_sql(sql)


VIOLATION = "INSERT INTO strict VALUES (0, NULL) RETURNING id"
errors = suppress(sa.exc.DBAPIError, psycopg.Error)


def violates_a_constraint(tx: Transaction, scene: Scene, number: int) -> None:
    """With psycopg it does not ask how its statement ended."""
    both(tx, scene, number)
    execute(tx, VIOLATION)


def swallows_an_error(tx: Transaction, scene: Scene, number: int) -> None:
    """PostgreSQL does not commit its transaction any more."""
    both(tx, scene, number)
    with errors:
        execute(tx, VIOLATION).fetchone()


def handles_an_error(tx: Transaction, scene: Scene, number: int) -> None:
    """Under its own savepoint it continues."""
    savepoint = tx.db.transaction if isinstance(tx.db, psycopg.Connection) else tx.db.begin_nested
    with errors, savepoint():
        execute(tx, VIOLATION)
    both(tx, scene, number)


def violates_it_at_the_commit(tx: Transaction, scene: Scene, number: int) -> None:
    """A deferred constraint: the group's COMMIT fails."""
    both(tx, scene, number)
    execute(tx, f"INSERT INTO strict VALUES ({number}, 0)")


def leaves_a_savepoint(tx: Transaction, scene: Scene, number: int) -> None:
    tx.db.begin_nested()
    both(tx, scene, number)


def sends_too_much(tx: Transaction, scene: Scene, number: int) -> None:
    both(tx, scene, number)
    tx.send(scene.topic, b"x" * 1_100_000)


def sends_nonsense(tx: Transaction, scene: Scene, number: int) -> None:
    both(tx, scene, number)
    tx.send("", b"x")


def commits_itself(tx: Transaction, scene: Scene, number: int) -> None:
    both(tx, scene, number)
    tx.db.commit()


def deadlocks(tx: Transaction, scene: Scene, number: int) -> None:
    """With another connection, which has what this one needs, and will need what this one has: PostgreSQL ends this one."""
    both(tx, scene, number)
    tx.db.execute(sa.text("SET LOCAL deadlock_timeout = '10ms'"))
    tx.db.execute(sa.text("SELECT 1 FROM locks WHERE id = 1 FOR UPDATE"))
    with ThreadPoolExecutor(1) as thread, scene.engine.connect() as other:
        other.execute(sa.text("SET LOCAL deadlock_timeout = '1h'"))
        other.execute(sa.text("SELECT 1 FROM locks WHERE id = 2 FOR UPDATE"))
        pid = other.scalar(sa.text("SELECT pg_backend_pid()"))
        waiting = thread.submit(other.execute, sa.text("SELECT 1 FROM locks WHERE id = 1 FOR UPDATE"))
        blocked = sa.text("SELECT cardinality(pg_blocking_pids(:pid))")
        until(lambda: tx.db.scalar(blocked, {"pid": pid}), "it waits for this one", pause=0.001)
        try:
            tx.db.execute(sa.text("SELECT 1 FROM locks WHERE id = 2 FOR UPDATE"))
        finally:
            with scene.engine.connect() as third:
                third.execute(sa.text("SELECT pg_cancel_backend(:pid)"), {"pid": pid})
            waiting.exception(LIMIT)


def exceeds_the_lock_timeout(tx: Transaction, scene: Scene, number: int) -> None:
    both(tx, scene, number)
    with scene.engine.connect() as other:
        other.execute(sa.text("SELECT 1 FROM locks WHERE id = 3 FOR UPDATE"))
        tx.db.execute(sa.text("SET LOCAL lock_timeout = '10ms'"))
        tx.db.execute(sa.text("SELECT 1 FROM locks WHERE id = 3 FOR UPDATE"))


def exceeds_the_statement_timeout(tx: Transaction, scene: Scene, number: int) -> None:
    both(tx, scene, number)
    tx.db.execute(sa.text("SET LOCAL statement_timeout = '10ms'"))
    tx.db.execute(sa.text("SELECT pg_sleep(60)"))


BEHAVIOURS: tuple[Callable[[Transaction, Scene, int], None], ...] = (
    succeeds,
    succeeds,
    fails_first,
    fails_last,
    exits,
    violates_a_constraint,
    swallows_an_error,
    handles_an_error,
    violates_it_at_the_commit,
    leaves_a_savepoint,
    sends_too_much,
    sends_nonsense,
    commits_itself,
    deadlocks,
    exceeds_the_lock_timeout,
    exceeds_the_statement_timeout,
)
GOOD = {succeeds, handles_an_error, leaves_a_savepoint}


@pytest.fixture(params=thinned(["as they come", "always"], kept=["always"]))  # as they come: what test_savepoint_policy decides
def savepoint_policy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """After all these failures no group would have one savepoint any more."""
    if request.param == "always":
        monkeypatch.setattr(SavepointPolicy, "allow", lambda _: True)


@pytest.fixture(autouse=True)
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units that set time limits would run alone; each of them fails and is undone, so the settings reach no other."""
    monkeypatch.setattr(SessionEffects, "of", lambda *_: Effect.NONE)


with_and_without_policy = pytest.mark.usefixtures("savepoint_policy")


@pytest.fixture
def pool(scene: Scene) -> Iterator[WriterPool[Any]]:
    with scene.engine.begin() as connection:
        for statement in (
            "DROP TABLE IF EXISTS strict, strict_parents, locks",
            "CREATE TABLE locks AS SELECT generate_series(1, 3) AS id",
            "CREATE TABLE strict_parents (id int PRIMARY KEY)",
            "CREATE TABLE strict (id int, parent int NOT NULL REFERENCES strict_parents DEFERRABLE INITIALLY DEFERRED)",
        ):
            connection.execute(sa.text(statement))
    with open_pool(scene, options=PoolOptions(group_units=8, timeout=LIMIT)) as opened:
        yield opened


# --- the same on psycopg connections, whose answers come late -----------------------------------------------------------------


def reads_what_it_wrote(tx: Transaction, scene: Scene, number: int) -> None:
    both(tx, scene, number)
    query = "SELECT count(*) FROM events WHERE writer = %s AND number = %s"
    found = tx.db.execute(query, (scene.transactional_id, number)).fetchone()
    assert found == (1,)


def violates_and_reads(tx: Transaction, scene: Scene, number: int) -> None:
    both(tx, scene, number)
    assert tx.db.execute("INSERT INTO strict VALUES (0, NULL)").rowcount == 1


def uses_the_session(tx: Transaction, scene: Scene, number: int) -> None:
    tx.session.execute(sa.text("SELECT 1"))
    both(tx, scene, number)


LATE: tuple[Callable[[Transaction, Scene, int], None], ...] = (
    succeeds,
    succeeds,
    succeeds,
    reads_what_it_wrote,
    fails_first,
    fails_last,
    violates_a_constraint,
    violates_and_reads,
    swallows_an_error,
    handles_an_error,
    violates_it_at_the_commit,
    sends_too_much,
    uses_the_session,
)
GOOD |= {reads_what_it_wrote, uses_the_session}


@pytest.fixture
def psycopg_pool(scene: Scene, pool: WriterPool[Any]) -> Iterator[WriterPool[Any]]:
    pool.close()
    options = PoolOptions(group_units=8, timeout=LIMIT)
    with psycopg_store(scene.url) as store, open_pool(scene, store, options=options) as opened:
        yield opened


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data(), together=st.booleans())
def check(pool: WriterPool[Any], scene: Scene, among: Sequence[Any], data: st.DataObject, together: bool) -> None:
    behaviours = data.draw(st.lists(st.sampled_from(among), min_size=1, max_size=24))
    units = [(behaviour, next(numbers)) for behaviour in behaviours]
    before = set(scene.rows())
    if together:
        with held(pool):
            futures = [pool.submit(behaviour, scene, number) for behaviour, number in units]
    else:
        with ThreadPoolExecutor(8) as threads:
            futures = [threads.submit(pool.run, behaviour, scene, number) for behaviour, number in units]
    errors = {number: future.exception(LIMIT) for (_, number), future in zip(units, futures, strict=True)}
    unjust = {number: errors[number] for behaviour, number in units if behaviour in GOOD and errors[number] is not None}
    assert not unjust, unjust
    told = {number for (_, number), future in zip(units, futures, strict=True) if future.exception(LIMIT) is None}
    assert told == {number for behaviour, number in units if behaviour in GOOD}
    assert set(scene.rows()) - before == told


@pytest.mark.slow
@with_and_without_policy
def test_both_sides_hold_exactly_the_reported_outcomes(pool: WriterPool[Any], scene: Scene) -> None:
    check(pool, scene, BEHAVIOURS)
    assert scene.agree()


@pytest.mark.slow
@with_and_without_policy
def test_both_sides_hold_exactly_the_reported_outcomes_with_pipelined_answers(
    psycopg_pool: WriterPool[Any], scene: Scene
) -> None:
    check(psycopg_pool, scene, LATE)
    assert scene.agree()


@with_and_without_policy
@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        (deadlocks, psycopg.errors.DeadlockDetected),
        (exceeds_the_lock_timeout, psycopg.errors.LockNotAvailable),
        (exceeds_the_statement_timeout, psycopg.errors.QueryCanceled),
    ],
)
def test_units_fail_for_the_reason_in_their_name(
    pool: WriterPool[Any], scene: Scene, behaviour: Any, expected: type[Exception]
) -> None:
    with pytest.raises(sa.exc.DBAPIError) as caught:
        pool.run(behaviour, scene, next(numbers))
    assert isinstance(caught.value.orig, expected)
    assert scene.agree() == []
