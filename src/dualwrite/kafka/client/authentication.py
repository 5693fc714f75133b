"""SASL authentication over an open connection (KIP-152), and re-authentication (KIP-368): PLAIN, SCRAM and OAUTHBEARER."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Generator
from typing import Any, Final, Protocol, TypeVar

from dualwrite.deadline import Deadline
from dualwrite.errors import BrokerAuthorizationError
from dualwrite.kafka.client.config import Address
from dualwrite.kafka.client.fields import Request
from dualwrite.kafka.client.kafka_errors import ErrorCode, error_name
from dualwrite.kafka.client.logins import Login, PasswordLogin
from dualwrite.kafka.client.messages_generated import SaslAuthenticateRequest, SaslHandshakeRequest, SaslHandshakeResponse
from dualwrite.kafka.client.tokens import Token

_HASHES: Final = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
_MIN_ITERATIONS: Final = 4096  # RFC 7677; Kafka stores no credentials with fewer
_MAX_ITERATIONS: Final = 1_000_000  # a second of CPU time: a server must not be able to ask for hours
_NO_BINDING: Final = "n,,"
_NONCE_BYTES: Final = 24
_HIDDEN: Final = "***"

_Response = TypeVar("_Response")


class ScramError(Exception):
    """The server has not shown that it knows the password, or does not follow the protocol."""


def scram(mechanism: str, username: str, password: str, nonce: str | None = None) -> Generator[bytes, bytes, None]:
    """Yields the client's two messages; the server's response to each is sent in. It ends once the server has proved itself.

    Name and password are encoded as they are, without SASLprep, as by brokers. `nonce` is for the vectors of the RFC.

    Raises:
        ScramError: A message of the server is wrong, or its signature is not that of the password.
    """
    name = _HASHES[mechanism]
    nonce = nonce or base64.b64encode(secrets.token_bytes(_NONCE_BYTES)).decode()
    first = f"n={username.replace('=', '=3D').replace(',', '=2C')},r={nonce}"
    server_first = yield f"{_NO_BINDING}{first}".encode()

    challenge = _attributes(server_first)
    both = challenge.get("r", "")
    if not both.startswith(nonce) or both == nonce:
        raise ScramError("the server's nonce does not continue the client's")
    salted = hashlib.pbkdf2_hmac(name, password.encode(), _decoded(challenge, "s"), _iterations(challenge))
    without_proof = f"c={base64.b64encode(_NO_BINDING.encode()).decode()},r={both}"
    signed = b",".join((first.encode(), server_first, without_proof.encode()))
    client_key = hmac.digest(salted, b"Client Key", name)
    signature = hmac.digest(hashlib.new(name, client_key).digest(), signed, name)
    proof = bytes(one ^ other for one, other in zip(client_key, signature, strict=True))
    server_final = yield f"{without_proof},p={base64.b64encode(proof).decode()}".encode()

    expected = hmac.digest(hmac.digest(salted, b"Server Key", name), signed, name)
    outcome = _attributes(server_final)
    if "e" in outcome:
        raise ScramError(f"the server reports {outcome['e']!r}")
    if not hmac.compare_digest(_decoded(outcome, "v"), expected):
        raise ScramError("the server's signature is not that of the password")


def _attributes(message: bytes) -> dict[str, str]:
    """The attributes of a message of the server; a mandatory extension (`m`) is refused."""
    try:
        parts = [part.partition("=") for part in message.decode().split(",")]
    except UnicodeDecodeError as error:
        raise ScramError("a message of the server is not UTF-8") from error
    found = {name: value for name, _, value in parts}
    if "m" in found:
        raise ScramError("the server requires an extension that is not known")
    return found


def _decoded(attributes: dict[str, str], name: str) -> bytes:
    try:
        return base64.b64decode(attributes[name], validate=True)
    except (KeyError, ValueError) as error:
        raise ScramError(f"a message of the server has no valid attribute {name!r}") from error


def _iterations(attributes: dict[str, str]) -> int:
    text = attributes.get("i", "")
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= len(str(_MAX_ITERATIONS)) else 0
    if not _MIN_ITERATIONS <= number <= _MAX_ITERATIONS:
        raise ScramError(f"the server asks for {text!r} iterations; {_MIN_ITERATIONS} to {_MAX_ITERATIONS} are allowed")
    return number


class Exchange(Protocol):
    """Sends a request and returns its response."""

    def __call__(self, request: Request[_Response], /) -> _Response:
        """Send it."""


def oauthbearer(token: Token) -> Generator[bytes, bytes, None]:
    """The client's messages with a token (RFC 7628): a second one only if the server has refused the first, and has said why.

    Raises:
        TokenRefusedError: The server has refused the token, and takes the second message for an answer.
    """
    pairs = {"auth": f"Bearer {token.text}", **token.extensions}
    refusal = yield "\x01".join((_NO_BINDING, *(f"{name}={value}" for name, value in pairs.items()), "\x01")).encode()
    if refusal:
        yield b"\x01"
        raise TokenRefusedError(refusal.decode(errors="replace"))


class TokenRefusedError(Exception):
    """The server refuses a token; its text is the reason that it gives, in JSON."""


def log_in(address: Address, login: Login, protocol: str, call: Exchange, deadline: Deadline) -> float:
    """Log in; returns the seconds until the broker requires the next login, or 0 if it does not.

    Raises:
        BrokerAuthorizationError: The broker refused the login, does not know the password, or the listener does not use SASL.
        BrokerUnavailableError: There is no token at the moment.
        Exception: Anything else that getting the token, or `call`, raises.
    """
    handshake = call(SaslHandshakeRequest(mechanism=login.mechanism))
    if handshake.error_code:
        raise _no_handshake(address, login, protocol, handshake)
    if isinstance(login, PasswordLogin):
        return _exchanged(address, login, _with_password(login), call)
    token = login.tokens.token(deadline)
    try:
        return _exchanged(address, login, oauthbearer(token), call, hidden=token.text)
    except BrokerAuthorizationError:
        login.tokens.refused(token)
        raise


def _exchanged(
    address: Address, login: Login, messages: Generator[bytes, bytes, None], call: Exchange, *, hidden: str = ""
) -> float:
    """Send the client's messages; each of the broker's is sent into the generator. See `log_in`."""
    message = next(messages)
    said = ""
    while True:
        response = call(SaslAuthenticateRequest(auth_bytes=message))
        if response.error_code:
            reason = response.error_message or said or error_name(response.error_code)
            raise _refused(address, login, reason, hidden, code=response.error_code, name=error_name(response.error_code))
        try:
            message = messages.send(response.auth_bytes)
            said = response.auth_bytes.decode(errors="replace")
        except StopIteration:
            return response.session_lifetime_ms / 1000
        except TokenRefusedError as error:
            raise _refused(address, login, str(error), hidden) from error
        except ScramError as error:
            raise BrokerAuthorizationError(
                f"The SASL {login.mechanism} login {login.whose} at {address} was stopped: {error}.",
                cause="what responds there is no broker of this cluster: it has not shown that it knows the password",
                next_step="check bootstrap.servers, and use security.protocol=SASL_SSL",
            ) from error


def _refused(address: Address, login: Login, reason: str, hidden: str, **facts: Any) -> BrokerAuthorizationError:
    """The error for a login that the broker has refused; its reason may repeat what it was given."""
    shown = reason.replace(hidden, _HIDDEN) if hidden else reason
    return BrokerAuthorizationError(
        f"{address} refused the SASL {login.mechanism} login {login.whose}: {shown}.", next_step=login.next_step, **facts
    )


def _with_password(login: PasswordLogin) -> Generator[bytes, bytes, None]:
    if login.mechanism.startswith("SCRAM-"):
        return scram(login.mechanism, login.username, login.password)
    return _plain(login.username, login.password)


def _plain(username: str, password: str) -> Generator[bytes, bytes, None]:
    """RFC 4616, with the user's name as the authorization id too, as brokers require it if it is given."""
    yield f"{username}\0{username}\0{password}".encode()


def _no_handshake(address: Address, login: Login, protocol: str, response: SaslHandshakeResponse) -> BrokerAuthorizationError:
    code, name = response.error_code, error_name(response.error_code)
    if code == ErrorCode.UNSUPPORTED_SASL_MECHANISM and response.mechanisms:
        return BrokerAuthorizationError(
            f"{address} refuses SASL {login.mechanism}; it offers {', '.join(response.mechanisms)}.",
            next_step="set sasl.mechanism to one of them",
            code=code,
            name=name,
        )
    return wrong_protocol(address, protocol, protocol.removeprefix("SASL_"), code=code, name=name)


def wrong_protocol(address: Address, protocol: str, spoken: str, **facts: Any) -> BrokerAuthorizationError:
    """The error for a client whose `security.protocol` is not that of the listener that it has connected to."""
    return BrokerAuthorizationError(
        f"{address} is a listener for security.protocol={spoken}, and this client uses {protocol}.",
        next_step=f"set security.protocol={spoken}, or set bootstrap.servers to the brokers' {protocol} listener",
        **facts,
    )
