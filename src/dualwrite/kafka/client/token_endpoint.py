"""Tokens from an OAuth/OIDC token endpoint by client credentials (RFC 6749, section 4.4), with librdkafka's settings.

Own code and not librdkafka's: one token for all connections of a process, which librdkafka's clients don't share.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from dualwrite.deadline import Deadline, Pauses
from dualwrite.errors import BrokerAuthorizationError, BrokerUnavailableError, ConfigurationError
from dualwrite.kafka.client.tls import trust
from dualwrite.kafka.client.tokens import Token

_PREFIX: Final = "sasl.oauthbearer."
_URL: Final = _PREFIX + "token.endpoint.url"
_CLIENT_ID: Final = (_PREFIX + "client.id", _PREFIX + "client.credentials.client.id")
_SECRET: Final = (_PREFIX + "client.secret", _PREFIX + "client.credentials.client.secret")
_GRANT: Final = "client_credentials"
_GRANT_TYPE: Final = _PREFIX + "grant.type"
_SCOPE: Final = _PREFIX + "scope"
_EXTENSIONS: Final = _PREFIX + "extensions"
_CLAIM: Final = _PREFIX + "sub.claim.name"
_CA: Final = ("https.ca.location", "https.ca.pem")
ENDPOINT_NAMES: Final = frozenset({_URL, *_CLIENT_ID, *_SECRET, _GRANT_TYPE, _SCOPE, _EXTENSIONS, _CLAIM, *_CA})
"""The settings of a client of a token endpoint."""

_ATTEMPT: Final = 10.0
"""Seconds that the endpoint may take for each step of one attempt: connecting, or the next part of its answer."""
_ATTEMPTS_SECONDS: Final = 2.0
"""Seconds in which another attempt begins after one that an endpoint did not answer."""
_MOST_BYTES: Final = 1_000_000
_PASSES: Final = (408, 425, 429)
_SERVER_ERRORS: Final = 500
_HIDDEN: Final = "***"
_MOST_TEXT: Final = 300


@dataclass(frozen=True, slots=True)
class ClientCredentials:
    """A client of a token endpoint. `repr` does not show its secret.

    Args:
        url: The token endpoint (`sasl.oauthbearer.token.endpoint.url`).
        client_id: `sasl.oauthbearer.client.id`.
        secret: `sasl.oauthbearer.client.secret`.
        scope: `sasl.oauthbearer.scope`, or empty.
        extensions: `sasl.oauthbearer.extensions`, as pairs.
        principal_claim: The claim that names the principal (`sasl.oauthbearer.sub.claim.name`).
        ca_location: A file or folder of authorities for the endpoint (`https.ca.location`); None: the system's.
        ca_text: Authorities as PEM (`https.ca.pem`), or None.
    """

    url: str = field(repr=False)
    client_id: str
    secret: str = field(repr=False)
    scope: str
    extensions: tuple[tuple[str, str], ...] = field(repr=False)
    principal_claim: str
    ca_location: str | None
    ca_text: str | None = field(repr=False)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """From the settings.

        Raises:
            ConfigurationError: A setting is missing, is not supported, or has a wrong form.
        """
        if given.get(_GRANT_TYPE, _GRANT) != _GRANT:
            raise ConfigurationError(
                f"{_GRANT_TYPE} is {given[_GRANT_TYPE]!r}; dualwrite has {_GRANT} only.", next_step="use a callback: oauth_cb"
            )
        url, client_id, secret = given.get(_URL), _first(given, _CLIENT_ID), _first(given, _SECRET)
        if not url or not client_id or not secret:
            missing = [name for name, value in ((_URL, url), (_CLIENT_ID[0], client_id), (_SECRET[0], secret)) if not value]
            raise ConfigurationError(f"sasl.oauthbearer.method=oidc requires {' and '.join(missing)}.")
        parts = urllib.parse.urlsplit(str(url))
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
            raise ConfigurationError(f"{_URL} must be an http:// or https:// URL with a host, and without a password.")
        pairs = [pair.partition("=") for pair in str(given.get(_EXTENSIONS) or "").split(",") if pair.strip()]
        made = cls(
            url=str(url),
            client_id=str(client_id),
            secret=str(secret),
            scope=str(given.get(_SCOPE) or ""),
            extensions=tuple((name.strip(), value.strip()) for name, _, value in pairs),
            principal_claim=str(given.get(_CLAIM) or "sub"),
            ca_location=given.get(_CA[0]) or None,
            ca_text=given.get(_CA[1]) or None,
        )
        Token("check", 0.0, "", dict(made.extensions))
        if made.ca_location or made.ca_text:
            made._tls()
        return made

    def __str__(self) -> str:
        parts = urllib.parse.urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}{parts.path}"  # a query may contain secrets

    def fetch(self) -> Token:
        """Ask for a token, again for a moment if the endpoint does not answer; see `TokenSource`."""
        pauses, deadline = Pauses(0.2), Deadline(_ATTEMPTS_SECONDS)
        while True:
            try:
                return self._asked()
            except BrokerUnavailableError:
                if not deadline.pause(pauses):
                    raise

    def _asked(self) -> Token:
        asked_at = time.time()
        login = base64.b64encode(f"{self.client_id}:{self.secret}".encode()).decode()
        form = {"grant_type": _GRANT, **({"scope": self.scope} if self.scope else {})}
        request = urllib.request.Request(  # noqa: S310  (http or https, see `of`)
            self.url,
            urllib.parse.urlencode(form).encode(),
            {
                "Accept": "application/json",
                "Authorization": f"Basic {login}",
                "Content-Type": "application/x-www-form-urlencoded",
            },
        )
        opener = urllib.request.build_opener(_NoRedirect, urllib.request.HTTPSHandler(context=self._tls()))
        try:
            with opener.open(request, timeout=_ATTEMPT) as answer:
                body = answer.read(_MOST_BYTES)
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from None  # it contains the request
        except (OSError, http.client.HTTPException) as error:
            raise self._unreached(error) from None
        return self._token(body, asked_at)

    def _tls(self) -> ssl.SSLContext:
        if not self.ca_location and not self.ca_text:
            return ssl.create_default_context()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            trust(context, self.ca_location, self.ca_text)
        except OSError as error:
            raise ConfigurationError(
                f"The authorities of {self} can't be loaded: {error}.", next_step="check https.ca.location or https.ca.pem"
            ) from error
        return context

    def _refusal(self, error: urllib.error.HTTPError) -> BrokerAuthorizationError | BrokerUnavailableError:
        with error:
            try:
                said = json.loads(error.read(_MOST_BYTES))
                text = ": ".join(str(said[name]) for name in ("error", "error_description") if said.get(name))
            except (OSError, ValueError, AttributeError, TypeError, http.client.HTTPException):
                text = ""
        text = text.replace(self.secret, _HIDDEN)[:_MOST_TEXT]
        answer = f"{error.code} {error.reason}" + (f" ({text})" if text else "")
        if error.code >= _SERVER_ERRORS or error.code in _PASSES:
            return BrokerUnavailableError(
                f"The token endpoint {self} has no token at the moment: {answer}.", next_step="retry; check the endpoint"
            )
        return BrokerAuthorizationError(
            f"The token endpoint {self} refuses the client {self.client_id!r}: {answer}.",
            next_step=f"check {_URL}, client.id, client.secret and scope",
        )

    def _unreached(self, error: OSError | http.client.HTTPException) -> BrokerAuthorizationError | BrokerUnavailableError:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, ssl.SSLCertVerificationError):
            return BrokerAuthorizationError(
                f"The certificate of the token endpoint {self} is not trusted: {reason.verify_message}.",
                next_step="check https.ca.location, and that the certificate names the host in the URL",
            )
        return BrokerUnavailableError(
            f"The token endpoint {self} can't be reached: {reason or type(reason).__name__}.",
            next_step=f"check that it runs, and {_URL}; a token that is still valid stays in use",
        )

    def _token(self, body: bytes, asked_at: float) -> Token:
        try:
            said = json.loads(body)
            text = said["access_token"]
            claims = _claims(text)
            ends = [float(claims["exp"])] if "exp" in claims else []
            if said.get("expires_in") is not None:
                ends.append(asked_at + float(said["expires_in"]))
            return Token(text, min(ends), str(claims.get(self.principal_claim, "")), dict(self.extensions))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BrokerAuthorizationError(
                f"The token endpoint {self} answers, but not with an access token that says when it expires.",
                next_step=f"check {_URL}: it must answer as RFC 6749, section 5.1, says",
            ) from None  # it would show the token


def _claims(text: str) -> dict[str, Any]:
    """The claims of a token that is a JWT, not verified, which is the broker's part; empty for another token."""
    _, _, rest = text.partition(".")
    payload = rest.partition(".")[0]
    try:
        found = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _first(given: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((given[name] for name in names if given.get(name)), None)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: it would carry the secret to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None
