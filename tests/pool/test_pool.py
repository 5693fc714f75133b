"""A pool on real databases and a real broker: results, order, limits, when a call returns, misuse."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

import dualwrite
from crash.databases import DATABASES
from crash.scene import Scene
from dualwrite import PoolOptions, Transaction
from dualwrite.errors import (
    ConfigurationError,
    NestedTransactionError,
    PoolTimeoutError,
    StoreCommitFailedError,
    UsageError,
    WriterClosedError,
)
from dualwrite.pool.calls import UnitCall
from dualwrite.testing import failpoints
from fixtures.pace import LIMIT, done, happened
from fixtures.tiers import thinned
from pool.pool_scene import both, both_producers, grouped, held, open_pool, then_raise

every_database = pytest.mark.parametrize("database", thinned(DATABASES, quick=["postgresql"]))


def test_the_default_time_limits_suit_a_request(scene: Scene) -> None:
    """A transaction keeps its row locks while it waits for Kafka. A limit that is given is kept."""
    for given, seconds in ((None, 20.0), (dualwrite.Timeouts(claim=5.0), 20.0), (dualwrite.Timeouts(delivery=60.0), 60.0)):
        with open_pool(scene, size=1, timeouts=given) as pool:
            (writer,) = pool._writers._open
            assert {lane.ownership.parties.timeouts.for_delivery for lane in writer._lanes} == {seconds}


# --- what a caller gets -----------------------------------------------------------------------------------------------------


@both_producers
def test_a_unit_that_raises_does_not_affect_the_others(scene: Scene) -> None:
    error = ValueError("no")
    with open_pool(scene) as pool:
        futures = grouped(
            pool,
            partial(both, scene=scene, number=1),
            partial(then_raise, scene=scene, number=2, error=error),
            partial(both, scene=scene, number=3),
        )
        assert [futures[0].result(), futures[2].result()] == [1, 3]
        assert futures[1].exception() is error
        with pytest.raises(ValueError, match="no"):
            pool.run(then_raise, scene, 4, ValueError("no"))
    assert scene.agree() == [1, 3]


@every_database
def test_a_group_is_one_transaction_on_both_sides(scene: Scene) -> None:
    numbers = list(range(1, 41))
    commits: list[None] = []
    with open_pool(scene, size=1) as pool, failpoints.armed("after_db_commit", lambda: commits.append(None)):
        futures = grouped(pool, *(partial(both, scene=scene, number=number) for number in numbers))
    assert [future.result() for future in futures] == numbers
    assert len(commits) <= 2, "the unit that was held back, and the others"
    assert scene.agree() == numbers


@every_database
def test_a_group_whose_units_all_fail_commits_nothing(scene: Scene) -> None:
    with open_pool(scene) as pool:
        futures = grouped(
            pool, *(partial(then_raise, scene=scene, number=number, error=KeyError(number)) for number in (1, 2, 3))
        )
        for number, future in zip((1, 2, 3), futures, strict=True):
            with pytest.raises(KeyError, match=str(number)):
                future.result()
        pool.run(both, scene, 4)
    assert scene.agree() == [4]


def test_a_unit_runs_in_the_context_of_its_caller(scene: Scene) -> None:
    request: contextvars.ContextVar[str] = contextvars.ContextVar("request")

    def unit(tx: Transaction, number: int) -> tuple[int, str]:
        both(tx, scene, number)
        return number, request.get()

    def call(number: int) -> tuple[int, str]:
        request.set(f"request {number}")
        return pool.run(unit, number)

    with open_pool(scene) as pool, ThreadPoolExecutor(8) as threads:
        assert list(threads.map(call, range(40))) == [(number, f"request {number}") for number in range(40)]


def test_a_decorated_function_is_a_unit(scene: Scene) -> None:
    attempts: list[int] = []
    with open_pool(scene) as pool:

        @pool.transactional
        def place(tx: Transaction, number: int, *, times: int = 1) -> int:
            return both(tx, scene, number) * times

        @pool.transactional(attempts=3)
        def unlucky(tx: Transaction, number: int) -> None:
            both(tx, scene, number)
            attempts.append(number)
            if len(attempts) < 3:
                raise StoreCommitFailedError("a conflict")

        assert place(2, times=10) == 20
        unlucky(3)
        with pytest.raises(UsageError, match="attempts must be at least 1"):
            pool.transactional(attempts=0)(both)
    assert attempts == [3, 3, 3]
    assert scene.agree() == [2, 3]


@pytest.mark.parametrize("size", [1, 3])
def test_a_unit_that_only_returns_a_generator_is_refused(scene: Scene, size: int) -> None:
    """Nothing of it has run; in a group, the others are committed."""

    def lazy(tx: Transaction) -> Iterator[int]:
        yield both(tx, scene, 1)

    with open_pool(scene) as pool:
        futures = grouped(pool, lazy, *(partial(both, scene=scene, number=number) for number in range(2, size + 1)))
        with pytest.raises(UsageError, match="lazy returned a generator"):
            futures[0].result()
        with pytest.raises(UsageError, match="lazy returned a generator"):
            pool.transactional(attempts=2)(lazy)()
    assert scene.agree() == list(range(2, size + 1))


def test_the_name_of_a_call_of_a_partial() -> None:
    """For errors: a partial has no name."""
    assert UnitCall(partial(both, number=1), (), {}, None).name.startswith("functools.partial")


# --- ordering -----------------------------------------------------------------------------------------------------------------


def test_a_done_callback_that_fails_changes_nothing_for_other_callers(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Even if the error is no Exception, as in a callback that reads the result of a unit that has raised SystemExit."""
    with open_pool(scene) as pool:
        with held(pool):
            failing = pool.submit(then_raise, scene, 1, SystemExit(1))
            failing.add_done_callback(lambda future: future.result())
            good = [pool.submit(both, scene, number) for number in (2, 3)]
        assert [done(future) for future in good] == [2, 3]
        with pytest.raises(SystemExit):
            done(failing)
    assert "a done-callback of then_raise has failed" in caplog.text
    assert scene.agree() == [2, 3]


