"""Opening a connection in a thread of its own, and whether a broker that did not let us in refuses, or does not answer.

An outage passes by itself; a refusal stays until somebody changes a setting, a certificate or an ACL. A broker that starts or
stops closes connections too, even in the middle of a TLS handshake. So a closed connection proves nothing; only what a listener
answers does.
"""

from __future__ import annotations

import _thread
import ssl
from dataclasses import replace
from typing import Final

from dualwrite import process
from dualwrite.deadline import Deadline
from dualwrite.errors import BrokerAuthorizationError
from dualwrite.kafka.client.authentication import wrong_protocol
from dualwrite.kafka.client.broker_connection import (
    Connection,
    ConnectionLostError,
    Node,
    NotKafkaError,
    RebootstrapRequiredError,
    about_the_cluster,
)
from dualwrite.kafka.client.config import Address, KafkaConfig
from dualwrite.kafka.client.kafka_errors import ErrorCode
from dualwrite.kafka.client.logins import PasswordLogin
from dualwrite.observability.logs import closed_on_error

_ALERT: Final = b"\x15\x03"
"""How a TLS listener answers what is not TLS: an alert, in any version of TLS."""

_OF_CERTIFICATES: Final = ("ACCESS_DENIED", "DECRYPT_ERROR", "UNKNOWN_CA")
"""TLS alerts about the client's certificate, beside those with this word; Java sends BAD_CERTIFICATE if there is none."""

_OF_PARAMETERS: Final = ("HANDSHAKE_FAILURE", "INSUFFICIENT_SECURITY", "PROTOCOL_VERSION", "UNSUPPORTED_PROTOCOL")
"""TLS alerts, and errors of OpenSSL, if the two sides have no version of TLS or no cipher in common."""

_NOBODY: Final = PasswordLogin("", "", "")
"""A login that each listener refuses, one without SASL in another way; it has no secret."""
_BY_THE_PEER: Final = (NotKafkaError, EOFError, ssl.SSLError, ConnectionResetError, BrokenPipeError)


class OtherNodeError(ConnectionLostError):
    """Another broker than the expected one has the address now: what metadata or a coordinator has said is no longer true."""

    def __init__(self, address: Address, node: Node, found: str) -> None:
        super().__init__(address, f"the broker there is not node {node.node_id} of the cluster {node.cluster_id!r}, {found}")


class ConnectionAttempt:
    """One attempt to open a connection, in its own thread.

    So nothing that opening waits for (a name server, a host that drops packets, TLS, a login) blocks a caller beyond the
    caller's own time limit. It uses `_thread`, since `threading.Thread.start` waits in Python code, where an interrupt surfaces
    as "cannot release un-acquired lock".

    Args:
        address: The broker's address.
        config: The settings.
        expected: Which broker should be there, if that is known and the cluster's brokers can check it.

    Attributes:
        connection: The open connection, once the attempt has succeeded.
        cluster_id: Kafka's `cluster.id`, as this broker reports it; empty if it has none.
        error: The exception, if the attempt failed; see `Connection`.
        is_reported: Whether a wait has returned because the attempt has finished. Only the first one does: perhaps nobody wants
            the connection any more.
    """

    def __init__(self, address: Address, config: KafkaConfig, expected: Node | None = None) -> None:
        self._address = address
        self._expected = expected
        self._pid = process.pid
        self._config = config
        self.connection: Connection | None = None
        self.cluster_id = ""
        self.error: BaseException | None = None
        self.is_reported = False
        self._is_done = False
        self._is_unwanted = False
        self._running = _thread.allocate_lock()
        self._lock = _thread.allocate_lock()
        self._running.acquire()
        _thread.start_new_thread(self._run, ())

    @property
    def is_ours(self) -> bool:
        """Whether its thread runs in this process, and not in the parent of a fork."""
        return self._pid == process.pid

    def wait(self, seconds: float) -> bool:
        """Wait for at most `seconds`; whether the attempt has finished."""
        if not self._is_done and self._running.acquire(timeout=max(seconds, 0.0)):
            self._running.release()  # if KeyboardInterrupt prevents this, `_is_done` is set all the same
        return self._is_done

    def give_up(self) -> None:
        """The connection is no longer wanted: close it, now or as soon as it is open."""
        with self._lock:
            self._is_unwanted = True
            if self.connection is not None:
                self.connection.close()

    def _open(self, deadline: Deadline) -> None:
        try:
            made = Connection(self._address, self._config, deadline, self._expected)
        except RebootstrapRequiredError:
            if self._expected is None:
                raise
            made = self._open_other(self._expected, deadline)
        with closed_on_error(made):
            self._identify(made, deadline)
        with self._lock:
            self.connection = made
            if self._is_unwanted:
                made.close()

    def _open_other(self, expected: Node, deadline: Deadline) -> Connection:
        """A connection to the broker that is not the expected one, to learn which cluster it belongs to."""
        try:
            return Connection(self._address, self._config, deadline)
        except (ConnectionLostError, BrokerAuthorizationError) as error:  # the login of one cluster says nothing to another
            raise OtherNodeError(self._address, expected, f"and which one it is can't be asked: {error}") from error

    def _identify(self, made: Connection, deadline: Deadline) -> None:
        expected = self._expected
        if expected is not None and made.is_confirmed:
            self.cluster_id = expected.cluster_id
            return
        self.cluster_id = made.call(about_the_cluster(), deadline).cluster_id or ""
        if expected is not None and made.asks_for_identity and self.cluster_id == expected.cluster_id:
            raise OtherNodeError(self._address, expected, "but another broker of the cluster")

    def _run(self) -> None:
        deadline = Deadline(self._config.connect_timeout)
        try:
            self._open(deadline)
        except ConnectionLostError as error:
            self.error = error
            self.error = _refusal(error, self._config, deadline) or error
        except BaseException as error:  # noqa: BLE001  (raised again in the caller that wants the connection)
            self.error = error
        finally:
            self._is_done = True
            self._running.release()


