"""Where clusters and downloads are kept on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from dualwrite.devcluster.errors import DevClusterError

STATE_DIR_VARIABLE = "DUALWRITE_STATE_DIR"
"""Environment variable that moves the clusters (records, logs, data) elsewhere; the tests use it."""


def state_dir() -> Path:
    """The directory under which clusters live, by name. It need not exist yet."""
    chosen = os.environ.get(STATE_DIR_VARIABLE)
    return Path(chosen).expanduser().absolute() if chosen else platformdirs.user_state_path("dualwrite", appauthor=False)


def cache_dir() -> Path:
    """The directory for what can be had again at any time (which jars belong to which Kafka version)."""
    return platformdirs.user_cache_path("dualwrite", appauthor=False)


def make_directory(path: Path) -> None:
    """Make a directory and those above it.

    Raises:
        DevClusterError: This user may not, or a file is in the way.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DevClusterError(
            f"The directory {path} can't be made.",
            cause=str(error),
            next_step=f"Choose another data directory, or set {STATE_DIR_VARIABLE}.",
        ) from error
