"""Open a socket to a broker within a deadline: TCP with keepalive, and TLS."""

from __future__ import annotations

import contextlib
import socket
import ssl
from typing import Final

from dualwrite.closing import closed_on_error
from dualwrite.deadline import Deadline
from dualwrite.errors import BrokerAuthorizationError
from dualwrite.kafka.client.config import Address, KafkaConfig

LEAST_TIME: Final = 0.001
"""Seconds; a socket timeout of 0 would mean non-blocking mode."""

# As for the database connections: a peer that vanished is detected after a minute.
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 30), ("TCP_KEEPALIVE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))


class ConnectionLostError(Exception):
    """The connection could not be opened, or broke with a request in flight, which may or may not have been executed."""

    def __init__(self, address: Address, reason: str) -> None:
        super().__init__(f"{address}: {reason}")
        self.address = address
        self.reason = reason


def open_socket(address: Address, config: KafkaConfig, deadline: Deadline) -> socket.socket:
    """A connected socket, encrypted if the protocol requires it.

    Name resolution is not bounded by the deadline, since the system's resolver has no time limit: callers that can't wait
    for it open the socket in another thread (`Opening`).

    Raises:
        ConnectionLostError: The connection failed, or was not established before the deadline.
        BrokerAuthorizationError: The broker's certificate is not trusted.
        ConfigurationError: See `KafkaConfig.tls`.
    """
    context = config.tls()
    plain = _connected(address, config, deadline)
    return plain if context is None else _secured(plain, context, address, deadline)


def _connected(address: Address, config: KafkaConfig, deadline: Deadline) -> socket.socket:
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: the host is no valid name
        raise ConnectionLostError(address, f"can't connect: {error}") from error
    problem: OSError | None = None
    for position, (family, kind, protocol, _, where) in enumerate(found):
        try:
            made = socket.socket(family, kind, protocol)
            with closed_on_error(made):
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if config.keepalive:
                    _keep_alive(made)
                made.settimeout(max(deadline.left / (len(found) - position), LEAST_TIME))
                made.connect(where)
        except OSError as error:
            problem = error
        else:
            return made
    if isinstance(problem, TimeoutError):
        raise ConnectionLostError(address, f"can't connect: no response within {deadline.seconds:.3g} s") from problem
    raise ConnectionLostError(address, f"can't connect: {problem}") from problem


def _keep_alive(plain: socket.socket) -> None:
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:  # the names differ between systems, and some systems have none
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                plain.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _secured(plain: socket.socket, context: ssl.SSLContext, address: Address, deadline: Deadline) -> socket.socket:
    with closed_on_error(plain):
        try:
            plain.settimeout(max(deadline.left, LEAST_TIME))
            return context.wrap_socket(plain, server_hostname=address.host)  # one timeout for the whole handshake
        except ssl.SSLCertVerificationError as error:
            raise BrokerAuthorizationError(
                f"The certificate of {address} is not trusted: {error.verify_message}.",
                next_step="check ssl.ca.location, and that the certificate names the host in bootstrap.servers",
            ) from error
        except TimeoutError as error:
            raise ConnectionLostError(address, f"the TLS handshake did not finish within {deadline.seconds:.3g} s") from error
        except OSError as error:  # includes ssl.SSLError
            raise ConnectionLostError(address, f"the TLS handshake failed: {error}") from error
