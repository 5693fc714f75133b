"""How a client logs in, as the settings `sasl.*` say: with a password, or with tokens.

The names are those of librdkafka and confluent-kafka. What dualwrite can't do is refused, for every client, before anything is
opened: a mechanism, or a way to get tokens, that only librdkafka's own connections would know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from dualwrite.errors import ConfigurationError
from dualwrite.kafka.client.callback_tokens import CALLBACK, CONFIG, TokenCallback
from dualwrite.kafka.client.msk_iam import MskIam
from dualwrite.kafka.client.tls import TRUE
from dualwrite.kafka.client.token_endpoint import ENDPOINT_NAMES, ClientCredentials
from dualwrite.kafka.client.tokens import Tokens, TokenSource, tokens_of
from dualwrite.settings import misspelt

OAUTHBEARER: Final = "OAUTHBEARER"
MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", OAUTHBEARER)

METHOD: Final = "sasl.oauthbearer.method"
TOKEN_NAMES: Final = frozenset({CALLBACK, CONFIG, METHOD, *ENDPOINT_NAMES})
"""The settings that say where tokens come from."""
_UNSECURED: Final = "enable.sasl.oauthbearer.unsecure.jwt"
_OF_TOKENS: Final = ("sasl.oauthbearer.", "https.")


@dataclass(frozen=True, slots=True)
class PasswordLogin:
    """A SASL login with a password. `repr` does not show it."""

    mechanism: str
    username: str
    password: str = field(repr=False)

    next_step: ClassVar[str] = "check sasl.username and sasl.password"

    @property
    def whose(self) -> str:
        """Completes "the login"."""
        return f"of {self.username!r}"


@dataclass(frozen=True, slots=True)
class TokenLogin:
    """A SASL login with a token (OAUTHBEARER)."""

    tokens: Tokens

    mechanism: ClassVar[str] = OAUTHBEARER
    next_step: ClassVar[str] = (
        "compare the token's issuer and audience with the listener's sasl.oauthbearer.expected.*; the broker's log says more"
    )

    @property
    def whose(self) -> str:
        """Completes "the login"."""
        return f"with a token from {self.tokens.source}"


Login = PasswordLogin | TokenLogin


def login_of(given: Mapping[str, Any]) -> Login | None:
    """The login that the settings describe; None if `security.protocol` is one without SASL.

    Raises:
        ConfigurationError: The mechanism, or the way to get tokens, is not supported; or a setting of the login is missing.
    """
    mechanism = str(given.get("sasl.mechanism", given.get("sasl.mechanisms", ""))).upper()
    has_login = str(given.get("security.protocol", "")).upper().startswith("SASL_")
    if given.get(CALLBACK) is not None and not (has_login and mechanism == OAUTHBEARER):
        raise ConfigurationError(
            f"{CALLBACK} is set, and the client would never call it.",
            next_step="set sasl.mechanism=OAUTHBEARER, and security.protocol=SASL_SSL",
        )
    if not has_login:
        return None
    if mechanism not in MECHANISMS:
        raise ConfigurationError(
            f"Unsupported sasl.mechanism {mechanism!r}{': dualwrite has no Kerberos' if mechanism == 'GSSAPI' else ''}.",
            next_step=f"use one of {', '.join(MECHANISMS)}",
            mechanism=mechanism,
        )
    if mechanism == OAUTHBEARER:
        return TokenLogin(tokens_of(_source(given)))
    username, password = given.get("sasl.username"), given.get("sasl.password")
    if not username or not password:
        raise ConfigurationError(f"SASL {mechanism} requires sasl.username and sasl.password.")
    return PasswordLogin(mechanism, str(username), str(password))


def is_about_tokens(name: str) -> bool:
    """Whether a setting says where tokens come from, so that it is ours, and not librdkafka's."""
    return name.startswith(_OF_TOKENS) or name == CALLBACK


def _source(given: Mapping[str, Any]) -> TokenSource:
    """Where the tokens come from: the callback, or what `sasl.oauthbearer.method` says."""
    if unknown := sorted(name for name in given if is_about_tokens(name) and name not in TOKEN_NAMES):
        raise ConfigurationError(
            f"{unknown[0]} is not supported: dualwrite gets the tokens itself, and has client credentials, {MskIam.METHOD} and "
            f"{CALLBACK}.",
            cause=misspelt(unknown[:1], TOKEN_NAMES),
            next_step=f"use {CALLBACK} for another way to get tokens",
        )
    method = str(given.get(METHOD, "default")).lower()
    callback = given.get(CALLBACK)
    if callback is not None:
        if method != "default":
            raise ConfigurationError(f"{CALLBACK} and {METHOD}={method} are two ways to get tokens.", next_step="remove one")
        return TokenCallback.of(callback, str(given.get(CONFIG, "")))
    if method == "oidc":
        return ClientCredentials.of(given)
    if method == MskIam.METHOD:
        return MskIam.of(given)
    unsecured = f" ({_UNSECURED} is not supported)" if str(given.get(_UNSECURED, "")).lower() in TRUE else ""
    raise ConfigurationError(
        f"SASL OAUTHBEARER has no source of tokens: {METHOD} is {method!r}, and there is no {CALLBACK}{unsecured}.",
        next_step=f"set {CALLBACK}; or {METHOD}=oidc with sasl.oauthbearer.token.endpoint.url, client.id and client.secret; or "
        f"{METHOD}={MskIam.METHOD} with {CONFIG}=region=…",
    )
