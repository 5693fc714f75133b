"""One connection to one broker: Kafka's messages (`messages_generated`) over a blocking socket."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, NamedTuple, TypeVar

from dualwrite import process
from dualwrite.deadline import Deadline
from dualwrite.errors import BrokerAuthorizationError, BrokerUnavailableError
from dualwrite.kafka.client.authentication import log_in
from dualwrite.kafka.client.config import Address, KafkaConfig
from dualwrite.kafka.client.fields import NO_TAGS, Fields, KafkaProtocolError, Request
from dualwrite.kafka.client.kafka_errors import ErrorCode
from dualwrite.kafka.client.messages_generated import ApiVersionsRequest, ApiVersionsResponse, MetadataRequest
from dualwrite.kafka.client.support import check_answer, check_offers, newest_common
from dualwrite.observability.logs import closed_on_error
from dualwrite.observability.outages import kafka_at

_SIZE: Final = struct.Struct(">i")
_HEADER: Final = struct.Struct(">ihhi")  # size, API key, version, correlation id
_LENGTH: Final = struct.Struct(">h")
_MAX_RESPONSE_BYTES: Final = 100_000_000
"""The maximum size of a response, in bytes."""

MIN_SECONDS: Final = 0.001
"""Seconds; a socket timeout of 0 would mean non-blocking mode."""

# As for the database connections: a peer that vanished is detected after a minute.
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 30), ("TCP_KEEPALIVE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))

Inbox = list[tuple[int, Any]]
"""Receives the responses to one user's requests, each with the number of its request."""

_READ_SIZE: Final = 65536
_SESSION_SHARE: Final = 0.85  # KIP-368: log in again before the session expires
_IDLE: Final = 1.0  # seconds without a request, after which the socket is checked before the next one

_REQUEST_QUOTA: Final = "request_percentage"
PRODUCE_QUOTA: Final = f"producer_byte_rate or {_REQUEST_QUOTA}"
_QUOTAS: Final = {"ProduceResponse": PRODUCE_QUOTA, "FetchResponse": f"consumer_byte_rate or {_REQUEST_QUOTA}"}

_IDENTITY: Final = 5
"""ApiVersions: the first version that names the cluster and the node that a client wants (KIP-1242, Kafka 4.4)."""

_Response = TypeVar("_Response")


class Node(NamedTuple):
    """A broker, as metadata names it.

    Args:
        cluster_id: Kafka's `cluster.id`.
        node_id: Its `node.id`.
    """

    cluster_id: str
    node_id: int


class Framing:
    """Encodes requests, and decodes their responses, which arrive in the order of the requests.

    Each response contains the number of its request (the correlation id).
    """

    def __init__(self, client_id: str) -> None:
        encoded = client_id.encode()
        self._client = _LENGTH.pack(len(encoded)) + encoded
        self._number = 0
        self._unanswered: deque[tuple[int, Request[Any], int]] = deque()
        self._rest = b""

    def request(self, request: Request[Any], version: int) -> tuple[int, bytes]:
        """The number of a request, and its bytes, which must be sent before those of the next request.

        Raises:
            ValueError: See `Request.write`.
        """
        number = (self._number + 1) % 2**31
        parts = [b"", self._client, NO_TAGS] if request.FLEXIBLE else [b"", self._client]
        request.write(parts, version)
        size = _HEADER.size - _SIZE.size + sum(map(len, parts))
        parts[0] = _HEADER.pack(size, request.API_KEY, version, number)
        self._number = number
        self._unanswered.append((number, request, version))
        return number, b"".join(parts)

    def responses(self, data: bytes) -> list[tuple[int, Any]]:
        """The responses that are complete with this data, each with the number of its request.

        Raises:
            KafkaProtocolError: The data can't be decoded as responses to the requests.
        """
        received = self._rest + data if self._rest else data
        found, place = [], 0
        while len(received) - place >= _SIZE.size:
            (size,) = _SIZE.unpack_from(received, place)
            if not 0 <= size <= _MAX_RESPONSE_BYTES:
                raise NotKafkaError(received[place : place + _SIZE.size])
            end = place + _SIZE.size + size
            if end > len(received):
                break
            found.append(self._answer(received[place + _SIZE.size : end]))
            place = end
        self._rest = received[place:]
        return found

    def _answer(self, frame: bytes) -> tuple[int, Any]:
        if not self._unanswered:
            raise KafkaProtocolError("a response without a request")
        number, request, version = self._unanswered.popleft()
        fields = Fields(frame)
        try:
            (answered,) = fields.numbers(_SIZE)
            if answered == number:
                if (
                    request.FLEXIBLE and request.API_KEY != ApiVersionsRequest.API_KEY
                ):  # whose header has no tags: it may be in v0
                    fields.skip_tags()
                response = request.response(fields, version)
                fields.end()
                return number, response
        except KafkaProtocolError as error:
            raise KafkaProtocolError(f"the response to request {number} can't be decoded: {error}") from error
        raise KafkaProtocolError(f"the response to request {answered} came instead of the one to {number}")


