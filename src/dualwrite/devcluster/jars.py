"""The jars of a Kafka version, or of any artifact on Maven Central: downloaded once by jgo, cached, and verified."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from filelock import FileLock, Timeout
from jgo.maven import MavenContext, PythonResolver
from tenacity import Retrying, stop_after_attempt, wait_fixed

from dualwrite.devcluster.errors import DevClusterError
from dualwrite.devcluster.locations import cache_dir, make_cache_directory
from dualwrite.devcluster.progress import Progress, SilentProgress

DEFAULT_KAFKA_VERSION = "4.2.2"
"""The newest release that writes every marker: 4.3.0 to 4.4.0 skip partitions without a leader (KAFKA-20734)."""

_LOG4J_VERSION = "2.25.2"
"""Brokers use slf4j 1.7 (4.4.0 still does) and exit without a message if it has no binding."""

_NOT_NEEDED = ["org.apache.kafka:kafka-tools-api"]
"""Only used by command line tools that are not run here; 4.4.0's is missing on Maven Central at times."""

_MAVEN_TIMEOUT = 60.0
_ATTEMPTS = 3
_PAUSE = 2.0


def classpath(kafka_version: str, progress: Progress | None = None) -> list[Path]:
    """The jars that a broker of this version needs, downloaded if they are not cached.

    Safe with concurrent processes: one downloads, the others wait for it.

    Raises:
        DevClusterError: The version does not exist, or something could not be downloaded.
    """
    check_version(kafka_version)
    return _cached(f"kafka-{kafka_version}", lambda progress: _download(kafka_version, progress), progress)


def check_version(kafka_version: str) -> None:
    """Check that a text has the form of a Kafka version.

    Raises:
        DevClusterError: It has not.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+(-\w+)?", kafka_version):
        raise DevClusterError(
            f"{kafka_version!r} is not a Kafka version.", next_step=f"use a version such as {DEFAULT_KAFKA_VERSION}"
        )


def artifact_jars(
    name: str, version: str, coordinates: Sequence[str], *, not_needed: Sequence[str] = (), progress: Progress | None = None
) -> list[Path]:
    """The jars of a program on Maven Central with their dependencies, downloaded if they are not cached.

    Safe with concurrent processes, as `classpath` is.

    Args:
        name: The program's name, for messages.
        version: Its version; name and version are the key of the cache.
        coordinates: The artifacts to resolve, each as `group:artifact:version`.
        not_needed: Dependencies to exclude, each as `group:artifact`.
        progress: Receives the steps.

    Raises:
        DevClusterError: A version does not exist, or something could not be downloaded.
    """
    return _cached(
        f"{name.lower()}-{version}", lambda progress: _fetch(f"{name} {version}", coordinates, not_needed, progress), progress
    )


def _cached(key: str, download: Callable[[Progress], list[Path]], progress: Progress | None) -> list[Path]:
    """The jars listed in the cache's index file of this key, downloaded if one is missing; then the file is written."""
    progress = progress or SilentProgress()
    index = cache_dir() / f"{key}.json"
    if (known := _read_index(index)) is not None:
        return known
    make_cache_directory(index.parent)
    with _locked(index.parent / "download.lock", progress):
        if (known := _read_index(index)) is not None:
            return known
        jars = download(progress)
        partial = index.with_suffix(".partial")
        partial.write_text(json.dumps([str(jar) for jar in jars], indent=1), encoding="utf-8")
        partial.replace(index)
        return jars


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0.5)
    except Timeout:
        progress.step("Waiting for another process that is downloading")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _read_index(index: Path) -> list[Path] | None:
    try:
        jars = [Path(jar) for jar in json.loads(index.read_text(encoding="utf-8"))]
    except (OSError, ValueError):
        return None
    return jars if all(jar.is_file() for jar in jars) else None


def _download(kafka_version: str, progress: Progress) -> list[Path]:
    wanted = [
        f"org.apache.kafka:kafka_2.13:{kafka_version}",
        f"org.apache.kafka:kafka-clients:{kafka_version}",  # without the pin, log4j's BOM selects an old version
        f"org.apache.logging.log4j:log4j-slf4j-impl:{_LOG4J_VERSION}",
    ]
    return _fetch(f"Kafka {kafka_version}", wanted, _NOT_NEEDED, progress)


