"""What a job calls: `register` the data source, `write_batch` for one batch of a stream. Also looks for Java and Python."""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyspark
from pyspark.errors import PySparkException

from dualwrite.errors import ConfigurationError
from dualwrite.spark.source import NAME, DualWriteDataSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

_QUERY_ID: Final = "sql.streaming.queryId"
_RUN_ID: Final = "spark.jobGroup.id"
_newest: Final[dict[str, tuple[str | None, int]]] = {}
"""The run and the batch that each job has written last in this process."""
_OLDEST: Final = (4, 0)
OLDEST_JAVA: Final = 17
_MAIN_MODULES_OF_WORKERS: Final = ("pyspark.daemon", "pyspark.worker")
_NO_JAVA_NEEDED: Final = (
    "SPARK_REMOTE",  # Spark Connect: the Java is the server's
    "SPARK_ENV_LOADED",  # set by Spark's own scripts for the processes that they start: Java is running already
    "PYSPARK_GATEWAY_PORT",
)
_NEEDED: Final = ("dualwrite", "pyarrow")
_LIMIT: Final = 20.0


def register(spark: SparkSession) -> None:
    """Register `format("dualwrite")` with a session; call it once per session.

    Warns (SparkSetupWarning) if the session's workers would run in a Python without dualwrite.

    Args:
        spark: The session.

    Raises:
        ConfigurationError: The session's Spark is older than 4.0.
    """
    version = tuple(int(part) for part in spark.version.split(".")[:2])
    if version < _OLDEST:
        raise ConfigurationError(
            f"dualwrite's data source needs Spark 4.0 or newer; this is {spark.version}.",
            next_step="pip install 'pyspark>=4.0'",
        )
    warn_of_other_python(spark)
    spark.dataSource.register(DualWriteDataSource)


def write_batch(frame: DataFrame, batch_id: int, *, job_id: str | None = None, **options: str) -> None:
    """Write one micro-batch exactly once, from `foreachBatch`.

    For example::

        def each(frame, batch_id):
            dualwrite.spark.write_batch(frame, batch_id, **options)

        stream.writeStream.foreachBatch(each).option("checkpointLocation", …).start()

    If an earlier run of the query has committed the batch, it is not written again. Only the newest batch can be repeated: an
    earlier number comes from a checkpoint that was reset, and is refused. Two calls for one micro-batch, for two tables,
    are two jobs: each is atomic by itself, and each needs its own `transactionalIdPrefix`.

    A job belongs to one query, which its checkpoint identifies. With a new checkpoint, the query is another one: it numbers its
    batches from 0 again, and its rows must not be taken for the old one's. So it is refused, with a `job_id`, too.

    Args:
        frame: The micro-batch.
        batch_id: Its number.
        job_id: A name that stays the same over restarts of the query, and that no other query has; by default the query's id,
            which is stored in its checkpoint, and the name of the table. Through Spark Connect the query is not known: there a
            new checkpoint needs a new name.
        options: The options of the data source: `**{"kafka.bootstrap.servers": …, "topic": …}`.

    Raises:
        ConfigurationError: No `job_id` was given, and there is no query to derive it from; or the same run has already written
            this batch of the job.
        BatchRefusedError: The batch, or a later one, was committed by another query: the job has a new checkpoint. Spark raises
            it as an error of its own, which has the text.
    """
    spark = frame.sparkSession
    query_id, run_id = _query_of(spark)
    if job_id is None and query_id is not None:
        job_id = f"{query_id} {options.get('dbtable', '')}"
    if not job_id:
        raise ConfigurationError(
            "write_batch can't determine which query the batch belongs to.",
            cause="it was called outside foreachBatch, or through Spark Connect",
            next_step="pass job_id=…, a name that stays the same over restarts",
        )
    _refuse_second_call(job_id, run_id, batch_id)
    register(spark)
    limit = options.get("numPartitions")
    if limit is not None:
        frame = frame.coalesce(int(limit))
    if query_id is not None:
        options["queryId"] = query_id
    frame.write.format(NAME).mode("append").options(**options, jobId=job_id, batchId=str(batch_id)).save()
    _newest[job_id] = (run_id, batch_id)


def _query_of(spark: SparkSession) -> tuple[str | None, str | None]:
    """The ids of the query and of its run that call us; None if there are none, or if they are not known (Spark Connect)."""
    try:
        context = spark.sparkContext
    except PySparkException:
        return None, None
    query_id = context.getLocalProperty(_QUERY_ID)
    return query_id, None if query_id is None else context.getLocalProperty(_RUN_ID)


