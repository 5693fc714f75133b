"""The clusters of this machine's user, by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from dualwrite.devcluster.errors import DevClusterError
from dualwrite.devcluster.locations import make_directory, state_dir
from dualwrite.devcluster.record import ClusterRecord

_ELSEWHERE = "data-dir"
"""File in a cluster's own directory that names its data directory, when that was chosen by the user."""


def directory(name: str) -> Path:
    """The directory that belongs to the name; its data is there too unless another place was chosen.

    Raises:
        DevClusterError: The name can't be that of a directory.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise DevClusterError(
            f"{name!r} can't be a cluster's name.", next_step="Use letters, digits, dot, dash and underscore."
        )
    return state_dir() / "clusters" / name


def data_dir(name: str) -> Path:
    """Where the data of the cluster is, or will be."""
    own = directory(name)
    try:
        return Path((own / _ELSEWHERE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return own


def remember(name: str, place: Path) -> None:
    """Note where the data of a cluster is."""
    own = directory(name)
    make_directory(own)
    if place != own:
        (own / _ELSEWHERE).write_text(str(place), encoding="utf-8")


def forget(name: str) -> None:
    """Remove every trace of the name; to be called under its lock.

    A process that waits for the lock sees that the file is gone, and makes a new one.
    """
    own = directory(name)
    (own / _ELSEWHERE).unlink(missing_ok=True)
    _lock_file(name).unlink(missing_ok=True)
    for path in (own, own.parent, own.parent.parent):
        with suppress(OSError):  # not there, or something else is in it
            path.rmdir()


def names() -> list[str]:
    """Names of all clusters that have a record, running or not."""
    try:
        found = sorted(path.name for path in (state_dir() / "clusters").iterdir() if path.is_dir())
    except FileNotFoundError:
        return []
    return [name for name in found if ClusterRecord.exists(data_dir(name))]


def _lock_file(name: str) -> Path:
    return directory(name).with_name(f".{name}.lock")


@contextmanager
def lock(name: str, *, timeout: float) -> Iterator[None]:
    """Keep other processes from changing the cluster at the same time.

    Raises:
        DevClusterError: Another process has been at it for longer than `timeout` seconds.
    """
    path = _lock_file(name)
    make_directory(path.parent)
    held = FileLock(path)
    try:
        held.acquire(timeout=timeout)
    except Timeout as error:
        raise DevClusterError(
            f"Another process is starting or stopping the cluster {name!r}.",
            next_step="Try again when it is done.",
            cluster=name,
        ) from error
    try:
        yield
    finally:
        held.release()
