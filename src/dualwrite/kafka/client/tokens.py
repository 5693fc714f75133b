"""The tokens of SASL/OAUTHBEARER (KIP-255): one owner for each source of tokens in a process, which all its clients share.

An owner keeps its token, and gets the next one in a thread of its own once 80 % of the token's lifetime have passed, as
librdkafka does. Until the old one has expired, a failure to get the next one is logged, and is no error.
"""

from __future__ import annotations

import _thread
import copy
import math
import re
import time
import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Final, Protocol

from dualwrite import process
from dualwrite.deadline import Deadline
from dualwrite.errors import BrokerUnavailableError, ConfigurationError
from dualwrite.observability.logs import SubjectLogger, if_unexpected

log = SubjectLogger(__name__)

_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")
"""RFC 6750, section 2.1: what a bearer token consists of."""
_EXTENSION: Final = re.compile(r"[A-Za-z]+")
"""RFC 7628, section 3.1: the name of an extension."""
_EXTENSION_VALUE: Final = re.compile(r"[\x21-\x7E \t\r\n]+")
_RESERVED: Final = "auth"

_FRESH_SHARE: Final = 0.8
"""The part of a token's lifetime after which the next one is fetched; librdkafka asks for it then, and not earlier."""
_PATIENCE: Final = 1.0
"""Seconds to wait for the next token while the old one is valid."""
_PAUSE: Final = 1.0
"""Seconds after a failure in which no other attempt is made."""
_WARNING_INTERVAL: Final = 60.0
_SOURCES: Final = 100
"""How many owners are remembered. One that was forgotten works on; its source gets a second one."""

MAX_EXPIRY: Final = 100_000_000_000
"""The year 5138. A time above it is one in milliseconds."""


@dataclass(frozen=True, slots=True)
class Token:
    """A bearer token. `repr` does not show it.

    Args:
        text: The token.
        expires_at: When it expires, in seconds since 1970.
        principal: Whom it is for, if the source says so.
        extensions: What is sent to the broker with it (RFC 7628), by name.

    Raises:
        ConfigurationError: A value is not one that a broker accepts. The message does not contain the token.
    """

    text: str = field(repr=False)
    expires_at: float
    principal: str = ""
    extensions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not _TOKEN.fullmatch(self.text):
            raise ConfigurationError("The token is not a text of the characters that a bearer token may have (RFC 6750).")
        if not isinstance(self.expires_at, int | float) or not math.isfinite(self.expires_at):
            raise ConfigurationError("The time at which the token expires is not a number of seconds since 1970.")
        if self.expires_at > MAX_EXPIRY:
            raise ConfigurationError(
                f"The token expires at {self.expires_at:.0f}, which is not in seconds since 1970.",
                cause="it is in milliseconds",
                next_step="divide it by 1000",
            )
        for name, value in self.extensions.items():
            if not _EXTENSION.fullmatch(str(name)) or name == _RESERVED or not _EXTENSION_VALUE.fullmatch(str(value)):
                raise ConfigurationError(
                    f"The token's extension {name!r} has a name or a value that RFC 7628 does not allow.",
                    next_step=f"use letters in its name, which must not be {_RESERVED!r}, and printable ASCII in its value",
                )

    @property
    def seconds_left(self) -> float:
        """For how long it is still valid; 0 or less: it has expired."""
        return self.expires_at - time.time()


class TokenSource(Hashable, Protocol):
    """Where tokens come from. Sources that are equal share one owner. `str` names it, in messages, without its secrets."""

    def fetch(self) -> Token:
        """A new token.

        Raises:
            BrokerUnavailableError: There is none at the moment; retry.
            BrokerAuthorizationError: The source answers, and gives none.
            ConfigurationError: What it gives is no token.
        """