@pytest.mark.parametrize("size", [1, 2])
def test_a_done_callback_submits_the_next_unit(scene: Scene, size: int) -> None:
    chained: Future[int] = Future()

    def submit_next(_: Future[int]) -> None:
        pool.submit(both, scene, 2).add_done_callback(lambda future: chained.set_result(future.result()))

    with open_pool(scene, size=size) as pool:
        pool.submit(both, scene, 1).add_done_callback(submit_next)
        assert done(chained) == 2
    assert scene.agree() == [1, 2]


def test_a_done_callback_cannot_wait_for_the_pool(scene: Scene) -> None:
    def use(_: Future[int]) -> None:
        for call in (lambda: pool.run(both, scene, 2), pool.transaction().__enter__, pool.close):
            try:
                call()
            except NestedTransactionError as error:
                errors.append(error)
        finished.set()

    errors: list[NestedTransactionError] = []
    finished = threading.Event()
    with open_pool(scene) as pool:
        with held(pool):
            pool.submit(both, scene, 1).add_done_callback(use)
        happened(finished)
        assert ["in a done-callback" in str(error) for error in errors] == [True, True, True]
    assert scene.agree() == [1]


class _Incomparable:
    """An ordering key whose comparison with another one fails."""

    def __eq__(self, other: object) -> bool:
        raise ArithmeticError("These keys can't be compared.")

    def __hash__(self) -> int:
        return 1


def test_a_key_that_is_not_hashable_is_refused(scene: Scene) -> None:
    with open_pool(scene) as pool:
        with pytest.raises(UsageError, match="unhashable"):
            pool.with_options(key=[1])
        assert pool.run(both, scene, 1) == 1
    assert scene.agree() == [1]


