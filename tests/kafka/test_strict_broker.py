"""A broker that does not create topics and requires a login: unknown topics, SASL, TLS, and wrong passwords."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import trustme
from kafka.protocol.sasl import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)

import dualwrite
from dualwrite.devcluster import DevCluster
from dualwrite.errors import BrokerAuthorizationError, BrokerError, ConfigurationError
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.librdkafka.librdkafka_producer import LibrdkafkaProducer
from dualwrite.migration import upgrade
from dualwrite.stores.sql import SqlStateStore
from fixtures.broker import make_topic, read_values
from fixtures.logins import LOGIN, LOGINS, settings_for
from fixtures.pace import LIMIT
from fixtures.revocation import revocation_list
from fixtures.wire_server import WireServer

NewName = Callable[[str], str]
NewCoordinator = Callable[..., WireTransactionCoordinator]


@pytest.mark.slow
@pytest.mark.parametrize("how", LOGINS)
def test_a_whole_transaction_over_every_protocol(
    strict_broker: DevCluster, new_coordinator: NewCoordinator, new_name: NewName, how: str
) -> None:
    protocol, login = LOGINS[how]
    config = KafkaConfig.of(settings_for(strict_broker, protocol, **login))
    topic = new_name("topic")
    make_topic(strict_broker, topic)
    coordinator = new_coordinator(config)
    producer = LibrdkafkaProducer(config, new_name("id"), coordinator)
    try:
        producer.init_transactions(timeout=LIMIT)
        producer.begin_transaction()
        producer.send(topic, how)
        state = producer.prepare_transaction(timeout=LIMIT)
        assert state is not None
        assert coordinator.end_transaction(
            producer.kafka_transactional_id, producer_id=state.producer_id, epoch=state.epoch, commit=True
        ).proven
    finally:
        producer.close()
    assert read_values(strict_broker.bootstrap_servers, topic) == [how.encode()]


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
@pytest.mark.parametrize("wrong", [{"sasl.password": "wrong"}, {"sasl.username": "nobody"}])
def test_a_refused_login_is_reported_at_once_by_name_and_without_the_password(
    strict_broker: DevCluster, new_coordinator: NewCoordinator, mechanism: str, wrong: dict[str, str]
) -> None:
    login = {"sasl.mechanism": mechanism, **LOGIN, **wrong}
    config = KafkaConfig.of(settings_for(strict_broker, "SASL_PLAINTEXT", **login))
    coordinator = new_coordinator(config)
    with pytest.raises(BrokerAuthorizationError) as caught:
        coordinator.describe("x")
    text = str(caught.value)
    assert repr(login["sasl.username"]) in text
    assert mechanism in text
    assert "sasl.password" in text
    assert login["sasl.password"] not in text.replace("sasl.password", "")


def test_a_certificate_of_an_unknown_authority_is_reported_at_once(
    strict_broker: DevCluster, new_coordinator: NewCoordinator
) -> None:
    config = KafkaConfig.of({"bootstrap.servers": strict_broker.listeners["SSL"], "security.protocol": "SSL"})
    with pytest.raises(BrokerAuthorizationError, match=r"(?s)not trusted.*ssl\.ca\.location"):
        new_coordinator(config).describe("x")


def test_ssl_ca_location_pins_the_authority_even_if_the_system_trusts_the_broker(
    strict_broker: DevCluster, new_coordinator: NewCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with librdkafka: the system's authorities are used only if neither ssl.ca.location nor ssl.ca.pem is given."""
    settings = settings_for(strict_broker, "SSL")
    monkeypatch.setenv("SSL_CERT_FILE", settings.pop("ssl.ca.location"))  # where OpenSSL finds the system's authorities
    assert new_coordinator(KafkaConfig.of(settings)).describe("no-such-id") is None
    other = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(other)
    for pin in ({"ssl.ca.location": str(other)}, {"ssl.ca.pem": other.read_text()}):
        with pytest.raises(BrokerAuthorizationError, match="not trusted"):
            new_coordinator(KafkaConfig.of({**settings, **pin})).describe("no-such-id")


def test_a_certificate_that_was_revoked_is_not_trusted(
    strict_broker: DevCluster, new_coordinator: NewCoordinator, tmp_path: Path
) -> None:
    authority, files = strict_broker.authority, strict_broker.tls_files  # type: ignore[attr-defined]  # see the fixture
    revocations = tmp_path / "crl.pem"
    config = KafkaConfig.of(settings_for(strict_broker, "SSL", **{"ssl.crl.location": str(revocations)}))
    revocations.write_bytes(revocation_list(authority))
    assert new_coordinator(config).describe("no-such-id") is None
    revocations.write_bytes(revocation_list(authority, files.certificate.read_bytes()))
    again = KafkaConfig.of(settings_for(strict_broker, "SSL", **{"ssl.crl.location": str(revocations)}))
    with pytest.raises(BrokerAuthorizationError, match="not trusted: certificate revoked"):
        new_coordinator(again).describe("no-such-id")


