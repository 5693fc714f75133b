"""Without Spark installed, dualwrite and its command line work, and `dualwrite.spark` says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fixtures.pace import LIMIT

SPARKS = ("pyspark", "pyarrow", "pandas")


def run(code: str, *missing: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process where packages can't be imported, as if they were not installed."""
    hidden = f"import sys; sys.modules |= dict.fromkeys({missing!r})\n"
    command = [sys.executable, "-W", "ignore", "-c", hidden + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)


@pytest.mark.slow
def test_the_rest_needs_no_spark() -> None:
    done = run("import dualwrite, dualwrite.cli.recover, dualwrite.migration, dualwrite.jobs.job_recovery", *SPARKS)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_importing_dualwrite_loads_nothing_of_spark() -> None:
    done = run(f"import dualwrite, dualwrite.cli.recover; print([name for name in {SPARKS!r} if name in sys.modules])")
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.slow
def test_the_data_source_does_not_import_pandas() -> None:
    """Spark imports it in a new process for each plan and each commit."""
    done = run("import dualwrite.spark.source; print('pandas' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize("missing", ["pyspark", "pyarrow"])
def test_dualwrite_spark_says_what_to_install(missing: str) -> None:
    done = run("import dualwrite.spark", missing)
    assert done.returncode == 1
    (told,) = [line for line in done.stderr.splitlines() if line.startswith("dualwrite.errors.MissingDependencyError")]
    assert f"needs PySpark and pyarrow, but {missing} is not installed" in told
    assert "Next step: pip install 'dualwrite[spark]'" in told
