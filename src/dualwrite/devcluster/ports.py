"""Ports on loopback: chooses free ports, and finds the process that uses a port."""

from __future__ import annotations

import errno
import random
import socket
import time
from collections.abc import Collection
from contextlib import suppress

import psutil

from dualwrite.devcluster.locations import DevClusterError

LOOPBACK = "127.0.0.1"
HIGHEST = 65_535
"""The highest port number."""

_LOWEST, _HIGHEST = 20_000, 32_000
"""Below the ephemeral ports of Linux (from 32768) and macOS (from 49152). If a broker had an ephemeral port and was killed, a
client that reconnects could get that port as its source port: it would connect to itself, and block the broker's port."""

_TRIES = 200

_CLOSING = 0.5
"""Seconds for which the sockets of a killed process may still be open."""


def _obstacle(port: int) -> int | None:
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


def choose(reserved: Collection[int]) -> int:
    """Choose a random free port that is not in `reserved`.

    Raises:
        DevClusterError: No free port was found.
    """
    for _ in range(_TRIES):
        port = random.randint(_LOWEST, _HIGHEST)  # noqa: S311  (only to make collisions between processes unlikely)
        if port not in reserved and _obstacle(port) is None:
            return port
    raise DevClusterError(
        f"No free port was found between {_LOWEST} and {_HIGHEST}.", next_step="stop processes that use these ports"
    )


def require_free(port: int, *, cluster: str, node_id: int) -> None:
    """Check that the node can listen on this port.

    Raises:
        DevClusterError: The port is in use; the cause names the process, if the operating system reports it. Or the user may
            not listen on it.
    """
    deadline = time.monotonic() + _CLOSING
    while (obstacle := _obstacle(port)) == errno.EADDRINUSE and time.monotonic() < deadline:
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
