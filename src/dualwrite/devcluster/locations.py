"""Where clusters are: the directories of clusters and downloads, and ports on loopback; and the errors of clusters."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import platformdirs
import psutil

from dualwrite.deadline import CHANCE
from dualwrite.errors import DualWriteError

STATE_DIR_VARIABLE = "DUALWRITE_STATE_DIR"
"""Environment variable with another directory for clusters (records, logs, data); the tests use it."""

LOOPBACK = "127.0.0.1"
HIGHEST_PORT = 65_535
"""The highest port number."""

_LOWEST_FREE, _HIGHEST_FREE = 20_000, 32_000
"""Below the ephemeral ports of Linux (from 32768) and macOS (from 49152). If a broker had an ephemeral port and was killed, a
client that reconnects could get that port as its source port: it would connect to itself, and block the broker's port."""

_PORT_TRIES = 200

_CLOSING_SECONDS = 0.5
"""Seconds for which the sockets of a killed process may still be open."""


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


def _port_obstacle(port: int) -> int | None:
    """Why no broker could listen on this loopback port: EADDRINUSE or EACCES; None if it could."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Java does, so that TIME_WAIT does not matter
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return error.errno
            raise
        return None


def free_port(reserved: Collection[int]) -> int:
    """Choose a random free port that is not in `reserved`.

    Raises:
        DevClusterError: No free port was found.
    """
    for _ in range(_PORT_TRIES):
        port = CHANCE.randint(_LOWEST_FREE, _HIGHEST_FREE)
        if port not in reserved and _port_obstacle(port) is None:
            return port
    raise DevClusterError(
        f"No free port was found between {_LOWEST_FREE} and {_HIGHEST_FREE}.", next_step="stop processes that use these ports"
    )


def require_free_port(port: int, *, cluster: str, node_id: int) -> None:
    """Check that the node can listen on this port.

    Raises:
        DevClusterError: The port is in use; the cause names the process, if the operating system reports it. Or the user may
            not listen on it.
    """
    deadline = time.monotonic() + _CLOSING_SECONDS
    while (obstacle := _port_obstacle(port)) == errno.EADDRINUSE and time.monotonic() < deadline:
        time.sleep(0.02)
    if obstacle == errno.EACCES:
        raise DevClusterError(
            f"Permission to listen on port {port} of node {node_id} is denied.",
            cause="most systems reserve the ports below 1024 for root",
            next_step="choose another port (`--port`)",
            cluster=cluster,
            node_id=node_id,
            port=port,
        )
    if obstacle is not None:
        raise DevClusterError(
            f"Port {port} of node {node_id} is in use.",
            cause=_user_of(port),
            next_step="stop that process, or choose another port (`--port`)",
            cluster=cluster,
            node_id=node_id,
            port=port,
        )


def _user_of(port: int) -> str:
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                return f"process {connection.pid} ({psutil.Process(connection.pid).name()}) has a socket on this port"
    return "an unknown process has a socket on this port"