def test_an_error_of_a_key_is_raised_in_its_call_only(scene: Scene) -> None:
    with open_pool(scene) as pool:
        with held(pool):
            futures = [pool.with_options(key=_Incomparable()).submit(both, scene, number) for number in (1, 2, 3)]
            plain = pool.submit(both, scene, 4)
        assert [done(futures[0]), done(plain)] == [1, 4]
        for future in futures[1:]:
            with pytest.raises(ArithmeticError):
                done(future)
        assert pool.run(both, scene, 5) == 5
    assert scene.agree() == [1, 4, 5]


# --- limits -------------------------------------------------------------------------------------------------------------------


def test_a_timeout_names_the_unit_that_was_waited_for(scene: Scene) -> None:
    with open_pool(scene, size=1) as pool:
        with held(pool):
            with pytest.raises(PoolTimeoutError, match=r"held.<locals>.hold") as caught:
                pool.with_options(timeout=0.1).run(both, scene, 1)
            with pytest.raises(PoolTimeoutError, match=r"held.<locals>.hold"), pool.transaction(timeout=0.1):
                pass
        assert caught.value.retriable
        assert caught.value.timeout == 0.1
        assert pool.run(both, scene, 2) == 2
    assert scene.agree() == [2]


@pytest.mark.slow
def test_a_unit_that_has_started_is_waited_for(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its outcome would be unknown otherwise."""
    begun = threading.Event()

    def slow(tx: Transaction) -> int:
        begun.set()
        time.sleep(0.5)
        return both(tx, scene, 1)

    with open_pool(scene) as pool:
        bound = pool.with_options(timeout=0.1)
        submit = bound._submit

        def submit_and_wait(*arguments: Any, **more: Any) -> None:
            """The time limit begins when the unit has begun."""
            submit(*arguments, **more)
            happened(begun)

        monkeypatch.setattr(bound, "_submit", submit_and_wait)
        assert bound.run(slow) == 1
        with pytest.raises(TimeoutError, match="mine"):
            pool.run(then_raise, scene, 2, TimeoutError("mine"))
    assert scene.agree() == [1]


def test_a_cancelled_call_does_not_run(scene: Scene) -> None:
    with open_pool(scene, size=1) as pool:
        with held(pool):
            future = pool.submit(both, scene, 1)
            other = pool.submit(both, scene, 2)
            assert future.cancel()
        assert done(other) == 2
        with pytest.raises(CancelledError):
            future.result()
    assert scene.agree() == [2]


def test_a_group_is_complete_at_its_limits(scene: Scene) -> None:
    commits: list[None] = []
    options = PoolOptions(group_units=4, timeout=LIMIT)
    with open_pool(scene, size=1, options=options) as pool, failpoints.armed("after_db_commit", lambda: commits.append(None)):
        grouped(pool, *(partial(both, scene=scene, number=number) for number in range(11)))
    assert len(commits) == 4, "the one that was held back, 4, 4, 3"
    commits.clear()
    options = PoolOptions(group_bytes=3, timeout=LIMIT)
    with open_pool(scene, size=1, options=options) as pool, failpoints.armed("after_db_commit", lambda: commits.append(None)):
        grouped(pool, *(partial(both, scene=scene, number=number) for number in range(20, 23)))
    assert len(commits) == 4, "the one that was held back, and each of the others: its message alone is larger"
    assert scene.agree() == [*range(11), 20, 21, 22]


@pytest.mark.parametrize(
    "wrong",
    [
        {"acknowledge": "soon"},
        {"group_units": 0},
        {"group_units": 1.5},
        {"group_bytes": True},
        {"timeout": 0},
        {"timeout": "soon"},
        {"lease": 0},
        {"lease": True},
        {"max_size": 0},
    ],
    ids=str,
)
def test_options_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        PoolOptions(**wrong)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("acknowledge", r"create_pool\(\) .*'acknowledge'; pass options=PoolOptions\(acknowledge=…\)"),
        ("group_size", r"create_pool\(\) .*'group_size'$"),
    ],
)
def test_unknown_arguments_are_refused_before_anything_is_opened(name: str, why: str) -> None:
    given: dict[str, Any] = {name: "journaled"}
    with pytest.raises(TypeError, match=why):
        dualwrite.create_pool("postgresql+psycopg://nowhere.invalid/db", prefix="x", **given)


def test_arguments_are_checked_before_anything_is_opened(scene: Scene) -> None:
    for wrong in ({"size": 0}, {"size": True}, {"size": 65}, {"prefix": "a#b"}, {"transactional_id": "mine"}):
        with pytest.raises(ConfigurationError):
            dualwrite.create_pool("sqlite:///nowhere/at/all", **{"prefix": "shop", "kafka": "nowhere:1", **wrong})
    with open_pool(scene) as pool:
        assert pool.size == 2


# --- when a call returns ------------------------------------------------------------------------------------------------------


def test_visible_returns_when_consumers_can_read(scene: Scene) -> None:
    with open_pool(scene) as pool:
        for number in range(3):
            pool.run(both, scene, number)
            assert scene.messages() == list(range(number + 1))


# --- misuse -------------------------------------------------------------------------------------------------------------------


def test_a_unit_cannot_use_its_own_pool(scene: Scene) -> None:
    """It would wait for itself."""
    with open_pool(scene) as pool:

        def nested(_: Transaction) -> None:
            pool.run(both, scene, 1)

        def own(_: Transaction) -> None:
            with pool.transaction():
                pass

        for unit in (nested, own, lambda _: pool.close()):
            with pytest.raises(NestedTransactionError):
                pool.run(unit)


def test_a_unit_keeps_nothing_of_its_transaction(scene: Scene) -> None:
    kept: list[Transaction] = []
    with open_pool(scene) as pool:
        grouped(pool, kept.append, kept.append)
        for tx in kept:
            with pytest.raises(WriterClosedError):
                tx.send(scene.topic, "late")


def test_an_async_unit_is_refused(scene: Scene) -> None:
    async def unit(tx: Transaction) -> None:
        both(tx, scene, 1)

    with open_pool(scene) as pool, pytest.raises(UsageError, match="returned a coroutine"):
        pool.run(unit)
    assert scene.rows() == []


def test_a_unit_cannot_send_offsets(scene: Scene) -> None:
    with open_pool(scene) as pool, pytest.raises(UsageError, match=r"pool\.transaction"):
        pool.run(lambda tx: tx.send_offsets(object()))


def test_invalid_messages_are_refused_by_send(scene: Scene) -> None:
    with open_pool(scene) as pool:
        for wrong in ({"topic": ""}, {"value": 3}, {"key": 3}, {"partition": -1}, {"timestamp": 1.5}, {"headers": 7}):
            with pytest.raises(dualwrite.InvalidMessageError):
                pool.run(lambda tx, wrong: tx.send(**{"topic": scene.topic, "value": "x", **wrong}), wrong)
        with pytest.raises(dualwrite.InvalidMessageError):
            pool.run(lambda tx: tx.send_many(scene.topic, ["a"], keys=["a", "b"]))
        pool.run(lambda tx: tx.send_many(scene.topic, ["1", "2"], keys=["a", "b"]))
    assert scene.messages() == [1, 2]


# --- transactions of their own ------------------------------------------------------------------------------------------------


def test_separate_transactions_beside_groups(scene: Scene) -> None:
    def own(number: int) -> None:
        with pool.transaction() as tx:
            both(tx, scene, number)
            assert type(tx) is Transaction  # not what the pool itself works with
            assert tx.transactional_id in pool.transactional_ids
        assert tx.state is not None

    with open_pool(scene, size=3) as pool, ThreadPoolExecutor(8) as threads:
        for result in [
            *(threads.submit(own, number) for number in range(20)),
            *(threads.submit(pool.run, both, scene, number) for number in range(20, 60)),
        ]:
            done(result)
        with pytest.raises(ValueError, match="no"), pool.transaction() as tx:
            then_raise(tx, scene, 99, ValueError("no"))
    assert scene.agree() == list(range(60))
