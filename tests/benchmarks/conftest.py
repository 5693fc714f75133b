"""The benchmarks' modules, which are scripts next to each other and no package."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.benchmark_process import BENCHMARKS


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of the benchmarks; after the test its short name is free again."""
    for file in BENCHMARKS.glob("*.py"):
        monkeypatch.delitem(sys.modules, file.stem, raising=False)  # a folder of the tests can have the same name
    before = set(sys.modules)
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == BENCHMARKS:
            del sys.modules[name]