class NotKafkaError(KafkaProtocolError):
    """What arrived can't be the beginning of a response: the peer speaks another protocol. Attributes: `first`, its bytes."""

    def __init__(self, first: bytes) -> None:
        super().__init__(f"the size of a response is {_SIZE.unpack(first)[0]}")
        self.first = first


class ConnectionLostError(Exception):
    """The connection could not be opened, or broke with a request in flight, which may or may not have been executed."""

    is_throttled = False

    def __init__(self, address: Address, reason: str) -> None:
        super().__init__(f"{address}: {reason}")
        self.address = address
        self.reason = reason


class RebootstrapRequiredError(ConnectionLostError):
    """The broker requires that the client begins anew with its bootstrap servers (KIP-1102), or is not the expected one."""


class ConnectionThrottledError(ConnectionLostError):
    """A quota holds back requests for longer than the caller can wait; nothing was sent, and the connection stays open."""

    is_throttled = True


def open_socket(address: Address, config: KafkaConfig, deadline: Deadline) -> socket.socket:
    """A connected socket, encrypted if the protocol requires it.

    Name resolution is not bounded by the deadline, since the system's resolver has no time limit: callers that can't wait
    for it open the socket in another thread (`ConnectionAttempt`).

    Raises:
        ConnectionLostError: The connection failed, or was not established before the deadline.
        BrokerAuthorizationError: The broker's certificate is not trusted.
        ConfigurationError: See `KafkaConfig.tls`.
    """
    context = config.tls()
    plain = _connected(address, config, deadline)
    if context is None:
        return plain
    with closed_on_error(plain):
        try:
            plain.settimeout(max(deadline.left, MIN_SECONDS))
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
                made.settimeout(max(deadline.left / (len(found) - position), MIN_SECONDS))
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


