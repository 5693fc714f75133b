"""The settings of a client of librdkafka: its log lines go to our logger, and its tokens come from their owner.

librdkafka could get tokens itself (`sasl.oauthbearer.method=oidc`). That is not used: each of its clients would have a token of
its own, its errors would be lines in a log, and a callback and MSK need the other way in any case. confluent-kafka calls
`oauth_cb` in a thread of librdkafka's, so that it needs no `poll`; each client waits for that when it is made, for a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Final

from dualwrite.deadline import Deadline
from dualwrite.errors import MissingDependencyError
from dualwrite.kafka.client.callback_tokens import CALLBACK
from dualwrite.kafka.client.logins import TokenLogin, is_about_tokens, login_of
from dualwrite.kafka.client.tokens import Tokens
from dualwrite.kafka.librdkafka.librdkafka_errors import OwnLines

_FIRST_TOKEN_SECONDS: Final = 10.0
_NEXT_TOKEN_SECONDS: Final = 5.0
_PACKAGE: Final = "confluent-kafka"
_CALLS_WITHOUT_POLL: Final = (2, 13)
"""The first version whose producers, consumers and admin clients all call `oauth_cb` in librdkafka's own thread."""


def client_settings(settings: Mapping[str, Any], **fields: str) -> dict[str, Any]:
    """The settings for a client, with `logger` unless the user has set one; for the fields see OwnLines.

    Raises:
        ConfigurationError: The login is not supported, or a setting of it is missing.
        MissingDependencyError: This version of confluent-kafka is too old for tokens.
        BrokerUnavailableError: There is no token at the moment.
        BrokerAuthorizationError: The source of tokens refuses this client.
    """
    login = login_of(settings)
    made = {"logger": OwnLines(**fields), **settings}
    if not isinstance(login, TokenLogin):
        return made
    if tuple(map(int, version(_PACKAGE).split(".")[:2])) < _CALLS_WITHOUT_POLL:
        raise MissingDependencyError(
            f"SASL OAUTHBEARER needs confluent-kafka 2.13 or newer, and {version(_PACKAGE)} is installed.",
            cause="older versions get no token for an admin client",
            next_step='pip install "confluent-kafka>=2.13"',
        )
    login.tokens.token(Deadline(_FIRST_TOKEN_SECONDS))  # its error says more than librdkafka's, which comes after 10 s
    return {**without_tokens(made), CALLBACK: _TokensForLibrdkafka(login.tokens)}


def without_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without those that say where tokens come from: they are ours, and librdkafka does not know all of them."""
    return {name: value for name, value in settings.items() if not is_about_tokens(name)}


class _TokensForLibrdkafka:
    """`oauth_cb` of a client. After an error, which the owner of the tokens logs, librdkafka calls it again within seconds."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def __call__(self, _: str) -> tuple[str, float, str, dict[str, str]]:
        token = self._tokens.token(Deadline(_NEXT_TOKEN_SECONDS))
        return token.text, token.expires_at, token.principal, dict(token.extensions)