class Tokens:
    """The owner of the tokens of one source. Thread-safe; a forked child goes on with the parent's token."""

    def __init__(self, source: TokenSource) -> None:
        self.source: Final = source
        self._token: Token | None = None
        self._fetched_at = self._due_at = 0.0
        self._warned_at = -math.inf
        self._last: _Fetch | None = None
        self.begin_again()
        _owners.add(self)

    def begin_again(self) -> None:
        """In a forked child: the thread that fetches, and perhaps holds the lock, is the parent's."""
        self._lock = _thread.allocate_lock()
        self._last = None

    def token(self, deadline: Deadline) -> Token:
        """A token that has not expired.

        Raises:
            BrokerUnavailableError: There is none by the deadline, or the source has none at the moment.
            BrokerAuthorizationError: The source gives none.
            ConfigurationError: As for `TokenSource.fetch`.
        """
        with self._lock:
            held = self._valid
            if held is not None and time.time() < self._due_at:
                return held
            fetch = self._last
            if fetch is None or fetch.may_be_repeated:
                fetch = self._last = _Fetch(self)
        is_done = fetch.wait(min(deadline.left, _PATIENCE) if held else deadline.left)
        with self._lock:
            found = self._valid
        if found is not None:
            return found
        if is_done and fetch.error is not None:
            raise copy.copy(fetch.error) from fetch.error.__cause__  # a copy: several threads raise it
        late = "has expired" if is_done else f"did not come within {deadline.seconds:.3g} s"
        raise BrokerUnavailableError(f"The token from {self.source} {late}.", next_step="retry; check that its source answers")

    def refused(self, token: Token) -> None:
        """A broker has refused this token: the next login gets a new one, unless this one is new."""
        with self._lock:
            if token is self._token and time.monotonic() - self._fetched_at > _PAUSE:
                self._token = None

    @property
    def _valid(self) -> Token | None:
        return self._token if self._token is not None and self._token.seconds_left > 0 else None

    def fetched(self, token: Token) -> None:
        """Keep a new token. Called by the thread that has fetched it.

        Raises:
            BrokerUnavailableError: It has expired already.
        """
        lifetime = token.seconds_left
        if lifetime <= 0:
            raise BrokerUnavailableError(
                f"The token from {self.source} expired {-lifetime:.0f} s ago.",
                cause="its source gives old tokens, or this machine's clock is ahead",
                next_step="check the source and the clock",
            )
        with self._lock:
            self._token, self._fetched_at = token, time.monotonic()
            self._due_at = time.time() + _FRESH_SHARE * lifetime
        log.debug("a new token from %s, which expires in %.0f s", self.source, lifetime)

    def failed(self, error: BaseException) -> None:
        """Warn, once a minute: the old token hides the failure, and later a client may only see that no connection opens."""
        with self._lock:
            held, now = self._valid, time.monotonic()
            if now - self._warned_at < _WARNING_INTERVAL:
                return
            self._warned_at = now
        left = "there is no other" if held is None else f"the old one is valid for another {held.seconds_left:.0f} s"
        log.warning("no new token from %s; %s: %s", self.source, left, error, exc_info=if_unexpected(error))


class _Fetch:
    """One attempt to get a token, in a thread of its own: a callback or a name server may take longer than a caller can wait.

    As for `ConnectionAttempt`, `_thread` is used, since an interrupt in `threading.Thread.start` leaves a lock behind.
    """

    def __init__(self, owner: Tokens) -> None:
        self._owner = owner
        self.error: BaseException | None = None
        self._failed_at = -math.inf
        self._is_done = False
        self._running = _thread.allocate_lock()
        self._running.acquire()
        _thread.start_new_thread(self._run, ())

    @property
    def may_be_repeated(self) -> bool:
        """Whether it has ended, and a failure was not just now."""
        return self._is_done and time.monotonic() - self._failed_at > _PAUSE

    def wait(self, seconds: float) -> bool:
        """Wait for at most `seconds`; whether it has ended."""
        if not self._is_done and self._running.acquire(timeout=max(seconds, 0.0)):
            self._running.release()
        return self._is_done

    def _run(self) -> None:
        try:
            self._owner.fetched(self._owner.source.fetch())
        except BaseException as error:  # noqa: BLE001  (raised again in the threads that need a token)
            self.error, self._failed_at = error, time.monotonic()
        finally:
            self._is_done = True
            self._running.release()
        if self.error is not None:
            self._owner.failed(self.error)


_owners: weakref.WeakSet[Tokens] = weakref.WeakSet()
_lock = _thread.allocate_lock()


def tokens_of(source: TokenSource) -> Tokens:
    """The owner of the tokens of a source: the same one for sources that are equal."""
    with _lock:
        return _owner_of(source)


@lru_cache(maxsize=_SOURCES)
def _owner_of(source: TokenSource) -> Tokens:
    return Tokens(source)


def _begin_again() -> None:
    global _lock  # noqa: PLW0603  (another thread of the parent may have held it)
    _lock = _thread.allocate_lock()
    for owner in list(_owners):
        owner.begin_again()


process.call_in_child(_begin_again)