def _refusal(lost: ConnectionLostError, config: KafkaConfig, deadline: Deadline) -> BrokerAuthorizationError | None:
    """What the loss of a connection that was being opened proves; None: the broker has not refused, as far as one can see."""
    cause, address = lost.__cause__, lost.address
    if isinstance(cause, ssl.SSLError):
        _, is_alert, word = (cause.reason or "").rpartition("ALERT_")
        alert = word.lower().replace("_", " ")
        if is_alert and (word in _OF_CERTIFICATES or "CERTIFICATE" in word):
            has_one = any(config.properties.get(f"ssl.certificate.{form}") for form in ("location", "pem"))
            return BrokerAuthorizationError(
                f"{address} refuses this client {'with its' if has_one else 'without a'} certificate: {alert}.",
                cause="it has expired or was revoked, or the broker does not trust its authority (ssl.truststore.location)"
                if has_one
                else "the listener requires one (ssl.client.auth=required)",
                next_step=f"{'check' if has_one else 'set'} ssl.certificate.location and ssl.key.location",
            )
        if word in _OF_PARAMETERS:
            return BrokerAuthorizationError(
                f"{address} and this client can't agree on how to encrypt: {alert}.",
                cause="they have no version of TLS or no cipher in common, or the listener requires a client certificate",
                next_step="check ssl.cipher.suites and ssl.certificate.location, and ssl.enabled.protocols on the broker",
            )
    first = cause.first if isinstance(cause, NotKafkaError) else b""
    if first == b"HTTP":
        return BrokerAuthorizationError(f"{address} is a web server, and no Kafka broker.", next_step="check bootstrap.servers")
    if first.startswith(_ALERT):
        return wrong_protocol(address, config.protocol, "SSL or SASL_SSL")
    if not isinstance(cause, _BY_THE_PEER):
        return None
    spoken = _spoken(address, config, deadline)
    return None if spoken in (None, config.protocol) else wrong_protocol(address, config.protocol, spoken)


def _spoken(address: Address, config: KafkaConfig, deadline: Deadline) -> str | None:
    """The security.protocol of a listener, as its own answer shows it; None: it does not answer (any more)."""
    for tls in dict.fromkeys((config.protocol.endswith("SSL"), False)):
        asked = "SASL_SSL" if tls else "SASL_PLAINTEXT"
        try:
            if not deadline.expired:
                Connection(address, replace(config, protocol=asked, sasl=_NOBODY), deadline).close()
        except BrokerAuthorizationError as error:
            code = error.facts.get("code")
            if code in (ErrorCode.UNSUPPORTED_SASL_MECHANISM, ErrorCode.ILLEGAL_SASL_STATE):
                return asked if code == ErrorCode.UNSUPPORTED_SASL_MECHANISM else asked.removeprefix("SASL_")
        except ConnectionLostError:
            continue
    return None
