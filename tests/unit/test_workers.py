"""The number of processes that run the tests, and the order of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures import workers
from fixtures.tables import table

pytest_plugins = ["pytester"]

TESTS = Path(__file__).parents[1]


@table(
    ("arguments", "cores", "expected"),
    [
        (["tests"], 2, 4),
        (["tests"], 1, 3),
        (["tests"], 8, 10),
        (["tests/unit", "tests/model"], 2, 0),
        (["tests/unit/test_state.py"], 2, 0),
        (["tests/kafka/test_probe.py"], 2, 0),
        (["tests/kafka/test_probe.py::test_a", "tests/kafka/test_probe.py::test_b"], 2, 0),
        (["tests/kafka/test_probe.py", "tests/stores/test_isolation.py"], 2, 2),
        (["tests/kafka/test_probe.py", "tests/unit"], 2, 0),
        (["tests/kafka"], 2, 4),
    ],
)
def test_processes_are_started_for_several_files_with_servers(arguments: list[str], cores: int, expected: int) -> None:
    assert workers.workers_for(workers.files_of(arguments, TESTS.parent), cores) == expected


def test_the_longest_files_come_first_and_a_file_stays_as_it_was(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers = slow")
    for folder, text in {
        "unit": "def test_a(): pass\ndef test_b(): pass",
        "kafka": "def test_c(): pass",
        "spark": "import pytest\n@pytest.mark.slow\ndef test_d(): pass\ndef test_e(): pass",
        "stores": "def test_f(): pass\ndef test_g(): pass",
    }.items():
        place = pytester.mkdir(folder)
        (place / f"test_{folder}_one.py").write_text(text)
        if folder == "spark":
            (place / f"test_{folder}_two.py").write_text(text)
    items, _ = pytester.inline_genitems()
    found = [item.name for item in workers.longest_first(items)]
    assert found == ["test_d", "test_e", "test_d", "test_e", "test_f", "test_g", "test_c", "test_a", "test_b"]