@pytest.mark.parametrize(
    ("name", "value"),
    [("ssl.sigalgs.list", "ECDSA+SHA256"), ("ssl.curves.list", "P-256"), ("ssl.keystore.location", "no-such.p12")],
)
@pytest.mark.parametrize("producer", ["native", "librdkafka"])
def test_an_unsupported_tls_setting_is_refused_before_the_id_is_claimed(
    strict_broker: DevCluster, tmp_path: Path, new_name: NewName, name: str, value: str, producer: Any
) -> None:
    """Although librdkafka supports it, as it does the first two values."""
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'rows.db'}")
    upgrade(engine)
    settings = settings_for(strict_broker, "SSL", **{name: value})
    transactional_id = new_name("id")
    with pytest.raises(ConfigurationError, match=name.replace(".", r"\.")):
        dualwrite.connect(engine, kafka=settings, transactional_id=transactional_id, producer=producer)
    assert SqlStateStore(engine).read(transactional_id) is None
    engine.dispose()


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
def test_a_login_at_a_listener_without_sasl_is_an_error_that_names_security_protocol(
    strict_broker: DevCluster, new_coordinator: NewCoordinator, mechanism: str
) -> None:
    config = KafkaConfig.of(
        {
            "bootstrap.servers": strict_broker.bootstrap_servers,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": mechanism,
            **LOGIN,
        }
    )
    with pytest.raises(
        BrokerAuthorizationError, match=r"(?s)a listener for security\.protocol=PLAINTEXT.*set security\.protocol=PLAINTEXT"
    ):
        new_coordinator(config).describe("x")


def test_a_mechanism_that_the_broker_does_not_offer_is_an_error_that_names_those_it_does(
    new_coordinator: NewCoordinator,
) -> None:
    """The test brokers offer all mechanisms that dualwrite supports, hence a fake answer."""
    refused = lambda _: SaslHandshakeResponse(error_code=33, mechanisms=["GSSAPI", "OAUTHBEARER"])  # noqa: E731
    with WireServer({SaslHandshakeRequest: refused}) as server:
        login = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", **LOGIN}
        config = KafkaConfig.of({"bootstrap.servers": server.bootstrap_servers, **login})
        with pytest.raises(BrokerAuthorizationError, match=r"(?s)offers GSSAPI, OAUTHBEARER.*sasl\.mechanism"):
            new_coordinator(config).describe("x")


def test_a_server_that_does_not_know_the_password_is_no_broker(new_coordinator: NewCoordinator) -> None:
    def impostor(request: Any) -> Any:
        first = bytes(request.auth_bytes).decode()
        nonce = first.rpartition("r=")[2]
        answer = f"r={nonce}more,s=c2FsdA==,i=4096" if first.startswith("n,,") else f"v={base64.b64encode(bytes(32)).decode()}"
        return SaslAuthenticateResponse(error_code=0, auth_bytes=answer.encode(), session_lifetime_ms=0)

    handlers = {SaslHandshakeRequest: lambda _: SaslHandshakeResponse(error_code=0), SaslAuthenticateRequest: impostor}
    with WireServer(handlers) as server:
        login = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "SCRAM-SHA-512", **LOGIN}
        config = KafkaConfig.of({"bootstrap.servers": server.bootstrap_servers, **login})
        with pytest.raises(BrokerAuthorizationError, match=r"(?s)signature is not that of the password.*SASL_SSL"):
            new_coordinator(config).describe("x")
        assert {type(request).__name__ for request in server.requests} <= {
            "ApiVersionsRequest",
            "SaslHandshakeRequest",
            "SaslAuthenticateRequest",
        }


@pytest.mark.slow
def test_the_plain_protocol_at_a_tls_listener_is_an_error_in_time(
    strict_broker: DevCluster, new_coordinator: NewCoordinator
) -> None:
    config = KafkaConfig.of({"bootstrap.servers": strict_broker.listeners["SSL"], "socket.connection.setup.timeout.ms": 500})
    with pytest.raises(BrokerError, match=r"security\.protocol"):
        new_coordinator(config, timeout=1).describe("x")
