"""One connection to one broker: Kafka's messages (`messages_generated`) over a blocking socket."""

from __future__ import annotations

import os
import re
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, TypeVar

from dualwrite.closing import closed_on_error
from dualwrite.deadline import Deadline
from dualwrite.errors import BrokerAuthorizationError
from dualwrite.kafka.client.config import Address, KafkaConfig
from dualwrite.kafka.client.error_codes import ErrorCode
from dualwrite.kafka.client.fields import KafkaProtocolError, Request
from dualwrite.kafka.client.framing import Framing
from dualwrite.kafka.client.login import log_in
from dualwrite.kafka.client.messages_generated import ApiVersionsRequest, ApiVersionsResponse
from dualwrite.kafka.client.sockets import LEAST_TIME, ConnectionLostError, open_socket

Inbox = list[tuple[int, Any]]
"""Receives the responses to one user's requests, each with the number of its request."""

_READ_SIZE: Final = 65536
_SESSION_SHARE: Final = 0.85  # KIP-368: log in again before the session expires
_IDLE: Final = 1.0  # seconds without a request, after which the socket is checked before the next one

_Response = TypeVar("_Response")


class Connection:
    """Requests over one socket, several in flight at once. Not thread-safe, and only for the process that opened it.

    `call` waits for the response. `send` does not: the response is put into the inbox that was passed to `send`, by whichever
    later `receive` or `call` reads it. So several users can share a connection, each with its own inbox.

    Args:
        address: The broker.
        config: Security and time limits.
        deadline: For opening; at most `socket.connection.setup.timeout.ms`.

    Raises:
        ConnectionLostError: The connection failed, or the broker did not respond.
        BrokerAuthorizationError: The broker refused the login, or its TLS certificate is not trusted.
    """

    def __init__(self, address: Address, config: KafkaConfig, deadline: Deadline | None = None) -> None:
        self.address = address
        self._config = config
        self._pid = os.getpid()
        self._framing = Framing(config.client_id)
        self._log_in_at: float | None = None
        self._used_at = time.monotonic()
        self._inboxes: dict[int, Inbox] = {}
        self.api_versions: Mapping[int, tuple[int, int]] = {}
        self.features: Mapping[str, int] = {}
        self.newest_features: Mapping[str, int] = {}
        limit = Deadline.after(config.connect_timeout) if deadline is None else deadline.within(config.connect_timeout)
        self._socket: socket.socket | None = open_socket(address, config, limit)
        with closed_on_error(self):
            self._ask_versions(limit)
            self._log_in(limit)

    def fileno(self) -> int:
        """For `select`: readable means that a response, or part of one, has arrived. See also `has_read`.

        Raises:
            ConnectionLostError: The connection is closed.
        """
        return self._open_socket().fileno()

    @property
    def has_read(self) -> bool:
        """Whether `receive` would find data that `select` does not see, since TLS has already read it from the socket."""
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    @property
    def usable(self) -> bool:
        """Whether it is open and was opened by this process, not inherited through a fork."""
        return self._socket is not None and self._pid == os.getpid()

    def make_ready(self, deadline: Deadline) -> bool:
        """Whether another request may be sent on it now; after an idle period the socket is checked.

        If the broker requires a new login soon, it is done here (KIP-368); requests in flight are not affected.
        """
        if not self.usable:
            return False
        now = time.monotonic()
        try:
            if self._log_in_at is not None and now >= self._log_in_at:
                self._log_in(deadline.within(self._config.connect_timeout))
            elif now - self._used_at >= _IDLE:
                self.receive(0.0)  # detects a connection closed by the broker, or a failed keepalive
            else:
                return True
        except ConnectionLostError:
            return False
        except BrokerAuthorizationError:  # a new connection shows whether only the re-authentication is refused
            self.close()
            return False
        return self.usable

    def call(self, request: Request[_Response], deadline: Deadline | None = None) -> _Response:
        """Send a request and wait for its response: until the deadline, and at most `socket.timeout.ms`.

        Raises:
            ConnectionLostError: No response came: the connection is closed, and the request may have been executed. Or no time
                was left, and nothing was sent. Or the broker requires a new connection (KIP-1102).
        """
        response: _Response = self.call_all([request], deadline)[0]
        return response

    def call_all(self, requests: Sequence[Any], deadline: Deadline | None = None) -> list[Any]:
        """As `call`, for several requests, which are sent one right after the other; a broker answers them in this order."""
        limit = self._limit(deadline)
        if limit.expired:
            raise ConnectionLostError(self.address, f"no time left for {type(requests[0]).__name__}")
        inbox: Inbox = []
        for request in requests:
            self._send(request, inbox, limit)
        while True:
            self.receive(limit.left)
            if len(inbox) == len(requests):
                responses = [response for _, response in inbox]
                for response in responses:
                    self._check(response)
                return responses
            if limit.expired:
                self.close()
                late = type(requests[len(inbox)]).__name__
                raise ConnectionLostError(self.address, f"no response to {late} within {limit.seconds:.3g} s")

    def send(self, request: Request[Any], inbox: Inbox, deadline: Deadline | None = None) -> int:
        """Send a request without waiting for its response, which is later put into `inbox` with the number returned here.

        Uses the newest version that both sides know, unless the request specifies one.

        Raises:
            ConnectionLostError: The connection broke, or the request could not be sent before the deadline; it may have been
                executed.
        """
        return self._send(request, inbox, self._limit(deadline))

    def receive(self, timeout: float = 0.0) -> None:
        """Put the responses that have arrived into their inboxes; waits for the first one, at most `timeout` seconds.

        Reads once, which may yield only part of a response.

        Raises:
            ConnectionLostError: The connection broke; every unanswered request may have been executed.
        """
        plug = self._open_socket()
        try:
            plug.settimeout(timeout)
            self._receive(plug.recv(_READ_SIZE))
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
            return
        except (OSError, KafkaProtocolError) as error:
            self.close()
            raise ConnectionLostError(self.address, _reason(error)) from error
        except BaseException:  # as for `_send`
            self.close()
            raise

    def _send(self, request: Request[Any], inbox: Inbox, limit: Deadline) -> int:
        plug = self._open_socket()
        version = self.version_of(type(request)) if request.version is None else request.version
        try:
            number, data = self._framing.request(request, version)
            self._inboxes[number] = inbox
            plug.settimeout(max(limit.left, LEAST_TIME))
            sent = plug.send(data)
            while sent < len(data):  # TLS sends in parts, and sendall() would restart the timeout for each
                plug.settimeout(max(limit.left, LEAST_TIME))
                sent += plug.send(memoryview(data)[sent:])
        except (OSError, KafkaProtocolError) as error:
            self.close()
            late = f"{type(request).__name__} could not be sent within {limit.seconds:.3g} s"
            raise ConnectionLostError(self.address, late if isinstance(error, TimeoutError) else _reason(error)) from error
        except BaseException:  # KeyboardInterrupt in the middle of a message: the position in the stream is unknown
            self.close()
            raise
        self._used_at = time.monotonic()
        return number

    def _receive(self, data: bytes) -> None:
        if not data:
            raise ConnectionLostError(self.address, "the broker closed the connection")
        for number, response in self._framing.responses(data):
            self._inboxes.pop(number).append((number, response))

    def version_of(self, request: type[Request[Any]]) -> int:
        """The newest version of a request that both the broker and dualwrite support.

        Raises:
            ConnectionLostError: They have no version of the request in common.
        """
        lowest, highest = self.api_versions.get(request.API_KEY, (0, -1))
        chosen = min(highest, request.NEWEST)
        if chosen < max(lowest, request.OLDEST):
            raise ConnectionLostError(self.address, f"the broker does not support {request.__name__}")
        return chosen

    def supports(self, request: type[Request[Any]], version: int) -> bool:
        """Whether the broker supports this version of a request."""
        lowest, highest = self.api_versions.get(request.API_KEY, (0, -1))
        return lowest <= version <= highest

    def close(self) -> None:
        """Close the socket; may be called more than once. Requests in flight get no response."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    # --- parts --------------------------------------------------------------------------------------------------------

    def _open_socket(self) -> socket.socket:
        if self._socket is None:
            raise ConnectionLostError(self.address, "closed")
        return self._socket

    def _check(self, response: object) -> None:
        """Refuse Metadata's REBOOTSTRAP_REQUIRED: such a response names neither brokers nor the cluster."""
        if getattr(response, "error_code", ErrorCode.NONE) == ErrorCode.REBOOTSTRAP_REQUIRED:
            self.close()
            raise ConnectionLostError(self.address, ErrorCode.REBOOTSTRAP_REQUIRED.name)

    def _limit(self, deadline: Deadline | None) -> Deadline:
        longest = self._config.socket_timeout
        return Deadline.after(longest) if deadline is None else deadline.within(longest)

    def _ask_versions(self, deadline: Deadline) -> None:
        response = self._versions(ApiVersionsRequest.NEWEST, deadline)
        if response.error_code == ErrorCode.UNSUPPORTED_VERSION:
            known = [a.max_version for a in response.api_keys if a.api_key == ApiVersionsRequest.API_KEY]
            response = self._versions(max((ApiVersionsRequest.OLDEST, *known)), deadline)
        self.api_versions = {a.api_key: (a.min_version, a.max_version) for a in response.api_keys}
        self.features = {f.name: f.max_version_level for f in response.finalized_features}
        self.newest_features = {f.name: f.max_version for f in response.supported_features}

    def _versions(self, version: int, deadline: Deadline) -> ApiVersionsResponse:
        request = ApiVersionsRequest(
            client_software_name="dualwrite", client_software_version=software_version(), version=version
        )
        return self.call(request, deadline)

    def _log_in(self, deadline: Deadline) -> None:
        login = self._config.sasl
        if login is None:
            return
        began = time.monotonic()
        lifetime = log_in(self.address, login, self._config.protocol, lambda request: self.call(request, deadline))
        self._log_in_at = began + _SESSION_SHARE * lifetime if lifetime else None


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@cache
def software_version() -> str:
    """The version of dualwrite, in the characters that Kafka allows (KIP-511)."""
    try:
        found = version("dualwrite")
    except PackageNotFoundError:
        return "unknown"
    return re.sub(r"[^A-Za-z0-9.-]", "-", found)
