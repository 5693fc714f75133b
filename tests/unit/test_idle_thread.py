"""The thread that visits idle writers: when it comes, when it ends, and what it keeps alive."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest

from dualwrite.recipe import idle
from dualwrite.recipe.idle import IdleThread
from fixtures.pace import LIMIT, until


class Writer:
    """Counts visits."""

    def __init__(self, *, fails: bool = False) -> None:
        self.visits = 0
        self._fails = fails

    def visit(self) -> float:
        self.visits += 1
        if self._fails:
            raise RuntimeError("It fails.")
        return 0.001


@pytest.fixture
def idle_thread(monkeypatch: pytest.MonkeyPatch) -> IdleThread:
    monkeypatch.setattr(idle, "CLEAR_AFTER", 0.001)
    return IdleThread()


def test_every_writer_is_visited_even_if_another_fails(idle_thread: IdleThread) -> None:
    writers = [Writer(fails=True), Writer(), Writer()]
    for writer in writers:
        idle_thread.watch(writer, Writer.visit)
    until(lambda: all(writer.visits > 2 for writer in writers), "all are visited", pause=0.001)
    for writer in writers:
        idle_thread.unwatch(writer)


def test_the_thread_ends_with_the_last_writer_and_starts_again(idle_thread: IdleThread) -> None:
    before = threading.active_count()
    for _ in range(3):
        first, second = Writer(), Writer()
        idle_thread.watch(first, Writer.visit)
        idle_thread.watch(second, Writer.visit)
        idle_thread.unwatch(first)
        assert threading.active_count() == before + 1
        idle_thread.unwatch(second)
        idle_thread.unwatch(second)
        assert threading.active_count() == before


@pytest.mark.slow
def test_an_unclosed_writer_is_not_kept_alive(idle_thread: IdleThread) -> None:
    before = threading.active_count()
    writer = Writer()
    left = weakref.ref(writer)
    idle_thread.watch(writer, Writer.visit)
    until(lambda: left() is not None and left().visits, "it is visited", pause=0.001)  # type: ignore[union-attr]
    del writer

    def is_gone() -> bool:
        gc.collect()
        return left() is None and threading.active_count() == before

    until(is_gone, "the writer and the thread are gone", pause=0.01)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_child_begins_without_writers() -> None:
    script = """
import os, threading
from dualwrite.recipe import idle
idle.CLEAR_AFTER = 0.001
class Writer: pass
parents, childs, visited = Writer(), Writer(), threading.Event()
visiting = threading.Event()
def visit(writer):
    visiting.set()
    return 0.001
idle.IDLE.watch(parents, visit)
visiting.wait(30)
with idle.IDLE._lock:
    child = os.fork()
if child == 0:
    idle.IDLE.watch(childs, lambda writer: visited.set() or 60)
    os._exit(0 if visited.wait(30) and list(idle.IDLE._watched) == [childs] else 1)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print("child", code, len(idle.IDLE._watched))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (done.returncode, done.stdout) == (0, "child 0 1\n"), done.stderr