def _refuse_second_call(job_id: str, run_id: str | None, batch_id: int) -> None:
    """Refuse a batch that the same run has already written: it would count as committed before and be skipped silently."""
    if run_id is not None and _newest.get(job_id) == (run_id, batch_id):
        raise ConfigurationError(
            f"write_batch was called twice for batch {batch_id} of job {job_id!r}.",
            cause="a job writes each micro-batch once, so the second frame would not be written",
            next_step="combine the frames with union, or give one of the calls its own job_id and transactionalIdPrefix",
        )


class SparkSetupWarning(UserWarning):
    """Spark will fail with the current setup of this machine; the text contains the reason and the next step."""


def warn_without_java() -> None:
    """Warn the module that imports `dualwrite.spark` if Spark will not start; do nothing in Spark's own worker processes."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name in _MAIN_MODULES_OF_WORKERS:
        return
    problem = java_problem(os.environ)
    if problem is not None:
        warnings.warn(
            f"Spark will not start: {problem}. Next step: install Java {OLDEST_JAVA} or 21 (PySpark 4.2 and newer also run on "
            "25) and set JAVA_HOME to it; a Spark Connect client needs no Java: set SPARK_REMOTE.",
            SparkSetupWarning,
            stacklevel=3,  # the importing module
        )


def java_problem(environ: Mapping[str, str]) -> str | None:
    """Why Spark's launch script will not find a Java version that it supports; None if it will, or if that is unknown."""
    if any(environ.get(name) for name in _NO_JAVA_NEEDED) or _script_of_settings(environ).is_file():
        return None
    home = environ.get("JAVA_HOME")
    if home:  # then the script looks nowhere else
        found = shutil.which("java", path=str(Path(home, "bin")))
        if found is None:
            return f"JAVA_HOME is {home!r}, which has no bin/java"
    else:
        found = shutil.which("java", path=environ.get("PATH", ""))
        if found is None:
            return "there is no Java (JAVA_HOME is not set, and PATH has no java)"
    version = _version(Path(found))
    return None if version is None or version >= OLDEST_JAVA else f"{found} is Java {version}"


def _script_of_settings(environ: Mapping[str, str]) -> Path:
    """The script that the launch script runs first; it may set JAVA_HOME."""
    home = environ.get("SPARK_HOME") or pyspark.__path__[0]
    return Path(environ.get("SPARK_CONF_DIR") or Path(home, "conf"), "spark-env.sh")


def _version(executable: Path) -> int | None:
    """The major version from the `release` file of the Java home, or None; running Java itself would take a second."""
    try:
        text = (executable.resolve().parent.parent / "release").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r'^JAVA_VERSION="(?:1\.)?(\d+)', text, re.MULTILINE)
    return None if found is None else int(found[1])


def warn_of_other_python(spark: SparkSession) -> None:
    """Warn if the session's workers would run in a Python without dualwrite. The warning names the caller's caller.

    Checks only sessions with a local master, whose workers run on this machine.
    """
    try:
        context = spark.sparkContext
    except AttributeError:  # Spark Connect: the workers belong to the server
        return
    if not (context.master or "").startswith("local"):  # local-cluster starts its workers here, too
        return
    missing = _missing_in(context.pythonExec)
    if missing:
        warnings.warn(
            f"Spark's Python workers will fail: {context.pythonExec!r} has no {' and no '.join(missing)}. Next step: set "
            f"PYSPARK_PYTHON={sys.executable} in the environment before creating the session (spark.pyspark.python works only "
            "with spark-submit).",
            SparkSetupWarning,
            stacklevel=3,
        )


@functools.cache
def _missing_in(python: str) -> tuple[str, ...]:
    """The needed packages that a Python does not have; empty if that is unknown."""
    found = shutil.which(python)
    if found is None or _is_this(Path(found)):
        return ()
    code = f"import importlib.util as u; print(*[name for name in {_NEEDED!r} if u.find_spec(name) is None])"
    try:
        done = subprocess.run([found, "-c", code], capture_output=True, text=True, timeout=_LIMIT, check=True)  # noqa: S603  (Spark is about to run it)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(done.stdout.split())


def _is_this(python: Path) -> bool:
    """Whether it is this Python. One environment has several names for it; other environments may link to the same file."""
    here = Path(sys.executable)
    return python.absolute().parent == here.absolute().parent and python.resolve() == here.resolve()
