"""Runs the example's test file on broken variants of its store, each by pytest in this process; prints the results.

A script: `python mutant_runner.py folder`, with the file mutants.json in the folder (name -> text of in_memory.py).
"""

from __future__ import annotations

import gc
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from dualwrite.testing.stores import LeaseConformance

WAITING = (
    "test_nothing_is_committed_under_an_old_claim_after_a_new_one",
    "test_nothing_is_changed_under_an_old_claim_after_a_new_one",
    "test_a_lease_ends",
    "test_a_lease_that_has_ended_is_renewed_unless_another_owner_has_it",
    "test_a_lost_lease_is_not_renewed",
)


class Failures:
    """A plugin that records which test failed, and with which errors. The tests that wait run last, after those of leases."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        assert set(WAITING) <= {item.function.__name__ for item in items}
        items.sort(
            key=lambda item: (item.function.__name__ in WAITING, item.function.__module__ == LeaseConformance.__module__)
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
        report = yield
        if report.failed and call.excinfo is not None:
            kinds = [kind.__name__ for kind in call.excinfo.type.__mro__]
            self.found.append((f"{item.name}, {report.when}", " ".join(kinds)))
        return report


def main() -> None:
    folder = Path(sys.argv[1])
    results = {}
    sys.path.insert(0, str(folder))
    for name, source in json.loads((folder / "mutants.json").read_text(encoding="utf-8")).items():
        (folder / "in_memory.py").write_text(source, encoding="utf-8")
        for module in ("in_memory", "test_own_store"):
            sys.modules.pop(module, None)
        failures = Failures()
        options = ["-x", "-q", "-p", "no:cacheprovider", "-k", "TestInMemoryStore", str(folder / "test_own_store.py")]
        with redirect_stdout(io.StringIO()):
            code = pytest.main(options, plugins=[failures])
        results[name] = (int(code), failures.found)
        gc.freeze()  # pytest collects all garbage at the end, twice: let it look at this variant's only
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