def _fetch(what: str, wanted: Sequence[str], not_needed: Sequence[str], progress: Progress) -> list[Path]:
    """Download what is missing. Retries, since jgo reports an unresponsive server as a missing file."""
    try:
        retrying = Retrying(stop=stop_after_attempt(_ATTEMPTS), wait=wait_fixed(_PAUSE), reraise=True)
        return retrying(_fetch_once, what, wanted, not_needed, progress)
    except Exception as error:  # jgo raises RuntimeError, requests' errors, XML and assertion errors alike
        raise _explain(what, error) from error


def _fetch_once(what: str, wanted: Sequence[str], not_needed: Sequence[str], progress: Progress) -> list[Path]:
    progress.step(f"Resolving the jars of {what}")
    resolver = _CleanResolver()
    context = MavenContext(resolver=resolver, timeout=_MAVEN_TIMEOUT)
    unwanted = [context.project(*each.split(":")) for each in not_needed]
    try:
        inputs, transitive = resolver.resolve([context.create_dependency(each, exclusions=unwanted) for each in wanted])
    except ET.ParseError:
        _remove_damaged_poms(context.repo_cache)
        raise
    artifacts = [each.artifact for each in (*inputs, *transitive) if f"{each.groupId}:{each.artifactId}" not in not_needed]
    progress.step(f"Downloading {what}", total=len(artifacts))
    jars = []
    for artifact in artifacts:
        resolver.on_fraction = progress.advance
        jars.append(_undamaged(artifact))
        progress.advance(resolver.unreported())
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


def _remove_damaged_poms(repository: Path) -> None:
    """Remove the POMs that an earlier download has not completed: the next attempt downloads them again.

    A process may have been killed while jgo wrote one, and the error does not say which.
    """
    for path in repository.rglob("*.pom"):
        with suppress(OSError):  # it is gone, or belongs to another user
            if not path.read_bytes().rstrip().endswith(b"</project>") and not _is_pom(path):
                path.unlink()


def _is_pom(path: Path) -> bool:
    try:
        root = ET.parse(path).getroot()  # noqa: S314  (from Maven Central, and jgo parses it too)
    except ET.ParseError:
        return False
    except ValueError:  # an encoding that Python can't parse
        return True
    return root.tag.rpartition("}")[2] == "project"


class _CleanResolver(PythonResolver):  # type: ignore[misc]  # jgo has no type hints
    """jgo's resolver, changed to leave no partial or wrong file behind when a download is interrupted or replaced."""

    def __init__(self) -> None:
        super().__init__(progress_callback=self._watch)
        self.on_fraction: Callable[[float], None] = lambda _: None
        self._reported = 0.0

    def download(self, artifact: Any) -> Path | None:
        """Download to jgo's cache, or leave nothing there."""
        try:
            path: Path | None = super().download(artifact)
        except BaseException:
            if artifact.cached_path is not None:
                artifact.cached_path.unlink(missing_ok=True)
            raise
        if path is not None and path.suffix == ".pom" and not _is_pom(path):
            path.unlink()
            # not a RuntimeError, with which jgo would go on without the dependencies in a POM that is not needed first
            raise ET.ParseError(f"the download of {path.name} is something else, such as the login page of a proxy")
        return path

    @contextmanager
    def _watch(self, _filename: str, size: int) -> Iterator[Callable[[int], None]]:
        def received(count: int) -> None:
            part = min(count / size, 1.0 - self._reported)
            self._reported += part
            self.on_fraction(part)

        yield received

    def unreported(self) -> float:
        """The fraction of the last resolved file that was not reported yet (1 if it was not downloaded)."""
        rest, self._reported = 1.0 - self._reported, 0.0
        return rest


def _explain(what: str, error: Exception) -> DevClusterError:
    refused = "not found in remote" in str(error)  # jgo's message for any status other than 200
    return DevClusterError(
        f"The jars of {what} could not be downloaded.",
        cause=("not on Maven Central, or the server or a proxy refused the request: " if refused else "")
        + f"{type(error).__name__}: {error}",
        next_step=("choose another version, or " if refused else "")
        + "check the network and the proxy settings, and try again",
    )
