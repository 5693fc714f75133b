"""The owner of tokens: one token for all who ask, the next one in time, and what happens when a source fails."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dualwrite.deadline import Deadline
from dualwrite.errors import BrokerUnavailableError, ConfigurationError
from dualwrite.kafka.client import tokens
from dualwrite.kafka.client.authentication import oauthbearer
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.logins import TokenLogin
from dualwrite.kafka.client.messages_generated import SaslAuthenticateRequest
from dualwrite.kafka.client.tokens import Token, Tokens, tokens_of
from fixtures.pace import LIMIT, limit
from fixtures.tables import table

Fetch = Callable[[], Token]


class Source:
    """Gives what it is told to; each has an owner of its own."""

    def __init__(self) -> None:
        self.calls = 0
        self.lifetime = 100.0
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def __str__(self) -> str:
        return "a source"

    def fetch(self) -> Token:
        self.calls += 1
        self.gate.wait(LIMIT)
        if self.error is not None:
            raise self.error
        return Token(f"t0ken.{self.calls}", tokens.time.time() + self.lifetime)


class Clock:
    """Both clocks of the owner, which stand still."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def time(self) -> float:
        return self.now

    monotonic = time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(tokens, "time", made)
    return made


@pytest.fixture
def source() -> Iterator[Source]:
    made = Source()
    yield made
    made.gate.set()


def text(owner: Tokens) -> str:
    return owner.token(Deadline(LIMIT)).text


def settled(owner: Tokens) -> str:
    """What the owner gives once the attempt that it has begun has ended."""
    text(owner)
    assert owner._last is not None
    owner._last.wait(LIMIT)
    return text(owner)


def test_threads_that_ask_at_once_share_one_token(source: Source) -> None:
    owner, found = Tokens(source), list[str]()
    source.gate.clear()
    threads = [threading.Thread(target=lambda: found.append(text(owner))) for _ in range(8)]
    for thread in threads:
        thread.start()
    source.gate.set()
    for thread in threads:
        thread.join()
    assert set(found) == {"t0ken.1"}
    assert source.calls == 1


def test_the_next_token_is_fetched_after_four_fifths_of_the_lifetime(source: Source, clock: Clock) -> None:
    owner = Tokens(source)
    assert text(owner) == "t0ken.1"
    clock.now += 79
    assert settled(owner) == "t0ken.1"
    clock.now += 2
    assert settled(owner) == "t0ken.2"


def test_a_failure_while_the_old_token_is_valid_is_no_error(
    source: Source, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    owner = Tokens(source)
    assert text(owner) == "t0ken.1"
    source.error = BrokerUnavailableError("The source is down.")
    for _ in range(3):  # an attempt in a few seconds, a warning in a minute
        clock.now += 85 if source.calls == 1 else 2
        assert settled(owner) == "t0ken.1"
    assert source.calls == 4
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage() for record in warnings] == [
        "no new token from a source; the old one is valid for another 15 s: The source is down."
    ]
    clock.now += 20
    with pytest.raises(BrokerUnavailableError, match="The source is down"):
        text(owner)
    source.error = None
    clock.now += 2
    assert text(owner) == "t0ken.6"


def test_a_source_that_has_just_failed_is_not_asked_by_everyone(source: Source, clock: Clock) -> None:
    owner = Tokens(source)
    source.error = BrokerUnavailableError("The source is down.")
    for _ in range(5):
        with pytest.raises(BrokerUnavailableError, match="The source is down"):
            text(owner)
    assert source.calls == 1


def test_a_source_that_hangs_holds_nobody_beyond_the_deadline(source: Source) -> None:
    owner = Tokens(source)
    source.gate.clear()
    with pytest.raises(BrokerUnavailableError, match=r"from a source did not come within 0\.05 s"):
        owner.token(Deadline(0.05))


def test_a_token_that_a_broker_has_refused_is_replaced_unless_it_is_new(source: Source, clock: Clock) -> None:
    owner = Tokens(source)
    owner.refused(owner.token(Deadline(LIMIT)))
    assert text(owner) == "t0ken.1"
    clock.now += 5
    owner.refused(owner.token(Deadline(LIMIT)))
    assert text(owner) == "t0ken.2"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_has_the_token_and_can_get_the_next(source: Source) -> None:
    owner = Tokens(source)
    assert text(owner) == "t0ken.1"
    other = Tokens(Source())
    other.source.gate.clear()  # type: ignore[attr-defined]
    with pytest.raises(BrokerUnavailableError):  # its thread is the parent's
        other.token(Deadline(0.01))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            other.source.gate.set()  # type: ignore[attr-defined]
            found = text(owner), other.token(Deadline(limit(5))).text
            code = 0 if found == ("t0ken.1", "t0ken.2") else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    other.source.gate.set()  # type: ignore[attr-defined]


