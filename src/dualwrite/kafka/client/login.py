"""SASL authentication over an open connection (KIP-152), and re-authentication (KIP-368): PLAIN and SCRAM."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol, TypeVar

from dualwrite.errors import BrokerAuthorizationError
from dualwrite.kafka.client.config import Address, Sasl
from dualwrite.kafka.client.error_codes import ErrorCode, error_name
from dualwrite.kafka.client.fields import Request
from dualwrite.kafka.client.messages_generated import SaslAuthenticateRequest, SaslHandshakeRequest, SaslHandshakeResponse
from dualwrite.kafka.client.scram import ScramError, scram

_Response = TypeVar("_Response")


class Call(Protocol):
    """Sends a request and returns its response."""

    def __call__(self, request: Request[_Response], /) -> _Response:
        """Send it."""


def log_in(address: Address, login: Sasl, protocol: str, call: Call) -> float:
    """Log in; returns the seconds until the broker requires the next login, or 0 if it does not.

    Args:
        address: The broker.
        login: Mechanism and credentials.
        protocol: `security.protocol`.
        call: Sends a request and returns its response.

    Raises:
        BrokerAuthorizationError: The broker refused the login, does not know the password, or the listener does not use SASL.
        Exception: Anything that `call` raises.
    """
    handshake = call(SaslHandshakeRequest(mechanism=login.mechanism))
    if handshake.error_code:
        raise _no_handshake(address, login, protocol, handshake)
    messages = _messages(login)
    message = next(messages)
    while True:
        response = call(SaslAuthenticateRequest(auth_bytes=message))
        if response.error_code:
            raise BrokerAuthorizationError(
                f"{address} refused the SASL {login.mechanism} login of {login.username!r}: "
                f"{response.error_message or error_name(response.error_code)}.",
                next_step="check sasl.username and sasl.password",
                code=response.error_code,
                name=error_name(response.error_code),
            )
        try:
            message = messages.send(response.auth_bytes)
        except StopIteration:
            return response.session_lifetime_ms / 1000
        except ScramError as error:
            raise BrokerAuthorizationError(
                f"The SASL {login.mechanism} login of {login.username!r} at {address} was stopped: {error}.",
                cause="what responds there is no broker of this cluster: it has not shown that it knows the password",
                next_step="check bootstrap.servers, and use security.protocol=SASL_SSL",
            ) from error


def _messages(login: Sasl) -> Generator[bytes, bytes, None]:
    """The client's messages; each of the broker's is sent in."""
    if login.mechanism.startswith("SCRAM-"):
        return scram(login.mechanism, login.username, login.password)
    return _plain(login.username, login.password)


def _plain(username: str, password: str) -> Generator[bytes, bytes, None]:
    """RFC 4616, with the user's name as the authorization id too, as brokers require it if it is given."""
    yield f"{username}\0{username}\0{password}".encode()


def _no_handshake(address: Address, login: Sasl, protocol: str, response: SaslHandshakeResponse) -> BrokerAuthorizationError:
    code, name = response.error_code, error_name(response.error_code)
    if code == ErrorCode.UNSUPPORTED_SASL_MECHANISM and response.mechanisms:
        return BrokerAuthorizationError(
            f"{address} refuses SASL {login.mechanism}; it offers {', '.join(response.mechanisms)}.",
            next_step="set sasl.mechanism to one of them",
            code=code,
            name=name,
        )
    without = "SSL" if protocol == "SASL_SSL" else "PLAINTEXT"
    return BrokerAuthorizationError(
        f"{address} does not accept a SASL login: {name}.",
        cause=f"security.protocol is {protocol}, and this is a listener without SASL",
        next_step=f"set bootstrap.servers to the broker's {protocol} listener, or set security.protocol={without}",
        code=code,
        name=name,
    )
