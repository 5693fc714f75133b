"""Checks whether Spark will find Java. Without it the session fails with `JAVA_GATEWAY_EXITED` before any of our code runs."""

from __future__ import annotations

import os
import re
import shutil
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pyspark

OLDEST_JAVA: Final = 17
_MAIN_MODULES_OF_WORKERS: Final = ("pyspark.daemon", "pyspark.worker")
_NO_JAVA_NEEDED: Final = (
    "SPARK_REMOTE",  # Spark Connect: the Java is the server's
    "SPARK_ENV_LOADED",  # set by Spark's own scripts for the processes that they start: Java is running already
    "PYSPARK_GATEWAY_PORT",
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
    """Why Spark's launch script will not find a Java version that it supports; None if it will, or if that is unknown.

    Args:
        environ: The environment variables.
    """
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