class Connection:
    """Requests over one socket, several in flight at once. Not thread-safe, and only for the process that opened it.

    `call` waits for the response. `send` does not: the response is put into the inbox that was passed to `send`, by whichever
    later `receive` or `call` reads it. So several users can share a connection, each with its own inbox.

    Opening it takes at most `socket.connection.setup.timeout.ms`.

    Args:
        address: The broker's address.
        config: The settings.
        deadline: The limit for opening it.
        expected: Which broker should be there. It refuses a client that wants another one before it sees the client's login
            (KIP-1242, Kafka 4.4); an older broker is not asked.

    Attributes:
        throttled_until: Until then a quota holds back requests (KIP-219): the broker would not read them, and `send` waits.
        is_confirmed: Whether the broker has confirmed that it is the expected one.

    Raises:
        ConnectionLostError: The connection failed, or the broker did not respond.
        RebootstrapRequiredError: It is another broker than the expected one.
        BrokerAuthorizationError: The broker refused the login, or its TLS certificate is not trusted.
    """

    def __init__(
        self, address: Address, config: KafkaConfig, deadline: Deadline | None = None, expected: Node | None = None
    ) -> None:
        self.address = address
        self._config = config
        self._pid = process.pid
        self._framing = Framing(config.client_id)
        self._log_in_at: float | None = None
        self._used_at = time.monotonic()
        self._inboxes: dict[int, Inbox] = {}
        self._kafka = kafka_at(config.servers)
        self.throttled_until = 0.0
        self.api_versions: Mapping[int, tuple[int, int]] = {}
        self.features: Mapping[str, int] = {}
        self.newest_features: Mapping[str, int] = {}
        limit = Deadline(config.connect_timeout) if deadline is None else deadline.within(config.connect_timeout)
        self._socket: socket.socket | None = open_socket(address, config, limit)
        with closed_on_error(self):
            self.is_confirmed = self._ask_versions(expected, limit)
            self._log_in(limit)

    def fileno(self) -> int:
        """For `select`: readable means that a response, or part of one, has arrived. See also `has_read`.

        Raises:
            ConnectionLostError: The connection is closed.
        """
        if self._socket is None:
            raise self._closed()
        return self._socket.fileno()

    @property
    def has_read(self) -> bool:
        """Whether `receive` would find data that `select` does not see, since TLS has already read it from the socket."""
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    @property
    def usable(self) -> bool:
        """Whether it is open and was opened by this process, not inherited through a fork."""
        return self._socket is not None and self._pid == process.pid

    def make_ready(self, deadline: Deadline) -> bool:
        """Whether another request may be sent on it now; after an idle period the socket is checked.

        If the broker requires a new login soon, it is done here (KIP-368); requests in flight are not affected.
        """
        if self._socket is None or self._pid != process.pid:
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
        longest = self._config.socket_timeout
        limit = Deadline(longest) if deadline is None else deadline.within(longest)
        if limit.expired:
            raise ConnectionLostError(self.address, f"no time left for {type(requests[0]).__name__}")
        inbox: Inbox = []
        for request in requests:
            self.send(request, inbox, limit)
        while True:
            self.receive(limit.left)
            if len(inbox) == len(requests):
                break
            if limit.expired:
                self.close()
                late = type(requests[len(inbox)]).__name__
                raise ConnectionLostError(self.address, f"no response to {late} within {limit.seconds:.3g} s")
        return [response for _, response in inbox]

    def send(self, request: Request[Any], inbox: Inbox, deadline: Deadline) -> int:
        """Send a request without waiting for its response, which is later put into `inbox` with the number returned here.

        Uses the newest version that both sides know, unless the request specifies one. Waits until `throttled_until`.

        Raises:
            ConnectionThrottledError: The deadline, or `socket.timeout.ms`, is before that.
            ConnectionLostError: The connection broke, or the request could not be sent before the deadline, or within
                `socket.timeout.ms`; it may have been executed.
        """
        plug = self._socket
        if plug is None:
            raise self._closed()
        version = self.version_of(type(request)) if request.version is None else request.version
        seconds = min(deadline.seconds, self._config.socket_timeout)
        if self.throttled_until:
            self._wait_for_quota(deadline.within(self._config.socket_timeout))
        try:
            number, data = self._framing.request(request, version)
            self._inboxes[number] = inbox
            sent = 0
            while sent < len(data):  # TLS sends in parts, and sendall() would restart the timeout for each
                plug.settimeout(max(min(deadline.left, seconds), MIN_SECONDS))
                sent += plug.send(memoryview(data)[sent:])
        except (OSError, KafkaProtocolError) as error:
            self.close()
            late = f"{type(request).__name__} could not be sent within {seconds:.3g} s"
            raise ConnectionLostError(self.address, late if isinstance(error, TimeoutError) else _reason(error)) from error
        except BaseException:  # KeyboardInterrupt in the middle of a message: the position in the stream is unknown
            self.close()
            raise
        self._used_at = time.monotonic()
        return number

    def receive(self, timeout: float = 0.0) -> None:
        """Put the responses that have arrived into their inboxes; waits for the first one, at most `timeout` seconds.

        Reads once, which may yield only part of a response.

        Raises:
            ConnectionLostError: The connection broke; every unanswered request may have been executed.
        """
        plug = self._socket
        if plug is None:
            raise self._closed()
        try:
            plug.settimeout(timeout)
            data = plug.recv(_READ_SIZE)
            for number, response in self._framing.responses(data):
                if getattr(response, "error_code", 0) == ErrorCode.REBOOTSTRAP_REQUIRED:  # it names no brokers and no cluster
                    raise RebootstrapRequiredError(self.address, ErrorCode.REBOOTSTRAP_REQUIRED.name)  # noqa: TRY301  (closed below)
                self._inboxes.pop(number).append((number, response))
                if getattr(response, "throttle_time_ms", 0):
                    self._throttled(type(response).__name__, response.throttle_time_ms / 1000)
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
            return
        except (OSError, KafkaProtocolError) as error:
            self.close()
            raise ConnectionLostError(self.address, _reason(error)) from error
        except BaseException:  # as for `send`
            self.close()
            raise
        if not data:
            self.close()
            raise ConnectionLostError(self.address, "the broker closed the connection") from EOFError()

    def version_of(self, request: type[Request[Any]]) -> int:
        """The newest version of a request that both the broker and dualwrite support.

        Raises:
            UnsupportedBrokerError: They have no version of the request in common.
        """
        chosen = newest_common(self.api_versions, request)
        if chosen is None:
            check_offers(self.address, self.api_versions, [request])
        assert chosen is not None
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

    def _closed(self) -> ConnectionLostError:
        return ConnectionLostError(self.address, "closed")

    def _throttled(self, response: str, seconds: float) -> None:
        self.throttled_until = max(self.throttled_until, time.monotonic() + seconds)
        self._kafka.throttled(seconds, f"{_QUOTAS.get(response, _REQUEST_QUOTA)} of {self._config.client}")

    def _wait_for_quota(self, deadline: Deadline) -> None:
        left = self.throttled_until - time.monotonic()
        deadline.sleep(max(left, 0.0))
        if deadline.expired and time.monotonic() < self.throttled_until:
            raise ConnectionThrottledError(self.address, f"a quota holds back requests for {left:.3g} s")
        self.throttled_until = 0.0

    @property
    def asks_for_identity(self) -> bool:
        """Whether the broker checks that it is the one that a client expects."""
        return self.supports(ApiVersionsRequest, _IDENTITY)

    def _ask_versions(self, expected: Node | None, deadline: Deadline) -> bool:
        """Ask the broker what it supports, and whether it is the expected one; whether it has confirmed that."""
        version = _IDENTITY - 1 if expected is None else _IDENTITY
        response = self._versions(version, expected, deadline)
        if response.error_code == ErrorCode.UNSUPPORTED_VERSION:
            known = [a.max_version for a in response.api_keys if a.api_key == ApiVersionsRequest.API_KEY]
            version = max((ApiVersionsRequest.OLDEST, *known))
            response = self._versions(version, None, deadline)
            check_answer(f"ApiVersions v{ApiVersionsRequest.OLDEST}", response.error_code, at=self.address)
        self.api_versions = {a.api_key: (a.min_version, a.max_version) for a in response.api_keys}
        self.features = {f.name: f.max_version_level for f in response.finalized_features}
        self.newest_features = {f.name: f.max_version for f in response.supported_features}
        return version >= _IDENTITY and expected is not None

    def _versions(self, version: int, expected: Node | None, deadline: Deadline) -> ApiVersionsResponse:
        request = ApiVersionsRequest(
            client_software_name="dualwrite", client_software_version=software_version(), version=version
        )
        if expected is not None:
            request.cluster_id, request.node_id = expected
        return self.call(request, deadline)

    def _log_in(self, deadline: Deadline) -> None:
        login = self._config.sasl
        if login is None:
            return
        began = time.monotonic()
        try:
            lifetime = log_in(self.address, login, self._config.protocol, partial(self.call, deadline=deadline), deadline)
        except BrokerUnavailableError as error:  # there is no token
            raise ConnectionLostError(self.address, f"{error}") from error
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


def about_the_cluster() -> MetadataRequest:
    """A Metadata request for the brokers and the cluster id, without topics."""
    return MetadataRequest(topics=[], allow_auto_topic_creation=False)
