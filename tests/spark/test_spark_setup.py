"""Warnings on machines on which Spark would fail: no Java, or workers in a Python without dualwrite."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
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

NO_JAVA = "there is no Java (JAVA_HOME is not set, and PATH has no java)"


def test_what_spark_would_not_find(tmp_path: Path, spark_environment: dict[str, str]) -> None:
    """Spark ignores PATH if JAVA_HOME is set. Where no Java is needed, one runs already, or settings may name one, is none."""
    nowhere, old = tmp_path / "nowhere", tmp_path / "java-11"
    (old / "bin").mkdir(parents=True)
    (old / "bin" / "java").write_text("#!/bin/sh\n")
    (old / "bin" / "java").chmod(0o755)
    (old / "release").write_text('IMPLEMENTOR="x"\nJAVA_VERSION="11.0.2"\n')
    (tmp_path / "spark-env.sh").write_text("export JAVA_HOME=/somewhere\n")
    for environ, problem in [
        ({"PATH": str(nowhere)}, NO_JAVA),
        ({"JAVA_HOME": str(nowhere), "PATH": os.environ["PATH"]}, f"JAVA_HOME is '{nowhere}', which has no bin/java"),
        ({"JAVA_HOME": str(old)}, f"{old / 'bin' / 'java'} is Java 11"),
        ({"PATH": str(old / "bin")}, f"{old / 'bin' / 'java'} is Java 11"),
        ({"JAVA_HOME": spark_environment["JAVA_HOME"]}, None),
        ({"SPARK_REMOTE": "1"}, None),
        ({"SPARK_ENV_LOADED": "1"}, None),
        ({"PYSPARK_GATEWAY_PORT": "1"}, None),
        ({"SPARK_CONF_DIR": str(tmp_path)}, None),
    ]:
        assert java_problem(environ) == problem, environ


@pytest.mark.slow
def test_a_missing_java_is_reported_before_spark_fails(tmp_path: Path) -> None:
    for name in ("bash", "dirname", "ps"):  # what Spark's launch script needs besides Java
        found = shutil.which(name)
        if found is not None:
            (tmp_path / name).symlink_to(found)
    code = "import dualwrite.spark; from pyspark.sql import SparkSession; SparkSession.builder.getOrCreate()"
    ours = {"JAVA_HOME", "SPARK_CONF_DIR", "SPARK_ENV_LOADED", *NOT_OURS}
    environ = {**{name: value for name, value in os.environ.items() if name not in ours}, "PATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT, check=False)
    told, failed, _ = done.stderr.partition("JAVA_GATEWAY_EXITED")
    assert failed
    assert told.startswith("<string>:1: SparkSetupWarning: Spark will not start: " + NO_JAVA), "at the user's import"
    assert "install Java 17 or 21" in told


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
    other = Path(sys.executable).with_name(f"python{sys.version_info.major}")  # this Python by another name
    assert other.exists()
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(other))
    dualwrite.spark.register(spark)  # a warning would be an error here
