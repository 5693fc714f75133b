"""The page "The life of a transaction" is true: one `pool.run` calls the functions that it names, in their order."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import dualwrite
from crash.scene import Scene
from fixtures.rules_page import HERE
from pool.pool_scene import both, open_pool

PAGE = (HERE / "life.md").read_text(encoding="utf-8")
STEPS = [re.findall(r"`([a-z_/]+\.py|[A-Z]\w+\.\w+)`", line) for line in PAGE.splitlines() if re.match(r"\| \d+\. ", line)]
"""Of each step, the files and the functions that its line names."""

PACKAGE = Path(dualwrite.__file__).parent
MAX_LINES = 35
"""A screen."""


def functions(step: list[str]) -> list[tuple[str, str]]:
    """Each function of a step with its file."""
    found, file = [], ""
    for name in step:
        if name.endswith(".py"):
            file = name
        else:
            found.append((file, name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("producer", ["native"], indirect=True)
def test_one_call_passes_the_functions_that_the_page_names(scene: Scene) -> None:
    seen: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and Path(code.co_filename).is_relative_to(PACKAGE):
            seen.append((Path(code.co_filename).relative_to(PACKAGE).as_posix(), code.co_qualname))

    threading.setprofile(note)
    try:
        with open_pool(scene, size=1) as pool:
            pool.run(both, scene, 1)  # from now on the thread of the pool waits for the next call
            seen.clear()
            sys.setprofile(note)
            try:
                pool.run(both, scene, 2)
            finally:
                sys.setprofile(None)
            passed = list(seen)
    finally:
        threading.setprofile(None)
    assert scene.agree() == [1, 2]
    named = [function for step in STEPS for function in functions(step)]
    assert len(named) > len(STEPS)
    assert [each for each in named if each not in passed] == []
    steps = [max(map(passed.index, functions(step))) for step in STEPS[2:]]
    assert steps == sorted(steps), "the steps of the pool's thread are in another order"
    assert len(PAGE.splitlines()) <= MAX_LINES
