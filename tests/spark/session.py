"""How tests run Spark: small, quick to start, with all files in its folder. For the session fixture and for driver scripts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from spark.java_home import java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WARM = Path(__file__).with_name("warm")
"""In the path of Python workers: what makes them start quicker, and what the option `observe` calls."""

MASTER = "local[2,3]"
"""Two tasks at a time, each tried up to three times."""

# A JVM that runs only for seconds is fastest without the second compiler: session and first write take 14 s instead of 25 s.
_JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"

SUBMITTED = f"--driver-java-options '{_JAVA_OPTIONS}' pyspark-shell"
"""PYSPARK_SUBMIT_ARGS for scripts that open a session of their own."""

# The default starts one or two processes (chmod, readlink) per file of a micro-batch: 0.1 s per batch (since Spark 4.1)
_CHECKPOINTS = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"


def environment(place: Path) -> dict[str, str]:
    """Environment variables for Spark on any machine that has Python, independent of the machine's own Spark."""
    configuration = place / "conf"
    configuration.mkdir(parents=True, exist_ok=True)
    (configuration / "log4j2.properties").write_text(_LOGGING)
    return {
        "JAVA_HOME": str(java_home(place)),
        "PYSPARK_PYTHON": sys.executable,  # by default Spark uses the `python3` in PATH
        "PYSPARK_SUBMIT_ARGS": "pyspark-shell",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(WARM), os.environ.get("PYTHONPATH")))),
        "SPARK_CONF_DIR": str(configuration),
        "SPARK_LOCAL_DIRS": str(place / "local"),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


NOT_OURS = ("SPARK_HOME", "SPARK_MASTER", "SPARK_REMOTE", "PYSPARK_DRIVER_PYTHON", "PYTHONWARNINGS")
"""Variables that lead elsewhere: out of the environment before Spark is started."""


def open_session(place: Path, master: str = MASTER, settings: Mapping[str, str] | None = None) -> SparkSession:
    """A new Spark session whose files are all below `place`; `environment(place)` must be in `os.environ` before."""
    from pyspark.sql import SparkSession  # noqa: PLC0415  (this module is imported where no Spark is installed, too)

    builder = SparkSession.builder.master(master).appName("dualwrite-tests")
    every = {
        "spark.driver.memory": "768m",
        "spark.executor.memory": "512m",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": f"{_JAVA_OPTIONS} -Djava.io.tmpdir={place} -Dderby.system.home={place}",
        "spark.executor.extraJavaOptions": _JAVA_OPTIONS,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # In local mode, a block manager that is asked to register again fails ("Cannot find endpoint: CoarseGrainedScheduler"),
        # and after 60 failed heartbeats (10 min) Spark ends its JVM with exit code 56.
        "spark.executor.heartbeat.maxFailures": "1000000",
        "spark.default.parallelism": "2",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.streaming.checkpointFileManagerClass": _CHECKPOINTS,
        "spark.sql.warehouse.dir": str(place / "warehouse"),
        **(settings or {}),
    }
    for name, value in every.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def say(*words: object) -> None:
    """Print one line with a single write, for the test that waits for it."""
    os.write(1, (" ".join(f"{word}" for word in words) + "\n").encode())


_LOGGING = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss.SSS} %p %c{1}: %m%n%ex
"""
