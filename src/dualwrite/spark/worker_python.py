"""Checks the Python of Spark's workers: `python3` from PATH unless PYSPARK_PYTHON is set, whichever Python the driver uses."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dualwrite.spark.java import SparkSetupWarning

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_NEEDED: Final = ("dualwrite", "pyarrow")
_LIMIT: Final = 20.0


def warn_of_other_python(spark: SparkSession) -> None:
    """Warn if the session's workers would run in a Python without dualwrite. The warning names the caller's caller.

    Checks only sessions with a local master, whose workers run on this machine.

    Args:
        spark: The session.
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
