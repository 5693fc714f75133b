"""Warnings on machines on which Spark would fail: no Java, or workers in a Python without dualwrite."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark import cloudpickle

import dualwrite.spark
from dualwrite.spark.setup import java_problem, warn_without_java
from spark.job import LIMIT
from spark.session import NOT_OURS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Spark's workers can't import a test

NO_JAVA = "SparkSetupWarning: Spark will not start: there is no Java (JAVA_HOME is not set, and PATH has no java). Next step:"
OURS = {"JAVA_HOME", "PATH", "SPARK_CONF_DIR", "SPARK_ENV_LOADED", *NOT_OURS}

Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a program without Java, or with the given environment variables; returns what it writes to stderr."""

    def run(code: str = "import dualwrite.spark", **environment: str) -> str:
        environ = {name: value for name, value in os.environ.items() if name not in OURS}
        command = [sys.executable, "-c", code]
        environ |= {"PATH": str(tmp_path), **environment}
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT, check=False).stderr

    return run


@pytest.fixture
def old_java(tmp_path: Path) -> Path:
    """A Java 11 home, with only the files that are checked."""
    home = tmp_path / "java-11"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").write_text("#!/bin/sh\n")
    (home / "bin" / "java").chmod(0o755)
    (home / "release").write_text('IMPLEMENTOR="x"\nJAVA_VERSION="11.0.2"\n')
    return home


@pytest.mark.slow
def test_there_is_no_java(run: Run) -> None:
    told = run()
    assert NO_JAVA in told
    assert "install Java 17 or 21" in told
    assert told.startswith("<string>:1:")  # the warning points to the user's import


@pytest.mark.slow
def test_a_missing_java_is_reported_before_spark_fails(run: Run, tmp_path: Path) -> None:
    for name in ("bash", "dirname", "ps"):  # what Spark's launch script needs besides Java
        found = shutil.which(name)
        if found is not None:
            (tmp_path / name).symlink_to(found)
    told = run("import dualwrite.spark; from pyspark.sql import SparkSession; SparkSession.builder.getOrCreate()")
    assert NO_JAVA in told.partition("JAVA_GATEWAY_EXITED")[0]
    assert "JAVA_GATEWAY_EXITED" in told


@pytest.mark.slow
def test_an_invalid_java_home(run: Run, tmp_path: Path) -> None:
    told = run(JAVA_HOME=str(tmp_path / "nowhere"), PATH=os.environ["PATH"])  # then Spark ignores PATH
    assert f"Spark will not start: JAVA_HOME is '{tmp_path / 'nowhere'}', which has no bin/java." in told


@pytest.mark.slow
def test_a_java_that_is_too_old(run: Run, old_java: Path) -> None:
    for environment in ({"JAVA_HOME": str(old_java)}, {"PATH": str(old_java / "bin")}):
        assert f"Spark will not start: {old_java / 'bin' / 'java'} is Java 11." in run(**environment)


@pytest.mark.slow
def test_the_java_of_these_tests(run: Run, spark_environment: dict[str, str]) -> None:
    assert run(JAVA_HOME=spark_environment["JAVA_HOME"]) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SPARK_REMOTE", "SPARK_ENV_LOADED", "PYSPARK_GATEWAY_PORT"])
def test_where_no_java_is_needed_or_one_runs_already(run: Run, name: str) -> None:
    assert run(**{name: "1"}) == ""


@pytest.mark.slow
def test_where_sparks_own_settings_may_name_one(run: Run, tmp_path: Path) -> None:
    (tmp_path / "spark-env.sh").write_text("export JAVA_HOME=/somewhere\n")
    assert run(SPARK_CONF_DIR=str(tmp_path)) == ""


def without_java(_: int) -> tuple[str | None, int]:
    """What is found, and how often it warns, with an empty environment."""
    kept = dict(os.environ)
    os.environ.clear()
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            warn_without_java()
        return java_problem(os.environ), len(told)
    finally:
        os.environ.update(kept)


def test_workers_do_not_check_java(spark: SparkSession) -> None:
    ((problem, told),) = spark.sparkContext.parallelize([0], 1).map(without_java).collect()
    assert problem is not None
    assert told == 0


# --- the workers' Python ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_workers_in_a_python_without_dualwrite(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    bare = str(tmp_path / "bare" / "bin" / "python")
    with monkeypatch.context() as patch:
        patch.setattr(spark.sparkContext, "pythonExec", bare)
        with pytest.warns(dualwrite.spark.SparkSetupWarning) as told:
            dualwrite.spark.register(spark)
        (warning,) = told
        assert f"{bare!r} has no dualwrite and no pyarrow. Next step: set PYSPARK_PYTHON={sys.executable}" in str(
            warning.message
        )
        assert warning.filename == __file__
        with pytest.raises(Exception, match="No module named"):  # the warning was right
            spark.range(1).write.format("dualwrite").mode("append").save()
    dualwrite.spark.register(spark)


@pytest.mark.slow
def test_workers_in_this_python_by_another_name(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Path(sys.executable).with_name(f"python{sys.version_info.major}")
    assert other.exists()
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(other))
    dualwrite.spark.register(spark)  # a warning would be an error here
