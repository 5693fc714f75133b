"""A program with a pool: its normal end, a signal handler, Ctrl-C, a fork."""

from __future__ import annotations

import signal

import pytest

from crash.scene import Scene
from fixtures.tiers import thinned
from pool.pool_scene import program, scene_rows_are_clear


@pytest.mark.slow
def test_queued_calls_are_finished_at_the_end_of_the_program(scene: Scene) -> None:
    """Nobody has called close()."""
    ended = program("futures = [pool.submit(unit, number, 0.01) for number in range(50)]", scene)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert scene.agree() == list(range(50))
    scene_rows_are_clear(scene)


@pytest.mark.slow
def test_a_signal_handler_ends_the_program(scene: Scene) -> None:
    """By `sys.exit()`, as in any program: what was submitted is finished."""
    ended = program(
        """
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        print("ready", flush=True)
        for number in range(100_000):
            pool.submit(unit, number)
            if number > 30:
                time.sleep(0.01)
        """,
        scene,
        signals=signal.SIGTERM,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    found = scene.agree()
    assert found == list(range(len(found)))
    scene_rows_are_clear(scene)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["pool.close()", ""], ids=["in close()", "at the end of the program"])
def test_a_signal_handler_that_exits_while_the_pool_is_closing(scene: Scene, end: str) -> None:
    """What was submitted is finished all the same."""
    ended = program(
        f"""
        def handler(*_):
            received.set()
            sys.exit(0)

        def first(tx):
            while not pool.is_closed:
                time.sleep(0.01)
            print("ready", flush=True)
            received.wait()
            unit(tx, 1)

        received = threading.Event()
        signal.signal(signal.SIGTERM, handler)
        pool.submit(first)
        for number in range(2, 30):
            pool.with_options(key="one").submit(unit, number)
        {end}
        """,
        scene,
        signals=signal.SIGTERM,
    )
    assert ended.returncode == 0, ended.stderr
    assert scene.agree() == [*range(1, 30)]
    scene_rows_are_clear(scene)


@pytest.mark.slow
@pytest.mark.parametrize("end", thinned(["pool.close()", "pool.resize(1)", ""], kept=["pool.close()", ""]))
def test_a_signal_handler_that_closes_the_pool_while_it_is_closing(scene: Scene, end: str) -> None:
    """Or while its size changes: the interrupted call goes on, and the pool is closed at its end."""
    ended = program(
        f"""
        def handler(*_):
            pool.close()
            received.set()

        def waiting_unit(tx, number):
            begun.wait()
            received.wait()
            unit(tx, number)

        def separate():
            with pool.transaction() as tx:
                waiting_unit(tx, 2)

        def ready():
            begun.wait()
            while not pool._is_in_progress:
                time.sleep(0.01)
            print("ready", flush=True)

        begun, received = threading.Barrier(4), threading.Event()
        signal.signal(signal.SIGTERM, handler)
        pool.submit(waiting_unit, 1)
        for function in (separate, ready):
            threading.Thread(target=function, daemon=True).start()
        begun.wait()
        {end}
        """,
        scene,
        signals=signal.SIGTERM,
    )
    assert ended.returncode == 0, ended.stderr
    assert sorted(scene.agree()) == [1, 2]
    scene_rows_are_clear(scene)


@pytest.mark.slow
def test_a_signal_that_does_not_interrupt_the_wait_of_closing_is_noticed(scene: Scene) -> None:
    """As one that comes just before the wait begins: here another thread gets it, so the main thread sleeps on."""
    ended = program(
        """
        def waiting_unit(tx):
            while not pool.is_closed:
                time.sleep(0.01)
            time.sleep(0.5)  # the main thread has begun to wait
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            received.wait()
            unit(tx, 1)

        received = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: received.set())
        pool.submit(waiting_unit)
        pool.close(timeout=600)
        """,
        scene,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert scene.agree() == [1]


def test_ctrl_c_interrupts_the_wait_and_not_the_commit(scene: Scene) -> None:
    """The unit that has begun is committed; the one that has not does not run."""
    ended = program(
        """
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupted = threading.Event()
        slow = pool.submit(lambda tx: (unit(tx, 1), interrupted.wait())[0])
        while not slow.running():
            time.sleep(0.01)
        try:
            print("ready", flush=True)
            pool.run(unit, 2)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        interrupted.set()
        assert slow.result() == 1
        pool.close()
        """,
        scene,
        signals=signal.SIGINT,
    )
    assert (ended.returncode, ended.stderr, ended.stdout) == (0, "", "interrupted\n")
    assert scene.agree() == [1]


@pytest.mark.slow
def test_a_forked_child_must_create_its_own_pool(scene: Scene) -> None:
    ended = program(
        """
        pool.run(unit, 1)
        if not (child := os.fork()):
            try:
                for call in (lambda: pool.run(unit, 2), lambda: pool.submit(unit, 2), lambda: pool.transaction().__enter__()):
                    try:
                        call()
                    except dualwrite.UsageError as error:
                        assert "after a fork" in str(error), error
                    else:
                        os._exit(2)
                pool.close()
            except BaseException:
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        pool.run(unit, 3)
        """,
        scene,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert scene.agree() == [1, 3]