# --- which settings share an owner --------------------------------------------------------------------------------------------

OAUTH = {"bootstrap.servers": "a:1", "security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"}


def owner_of(**settings: Any) -> Tokens:
    login = KafkaConfig.of({**OAUTH, **{name.replace("__", "."): value for name, value in settings.items()}}).sasl
    assert isinstance(login, TokenLogin)
    return login.tokens


def test_equal_settings_share_an_owner() -> None:
    one, other = (lambda _: ("a", 2e9)), (lambda _: ("b", 2e9))
    assert owner_of(oauth_cb=one) is owner_of(oauth_cb=one, client__id="another")
    assert owner_of(oauth_cb=one) is not owner_of(oauth_cb=other)
    assert owner_of(oauth_cb=one) is not owner_of(oauth_cb=one, sasl__oauthbearer__config="x")
    source = Source()
    assert tokens_of(source) is tokens_of(source)


# --- what a callback returns --------------------------------------------------------------------------------------------------


@table(
    ("returned", "says"),
    [
        ("t0ken", "oauth_cb has returned a str"),
        (("t0ken",), "oauth_cb has returned a tuple"),
        (("t0ken", 2e9, "me", {}, 1), "oauth_cb has returned a tuple"),
        (("t0ken with spaces", 2e9), "not a text of the characters"),
        ((b"t0ken", 2e9), "not a text of the characters"),
        (("t0ken", "soon"), "not a number of seconds"),
        (("t0ken", 2e12), "in milliseconds"),
        (("t0ken", 2e9, None), "a principal or extensions of a wrong type"),
        (("t0ken", 2e9, "me", {"auth": "x"}), "extension 'auth'"),
        (("t0ken", 2e9, "me", {"a-b": "x"}), "extension 'a-b'"),
        (("t0ken", 2e9, "me", {"a": "x\1"}), "extension 'a'"),
    ],
)
def test_what_is_no_token_is_an_error_that_does_not_show_it(returned: Any, says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        owner_of(oauth_cb=lambda _: returned).token(Deadline(LIMIT))
    assert says in str(caught.value)
    assert "t0ken" not in f"{caught.value!r}{caught.value}"


async def coroutine(_: str) -> tuple[str, float]:
    return "t0ken", 2e9


@table(
    ("settings", "says"),
    [
        ({}, "SASL OAUTHBEARER has no source of tokens"),
        ({"oauth_cb": "module.function"}, "oauth_cb must be a function, not str"),
        ({"oauth_cb": coroutine}, "oauth_cb is a coroutine function"),
        ({"oauth_cb": print, "sasl__oauthbearer__method": "oidc"}, "two ways to get tokens"),
        ({"sasl__oauthbearer__method": "oidc"}, "requires sasl.oauthbearer.token.endpoint.url and"),
        ({"sasl__oauthbearer__method": "azure"}, "sasl.oauthbearer.method is 'azure'"),
        ({"enable__sasl__oauthbearer__unsecure__jwt": "true"}, "unsecure.jwt is not supported"),
        ({"sasl__oauthbearer__assertion__file": "x"}, "sasl.oauthbearer.assertion.file is not supported"),
        ({"sasl__oauthbearer__metod": "oidc"}, "'sasl.oauthbearer.method' is"),
        ({"oauth_cb": print, "sasl__mechanism": "PLAIN"}, "oauth_cb is set, and the client would never call it"),
        ({"oauth_cb": print, "security__protocol": "SSL"}, "oauth_cb is set, and the client would never call it"),
    ],
)
def test_settings_that_lead_to_no_token_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        owner_of(**settings)
    assert says in str(caught.value)


# --- the exchange -------------------------------------------------------------------------------------------------------------


def test_the_messages_are_those_of_rfc_7628() -> None:
    messages = oauthbearer(Token("vF9dft4qmT", 2e9, "me", {"host": "server.example.com", "port": "143"}))
    assert next(messages) == b"n,,\x01auth=Bearer vF9dft4qmT\x01host=server.example.com\x01port=143\x01\x01"
    assert messages.send(b'{"status":"invalid_token"}') == b"\x01"
    assert next(oauthbearer(Token("a", 2e9))) == b"n,,\x01auth=Bearer a\x01\x01"


def test_no_repr_shows_a_token() -> None:
    token = Token("t0ken", time.time() + 9, "me", {"key": "s3cret"})
    assert "t0ken" not in repr(token)
    assert "s3cret" not in repr(token)
    assert "t0ken" not in repr(SaslAuthenticateRequest(auth_bytes=next(oauthbearer(token))))
