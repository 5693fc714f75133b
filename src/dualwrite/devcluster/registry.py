"""The current user's clusters, by name."""

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
"""File in a cluster's directory that names its data directory, if the user chose one."""


def directory(name: str) -> Path:
    """The cluster's directory; its data is there too, unless the user chose another directory.

    Raises:
        DevClusterError: The name has characters that are not allowed.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise DevClusterError(
            f"{name!r} is not a valid cluster name.", next_step="use letters, digits, dots, dashes and underscores"
        )
    return state_dir() / "clusters" / name


def data_dir(name: str) -> Path:
    """Where the data of the cluster is, or will be."""
    own = directory(name)
    try:
        place = (own / _ELSEWHERE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return own
    return Path(place) if place else own  # empty: a full disk, or a crash of the machine


def remember(name: str, place: Path) -> None:
    """Record where the data of a cluster is. The caller must hold the cluster's lock."""
    own = directory(name)
    make_directory(own)
    if place != own:
        partial = _partial_file(name)
        partial.write_text(str(place), encoding="utf-8")
        partial.replace(own / _ELSEWHERE)


def forget(name: str) -> None:
    """Remove everything that is stored for the name. The caller must hold the cluster's lock.

    A process that waits for the lock notices that the lock file is gone, and creates a new one.
    """
    own = directory(name)
    (own / _ELSEWHERE).unlink(missing_ok=True)
    _partial_file(name).unlink(missing_ok=True)
    _lock_file(name).unlink(missing_ok=True)
    for path in (own, own.parent, own.parent.parent):
        with suppress(OSError):  # missing, or not empty
            path.rmdir()


def names() -> list[str]:
    """Names of all clusters that have a record, running or not."""
    try:
        found = sorted(path.name for path in (state_dir() / "clusters").iterdir() if path.is_dir())
    except FileNotFoundError:
        return []
    return [name for name in found if ClusterRecord.exists(data_dir(name))]


def _partial_file(name: str) -> Path:
    """The file with the data directory until it is complete; not in the cluster's directory, which must be empty at first."""
    return directory(name).with_name(f".{name}.{_ELSEWHERE}")


def _lock_file(name: str) -> Path:
    return directory(name).with_name(f".{name}.lock")


@contextmanager
def lock(name: str, *, timeout: float) -> Iterator[None]:
    """Keep other processes from changing the cluster at the same time.

    Raises:
        DevClusterError: Another process held the lock for longer than `timeout` seconds.
    """
    path = _lock_file(name)
    make_directory(path.parent)
    file_lock = FileLock(path)
    try:
        file_lock.acquire(timeout=timeout)
    except Timeout as error:
        raise DevClusterError(
            f"Another process is starting or stopping the cluster {name!r}.",
            next_step="try again when that process is done",
            cluster=name,
        ) from error
    try:
        yield
    finally:
        file_lock.release()
