"""Tokens from a function of the user: `oauth_cb` in confluent-kafka's form."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Final, Self

from dualwrite.errors import BrokerUnavailableError, ConfigurationError
from dualwrite.kafka.client.tokens import Token

CALLBACK: Final = "oauth_cb"
CONFIG: Final = "sasl.oauthbearer.config"
_HIDDEN: Final = "***"
_FORM: Final = "return (token, when it expires in seconds since 1970[, principal[, extensions]])"
_LEAST: Final = 2
_MOST: Final = 4


@dataclass(frozen=True, slots=True)
class TokenCallback:
    """Calls `oauth_cb` with the value of `sasl.oauthbearer.config`, in a thread of its own, one call at a time.

    Args:
        function: The callback. It returns the token, when it expires (seconds since 1970), and, if needed, the principal and
            a dict of extensions.
        argument: The value of `sasl.oauthbearer.config`; messages don't contain it.
        same_as: What callbacks that are equal have in common.
    """

    function: Callable[[str], Any] = field(compare=False)
    argument: str = field(repr=False)
    same_as: Hashable = field(repr=False)

    @classmethod
    def of(cls, function: Any, argument: str) -> Self:
        """The source for a callback.

        Raises:
            ConfigurationError: It can't be called, or is a coroutine function.
        """
        if isinstance(function, str) or not callable(function):
            raise ConfigurationError(
                f"{CALLBACK} must be a function, not {type(function).__name__}.",
                next_step="where settings are texts, use sasl.oauthbearer.method=oidc or msk-iam",
            )
        if inspect.iscoroutinefunction(function):
            raise ConfigurationError(
                f"{CALLBACK} is a coroutine function.",
                cause="it is called in threads, which have no event loop",
                next_step="use a function that blocks until it has the token; it does not block the loop",
            )
        return cls(function, argument, function if isinstance(function, Hashable) else id(function))

    def __str__(self) -> str:
        return CALLBACK

    def fetch(self) -> Token:
        """Call it; see `TokenSource`."""
        try:
            returned = self.function(self.argument)
        except Exception as error:
            text = str(error)
            if self.argument:
                text = text.replace(self.argument, _HIDDEN)
            raise BrokerUnavailableError(
                f"{CALLBACK} raised {type(error).__name__}: {text}.",
                next_step="see the traceback of the callback; the client calls it again",
            ) from error
        if not isinstance(returned, tuple) or not _LEAST <= len(returned) <= _MOST:
            raise ConfigurationError(f"{CALLBACK} has returned a {type(returned).__name__}.", next_step=_FORM)
        omitted: tuple[Any, ...] = ("", {})[len(returned) - _LEAST :]
        text, expires_at, principal, extensions = (*returned, *omitted)
        if not isinstance(principal, str) or not isinstance(extensions, dict):
            raise ConfigurationError(f"{CALLBACK} has returned a principal or extensions of a wrong type.", next_step=_FORM)
        return Token(text, expires_at, principal, extensions)
