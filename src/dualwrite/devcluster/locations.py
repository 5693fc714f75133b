"""The directories of clusters and downloads, and the errors of clusters."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from dualwrite.errors import DualWriteError

STATE_DIR_VARIABLE = "DUALWRITE_STATE_DIR"
"""Environment variable with another directory for clusters (records, logs, data); the tests use it."""


class DevClusterError(DualWriteError):
    """A cluster could not be prepared, started, reached or stopped.

    Attributes, if they apply: `cluster` (name), `node_id`, `port`, `data_dir`.
    """


class BrokerExitedError(DevClusterError):
    """A broker exited instead of becoming ready, or the formatting of its storage failed.

    Attributes: `cluster`, `node_id`, `log_file`, `log_tail` (the last lines of its log).
    """


class SettingsDifferError(DevClusterError):
    """A cluster of this name exists with other settings. Attributes: `cluster`, `differences` (list of sentences)."""


def state_dir() -> Path:
    """The parent directory of the clusters' directories. It need not exist yet."""
    chosen = os.environ.get(STATE_DIR_VARIABLE)
    return Path(chosen).expanduser().absolute() if chosen else platformdirs.user_state_path("dualwrite", appauthor=False)


def cache_dir() -> Path:
    """The directory for what can be downloaded or created again (such as which jars belong to a Kafka version)."""
    return platformdirs.user_cache_path("dualwrite", appauthor=False)


def make_directory(path: Path) -> None:
    """Create a directory of a cluster, and its parents.

    Raises:
        DevClusterError: Permission is denied, or a file has that name.
    """
    _make(path, f"choose another data directory, or set {STATE_DIR_VARIABLE}")


def make_cache_directory(path: Path) -> None:
    """Create a directory in `cache_dir`, and its parents. Raises as `make_directory`."""
    _make(path, "make its parent writable, or choose another one (on Linux: set XDG_CACHE_HOME)")


def _make(path: Path, next_step: str) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DevClusterError(f"The directory {path} can't be created.", cause=str(error), next_step=next_step) from error
