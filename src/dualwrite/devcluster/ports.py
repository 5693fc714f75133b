"""Ports of loopback: choosing free ones, and saying who holds a busy one."""

from __future__ import annotations

import errno
import random
import socket
import time
from collections.abc import Collection
from contextlib import suppress

import psutil

from dualwrite.devcluster.errors import DevClusterError

LOOPBACK = "127.0.0.1"

_LOWEST, _HIGHEST = 20_000, 32_000
"""Below what Linux (from 32768) and macOS (from 49152) give to outgoing connections. A port from there may be taken as the
source port of a client that tries to reach a killed broker: it then connects to itself, and the broker can't come back."""

_TRIES = 200

_CLOSING = 0.5
"""Seconds for which the sockets of a process that has just been killed may still be open."""


def is_free(port: int) -> bool:
    """Whether a broker could listen on this port of loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Java does: TIME_WAIT is no obstacle
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
        return True


def choose(taken: Collection[int]) -> int:
    """Choose a free port at random, none of `taken`.

    Raises:
        DevClusterError: None was found.
    """
    for _ in range(_TRIES):
        port = random.randint(_LOWEST, _HIGHEST)  # noqa: S311  (two processes should choose differently, that is all)
        if port not in taken and is_free(port):
            return port
    raise DevClusterError(f"No free port was found between {_LOWEST} and {_HIGHEST}.")


def demand(port: int, *, cluster: str, node_id: int) -> None:
    """Make sure that the node can have this port.

    Raises:
        DevClusterError: It is busy; the cause names the process where the machine tells.
    """
    deadline = time.monotonic() + _CLOSING
    while not (free := is_free(port)) and time.monotonic() < deadline:
        time.sleep(0.02)
    if not free:
        raise DevClusterError(
            f"Port {port} of node {node_id} is busy.",
            cause=_holder(port),
            next_step="Stop that process, or choose another port (`--port`).",
            cluster=cluster,
            node_id=node_id,
            port=port,
        )


def _holder(port: int) -> str:
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                return f"Process {connection.pid} ({psutil.Process(connection.pid).name()}) listens or is connected there."
    return "Some process listens or is connected there."
