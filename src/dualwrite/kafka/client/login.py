"""SASL authentication over an open connection (KIP-152), and re-authentication (KIP-368)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kafka.net.sasl import get_sasl_mechanism
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest

from dualwrite.errors import BrokerAuthorizationError
from dualwrite.kafka.client.config import Address, Sasl
from dualwrite.kafka.client.error_codes import ErrorCode, error_name


def log_in(address: Address, login: Sasl, protocol: str, call: Callable[[Any], Any]) -> float:
    """Log in; returns the seconds until the broker requires the next login, or 0 if it does not.

    Args:
        address: The broker.
        login: Mechanism and credentials.
        protocol: `security.protocol`.
        call: Sends a request and returns its response.

    Raises:
        BrokerAuthorizationError: The broker refused the login, or the listener does not use SASL.
        Exception: Anything that `call` raises.
    """
    response = call(SaslHandshakeRequest(version=1, mechanism=login.mechanism))
    if response.error_code:
        raise _no_handshake(address, login, protocol, response)
    mechanism = get_sasl_mechanism(login.mechanism)(
        host=address.host,
        security_protocol=protocol,
        sasl_mechanism=login.mechanism,
        sasl_plain_username=_saslname(login.username) if login.mechanism.startswith("SCRAM-") else login.username,
        sasl_plain_password=login.password,
    )
    while not mechanism.is_done():
        response = call(SaslAuthenticateRequest(version=1, auth_bytes=mechanism.auth_bytes()))
        if response.error_code:
            raise BrokerAuthorizationError(
                f"{address} refused the SASL {login.mechanism} login of {login.username!r}: "
                f"{response.error_message or error_name(response.error_code)}.",
                next_step="check sasl.username and sasl.password",
                code=response.error_code,
                name=error_name(response.error_code),
            )
        mechanism.receive(response.auth_bytes)
    return float(response.session_lifetime_ms / 1000)


def _saslname(username: str) -> str:
    """The name as SCRAM's messages contain it (RFC 5802, 5.1), which kafka-python does not escape."""
    return username.replace("=", "=3D").replace(",", "=2C")


def _no_handshake(address: Address, login: Sasl, protocol: str, response: Any) -> BrokerAuthorizationError:
    facts = {"code": response.error_code, "name": error_name(response.error_code)}
    if response.error_code == ErrorCode.UNSUPPORTED_SASL_MECHANISM and response.mechanisms:
        return BrokerAuthorizationError(
            f"{address} refuses SASL {login.mechanism}; it offers {', '.join(response.mechanisms)}.",
            next_step="set sasl.mechanism to one of them",
            **facts,
        )
    without = "SSL" if protocol == "SASL_SSL" else "PLAINTEXT"
    return BrokerAuthorizationError(
        f"{address} does not accept a SASL login: {facts['name']}.",
        cause=f"security.protocol is {protocol}, and this is a listener without SASL",
        next_step=f"set bootstrap.servers to the broker's {protocol} listener, or set security.protocol={without}",
        **facts,
    )
