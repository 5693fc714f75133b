"""Which process holds a database's LOCK, as far as Linux shows it."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_FIELDS: Final = 8  # "1: POSIX ADVISORY WRITE 18077 fe:00:9994485 0 EOF"


@dataclass(frozen=True, slots=True)
class LockHolder:
    """A process that holds a LOCK.

    Args:
        pid: Its process id.
        text: For messages. Never its command line, which may contain passwords.
    """

    pid: int
    text: str


def lock_holder(path: str) -> LockHolder | None:
    """The process that holds the LOCK of the database at `path`, or None if that is not visible.

    LOCK itself is never opened. If this process held the lock, opening and closing the file would drop it: POSIX locks belong
    to the process, and end when any of its descriptors of the file is closed.
    """
    with suppress(OSError, ValueError, IndexError):
        found = (Path(path) / "LOCK").stat()
        wanted = (os.major(found.st_dev), os.minor(found.st_dev), found.st_ino)
        for line in (_PROC / "locks").read_text().splitlines():
            fields = line.split()
            if len(fields) != _FIELDS or fields[1] != "POSIX":
                continue
            major, minor, inode = fields[5].split(":")
            if (int(major, 16), int(minor, 16), int(inode)) == wanted and int(fields[4]) > 0:
                return _process(int(fields[4]))
    return None


def _process(pid: int) -> LockHolder:
    name = ""
    with suppress(OSError):
        name = f" ({(_PROC / str(pid) / 'comm').read_text().strip()})"
    return LockHolder(pid, f"process {pid}{name}")
