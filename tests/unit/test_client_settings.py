"""The settings of librdkafka's clients: which of them are ours, and what happens without a token."""

from __future__ import annotations

import logging
import time
from typing import Any, Final

import pytest

from dualwrite.errors import BrokerUnavailableError, MissingDependencyError
from dualwrite.kafka.client.logins import TokenLogin, login_of
from dualwrite.kafka.librdkafka import client_settings as module
from dualwrite.kafka.librdkafka.client_settings import client_settings

OAUTH: Final = {"bootstrap.servers": "a:1", "security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"}


def test_a_client_gets_its_tokens_from_the_owner_and_none_of_our_settings() -> None:
    calls = []

    def token(config: str) -> tuple[str, float, str, dict[str, str]]:
        calls.append(config)
        return "t0ken", time.time() + 100, "me", {"a": "b"}

    made = [client_settings({**OAUTH, "oauth_cb": token, "sasl.oauthbearer.config": "x", "https.ca.pem": ""}) for _ in range(2)]
    for each in made:
        assert each.keys() == OAUTH.keys() | {"logger", "oauth_cb"}
        assert each["oauth_cb"]("")[0] == "t0ken"
        assert each["oauth_cb"]("")[2:] == ("me", {"a": "b"})
    assert calls == ["x"]


def test_without_a_token_no_client_is_made_and_one_that_exists_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """librdkafka itself would say only that the callback has raised an error, and after ten seconds."""
    fails = [False]

    def token(_: str) -> tuple[str, float]:
        if fails[0]:
            raise OSError("no answer")
        return "t0ken", time.time() + 100

    settings: dict[str, Any] = {**OAUTH, "oauth_cb": token}
    callback = client_settings(settings)["oauth_cb"]
    fails[0] = True
    login = login_of(settings)
    assert isinstance(login, TokenLogin)
    login.tokens._token = None  # as if it had expired
    for _ in range(3):
        with pytest.raises(BrokerUnavailableError, match="oauth_cb raised OSError: no answer"):
            callback("")
    with pytest.raises(BrokerUnavailableError, match="oauth_cb raised OSError: no answer"):
        client_settings(settings)
    own = [record for record in caplog.records if record.name.endswith(".tokens")]  # a thread may log what an earlier test did
    warnings = [record.getMessage() for record in own if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith("no new token from oauth_cb; there is no other: oauth_cb raised OSError: no answer.")


def test_a_confluent_kafka_that_gives_admin_clients_no_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "version", lambda _: "2.12.1")
    with pytest.raises(MissingDependencyError, match=r"needs confluent-kafka 2\.13 or newer, and 2\.12\.1 is installed"):
        client_settings({**OAUTH, "oauth_cb": lambda _: ("t0ken", time.time() + 100)})
    assert "oauth_cb" not in client_settings({"bootstrap.servers": "a:1"})
