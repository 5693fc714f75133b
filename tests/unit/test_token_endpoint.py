"""Client credentials at a token endpoint: what is asked, what is taken for a token, what each failure is called."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from dualwrite.errors import BrokerAuthorizationError, BrokerUnavailableError, ConfigurationError
from dualwrite.kafka.client import token_endpoint
from dualwrite.kafka.client.token_endpoint import ClientCredentials
from fixtures.tables import table
from fixtures.token_server import CLIENT_ID, CLIENT_SECRET, TokenServer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[TokenServer]:
    monkeypatch.setattr(token_endpoint, "_ATTEMPTS_SECONDS", 0.0)
    with TokenServer() as started:
        yield started


def client(server: TokenServer, **more: str) -> ClientCredentials:
    given = server.settings(**{name.replace("__", "."): value for name, value in more.items()})
    return ClientCredentials.of(given)


def test_a_token_has_its_expiry_principal_and_extensions(server: TokenServer) -> None:
    token = client(
        server, sasl__oauthbearer__scope="read write", sasl__oauthbearer__extensions="a=b, logicalCluster=lkc-1"
    ).fetch()
    assert token.text == server.issued[0]
    assert time.time() < token.expires_at <= time.time() + server.lifetime
    assert token.principal == CLIENT_ID
    assert token.extensions == {"a": "b", "logicalCluster": "lkc-1"}
    assert server.forms == [{"grant_type": ["client_credentials"], "scope": ["read write"]}]


def test_a_token_that_is_no_jwt_expires_when_the_endpoint_says(server: TokenServer) -> None:
    server.failure = (200, json.dumps({"access_token": "opaque", "expires_in": 60}))
    assert client(server).fetch().seconds_left == pytest.approx(60, abs=30)


@table(
    ("status", "body", "kind", "says"),
    [
        (401, '{"error": "invalid_client"}', BrokerAuthorizationError, "refuses the client 'shop': 401 Unauthorized (inv"),
        (400, '{"error": "x", "error_description": "SECRET"}', BrokerAuthorizationError, "(x: ***)"),
        (404, "<html>", BrokerAuthorizationError, "404 Not Found."),
        (302, "", BrokerAuthorizationError, "302 Found."),
        (503, "", BrokerUnavailableError, "has no token at the moment: 503"),
        (429, "", BrokerUnavailableError, "429"),
        (200, "<html>", BrokerAuthorizationError, "not with an access token that says when it expires"),
        (200, '["x"]', BrokerAuthorizationError, "not with an access token"),
        (200, '{"access_token": 5, "expires_in": 9}', BrokerAuthorizationError, "not with an access token"),
        (200, '{"access_token": "opaque"}', BrokerAuthorizationError, "says when it expires"),
        (200, '{"access_token": "a b", "expires_in": 9}', BrokerAuthorizationError, "not with an access token"),
    ],
)
def test_each_answer_without_a_token(server: TokenServer, status: int, body: str, kind: type[Exception], says: str) -> None:
    server.failure = (status, body.replace("SECRET", CLIENT_SECRET))
    with pytest.raises(kind) as caught:
        client(server).fetch()
    assert says in str(caught.value)
    assert server.url in str(caught.value)
    assert CLIENT_SECRET not in f"{caught.value!r}{caught.value}"


def test_a_server_that_answers_after_a_moment_is_asked_again(server: TokenServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_endpoint, "_ATTEMPTS_SECONDS", 30.0)
    answer, answers = server.answer, iter([(503, ""), (502, "")])
    monkeypatch.setattr(server, "answer", lambda *given: next(answers, None) or answer(*given))
    assert client(server).fetch().text == server.issued[0]


def test_an_endpoint_with_tls_must_be_trusted(server: TokenServer, tmp_path: Path) -> None:
    authority, other = trustme.CA(), trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    server.use_tls(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    assert client(server, https__ca__location=str(tmp_path / "ca.pem")).fetch().text == server.issued[0]
    assert client(server, https__ca__pem=authority.cert_pem.bytes().decode()).fetch().text == server.issued[1]
    for given in ({}, {"https__ca__pem": other.cert_pem.bytes().decode()}):
        with pytest.raises(BrokerAuthorizationError, match=r"certificate of the token endpoint https://127\S* is not trusted"):
            client(server, **given).fetch()


@table(
    ("given", "says"),
    [
        ({"token.endpoint.url": ""}, "requires sasl.oauthbearer.token.endpoint.url."),
        ({"client.id": "", "client.secret": ""}, "requires sasl.oauthbearer.client.id and sasl.oauthbearer.client.secret."),
        ({"token.endpoint.url": "file:///etc/passwd"}, "must be an http:// or https:// URL"),
        ({"token.endpoint.url": "https://me:s3cret@idp.example/token"}, "without a password"),
        ({"extensions": "auth=x"}, "extension 'auth'"),
        ({"grant.type": "password"}, "dualwrite has client_credentials only"),
    ],
)
def test_settings_that_are_refused(server: TokenServer, given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ClientCredentials.of(server.settings(**{f"sasl.oauthbearer.{name}": value for name, value in given.items()}))
    assert says in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_librdkafkas_other_names_of_client_id_and_secret(server: TokenServer) -> None:
    given = server.settings()
    for name in ("id", "secret"):
        given[f"sasl.oauthbearer.client.credentials.client.{name}"] = given.pop(f"sasl.oauthbearer.client.{name}")
    made = ClientCredentials.of(given)
    assert made.fetch().text == server.issued[0]
    assert CLIENT_SECRET not in repr(made) + str(made)
