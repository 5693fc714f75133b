"""One blocking connection to one broker: kafka-python's messages and SASL over a socket of our own.

Its own event loop is not used: one request over a blocking socket takes 0.5 ms, through the loop's thread 3 ms (DESIGN.md §2).
`dualwrite.kafka` says which of kafka-python's names are relied on.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from kafka.errors import KafkaError, for_code
from kafka.net.sasl import get_sasl_mechanism
from kafka.protocol.metadata import ApiVersionsRequest
from kafka.protocol.parser import KafkaProtocol
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest

from dualwrite.errors import BrokerAuthorizationError
from dualwrite.kafka.config import Address, KafkaConfig

UNSUPPORTED_VERSION: Final = 35
_READ_SIZE: Final = 65536
_SESSION_SHARE: Final = 0.85  # KIP-368: log in anew before the session's lifetime is over


class ConnectionLostError(Exception):
    """The connection could not be made, or broke while a request was under way: whether it was executed is unknown."""

    def __init__(self, address: Address, reason: str) -> None:
        super().__init__(f"{address}: {reason}")
        self.address = address
        self.reason = reason


class Connection:
    """Requests over one socket: `call` waits for the answer, `send` and `received` have several under way. For one thread.

    Args:
        address: The broker.
        config: Security and time limits.

    Raises:
        ConnectionLostError: No connection, or no answer.
        BrokerAuthorizationError: The broker refused the login or the TLS certificate.
    """

    def __init__(self, address: Address, config: KafkaConfig) -> None:
        self.address = address
        self._config = config
        self._protocol = KafkaProtocol(client_id=config.client_id)
        self._usable_until: float | None = None
        self._socket: socket.socket | None = None
        self._arrived: list[tuple[int, Any]] = []
        self.api_versions: Mapping[int, tuple[int, int]] = {}
        self.features: Mapping[str, int] = {}
        self.newest_features: Mapping[str, int] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """For `select`: readable means that an answer, or a part of one, has arrived. See `has_arrived`, too.

        Raises:
            ConnectionLostError: The connection is closed.
        """
        if self._socket is None:
            raise ConnectionLostError(self.address, "closed")
        return self._socket.fileno()

    @property
    def has_arrived(self) -> bool:
        """Whether `received` would give something that `select` does not see: it was read from the socket already."""
        return bool(self._arrived) or (isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0)

    @property
    def usable(self) -> bool:
        """Whether another request may be sent on it."""
        return self._socket is not None and (self._usable_until is None or time.monotonic() < self._usable_until)

    def call(self, request: Any, *, timeout: float | None = None) -> Any:
        """Send a request and wait for its answer, `timeout` seconds at most (`socket.timeout.ms` unless given).

        Answers to requests that were sent by `send` before it are kept for `received`.

        Raises:
            ConnectionLostError: The answer did not come. The connection is closed; the request may have been executed.
        """
        deadline = time.monotonic() + (self._config.socket_timeout if timeout is None else timeout)
        number = self.send(request, deadline=deadline)
        while True:
            for answered, answer in self._read(max(deadline - time.monotonic(), 0.001)):
                if answered == number:
                    return answer
                self._arrived.append((answered, answer))
            if time.monotonic() >= deadline:
                self.close()
                raise ConnectionLostError(self.address, f"no answer to {type(request).__name__} in time")

    def send(self, request: Any, *, deadline: float | None = None) -> int:
        """Send a request without waiting for its answer; `received` gives it, by the number returned here.

        The version is the newest that both sides know, unless the request carries one.

        Raises:
            ConnectionLostError: The connection broke, or the broker did not take the request in time; it may be executed.
        """
        if self._socket is None:
            raise ConnectionLostError(self.address, "closed")
        if request.API_VERSION is None:
            request.API_VERSION = self.version_of(type(request))
        deadline = deadline or time.monotonic() + self._config.socket_timeout
        with self._closed_when_broken(type(request).__name__):
            number: int = self._protocol.send_request(request)
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            self._socket.sendall(self._protocol.send_bytes())
        return number

    def received(self, timeout: float = 0.0) -> list[tuple[int, Any]]:
        """The answers that have arrived, as (number, answer); waits `timeout` seconds for the first, and gives none after it.

        Raises:
            ConnectionLostError: The connection broke; every request without an answer may have been executed.
        """
        if self._arrived:
            found, self._arrived = self._arrived, []
            return found
        return self._read(timeout)

    def _read(self, timeout: float) -> list[tuple[int, Any]]:
        """Read once; an empty list where nothing came in time, or only a part of an answer."""
        if self._socket is None:
            raise ConnectionLostError(self.address, "closed")
        with self._closed_when_broken("the requests under way"):
            self._socket.settimeout(timeout)
            try:
                data = self._socket.recv(_READ_SIZE)
            except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
                return []
            if not data:
                raise ConnectionLostError(self.address, "the broker closed the connection")
            found: list[tuple[int, Any]] = self._protocol.receive_bytes(data)
            return found

    @contextmanager
    def _closed_when_broken(self, what: str) -> Iterator[None]:
        try:
            yield
        except ConnectionLostError:
            self.close()
            raise
        except TimeoutError as error:
            self.close()
            raise ConnectionLostError(self.address, f"{what}: not taken by the broker in time") from error
        except (OSError, KafkaError) as error:
            self.close()
            raise ConnectionLostError(self.address, f"{type(error).__name__}: {error}") from error
        except BaseException:  # KeyboardInterrupt in the middle of a message: the stream can't be trusted any more
            self.close()
            raise

    def version_of(self, request: Any) -> int:
        """The newest version of a request that the broker and kafka-python both know.

        Raises:
            BrokerAuthorizationError: Never; a broker that does not know the request gives ConnectionLostError.
        """
        lowest, highest = self.api_versions.get(request.API_KEY, (0, -1))
        version = min(highest, int(request.max_version))
        if version < max(lowest, int(request.min_version)):
            raise ConnectionLostError(self.address, f"the broker does not know {request.__name__}")
        return version

    def supports(self, request: Any, version: int) -> bool:
        """Whether the broker takes this version of a request."""
        lowest, highest = self.api_versions.get(request.API_KEY, (0, -1))
        return lowest <= version <= highest

    def close(self) -> None:
        """Close the socket; may be called more than once."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    # --- opening ------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        limit = self._config.connect_timeout
        try:
            plain = socket.create_connection((self.address.host, self.address.port), limit)
        except OSError as error:
            raise ConnectionLostError(self.address, f"can't connect: {error}") from error
        self._socket = plain
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        context = self._config.tls()
        if context is not None:
            self._socket = self._secured(plain, context)
        self._ask_versions(limit)
        if self._config.sasl is not None:
            self._log_in(limit)

    def _secured(self, plain: socket.socket, context: ssl.SSLContext) -> socket.socket:
        try:
            return context.wrap_socket(plain, server_hostname=self.address.host)
        except ssl.SSLCertVerificationError as error:
            plain.close()
            raise BrokerAuthorizationError(
                f"The certificate of {self.address} is not trusted: {error.verify_message}.",
                next_step="check ssl.ca.location, and that the certificate names the host in bootstrap.servers",
            ) from error
        except (OSError, ssl.SSLError) as error:
            plain.close()
            raise ConnectionLostError(self.address, f"the TLS handshake failed: {error}") from error

    def _ask_versions(self, limit: float) -> None:
        version = int(ApiVersionsRequest.max_version)
        while True:
            answer = self.call(
                ApiVersionsRequest(version=version, client_software_name="dualwrite", client_software_version="0"),
                timeout=limit,
            )
            if answer.error_code != UNSUPPORTED_VERSION or version == 0:
                break
            known = [a.max_version for a in answer.api_keys if a.api_key == ApiVersionsRequest.API_KEY]
            version = min(version - 1, known[0] if known else 0)
        self.api_versions = {a.api_key: (a.min_version, a.max_version) for a in answer.api_keys}
        self.features = {f.name: f.max_version_level for f in (getattr(answer, "finalized_features", None) or ())}
        self.newest_features = {f.name: f.max_version for f in (getattr(answer, "supported_features", None) or ())}

    def _log_in(self, limit: float) -> None:
        login = self._config.sasl
        assert login is not None
        answer = self.call(SaslHandshakeRequest(version=1, mechanism=login.mechanism), timeout=limit)
        if answer.error_code:
            raise BrokerAuthorizationError(
                f"{self.address} refuses SASL {login.mechanism}; it offers {', '.join(answer.mechanisms) or 'none'}.",
                next_step="set sasl.mechanism to one of these",
            )
        mechanism = get_sasl_mechanism(login.mechanism)(
            host=self.address.host,
            security_protocol=self._config.protocol,
            sasl_mechanism=login.mechanism,
            sasl_plain_username=login.username,
            sasl_plain_password=login.password,
        )
        began = time.monotonic()
        while not mechanism.is_done():
            token = SaslAuthenticateRequest(version=1, auth_bytes=mechanism.auth_bytes())
            answer = self.call(token, timeout=limit)
            if answer.error_code:
                raise BrokerAuthorizationError(
                    f"{self.address} refused the login of {login.username!r} by SASL {login.mechanism}: "
                    f"{answer.error_message or kafka_error_name(answer.error_code)}.",
                    next_step="check sasl.username and sasl.password",
                    code=answer.error_code,
                )
            mechanism.receive(answer.auth_bytes)
        if answer.session_lifetime_ms:
            self._usable_until = began + _SESSION_SHARE * answer.session_lifetime_ms / 1000


def kafka_error_name(code: int) -> str:
    """Kafka's name of an error code, such as INVALID_TXN_STATE."""
    return "NONE" if code == 0 else str(getattr(for_code(code), "message", None) or f"error {code}")
