"""Kafka settings with librdkafka's names: what is accepted, what is rejected, what is derived."""

from __future__ import annotations

import pickle
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.errors import ConfigurationError
from dualwrite.kafka.client.config import Address, KafkaConfig, parse_addresses
from fixtures.revocation import revocation_list
from fixtures.tables import table

SERVERS = {"bootstrap.servers": "localhost:9092"}
LOGIN = {"sasl.mechanism": "PLAIN", "sasl.username": "me", "sasl.password": "s3cret"}


# --- addresses --------------------------------------------------------------------------------------------------------


@table(
    ("text", "expected"),
    [
        ("localhost:9092", [("localhost", 9092)]),
        ("localhost", [("localhost", 9092)]),
        ("a:1,b:65535", [("a", 1), ("b", 65535)]),
        (" a:1 , b:2 ,", [("a", 1), ("b", 2)]),
        ("SASL_SSL://broker.example:9094", [("broker.example", 9094)]),
        ("PLAINTEXT://a:1,b", [("a", 1), ("b", 9092)]),
        ("[::1]:9093", [("::1", 9093)]),
        ("[2001:db8::5]", [("2001:db8::5", 9092)]),
        ("SSL://[::1]:9093", [("::1", 9093)]),
        ("127.0.0.1:19092", [("127.0.0.1", 19092)]),
    ],
)
def test_server_addresses_are_parsed(text: str, expected: list[tuple[str, int]]) -> None:
    assert parse_addresses(text) == tuple(Address(host, port) for host, port in expected)


@table("text", ["", "   ", None, 9092, b"a:1", ["a:1"]])
def test_no_address_is_an_error_that_names_setting_and_variable(text: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)bootstrap\.servers.*DUALWRITE_KAFKA_BOOTSTRAP_SERVERS"):
        parse_addresses(text)


@pytest.mark.parametrize("text", [",", " , ,"])
def test_separators_alone_are_not_an_address(text: str) -> None:
    with pytest.raises(ConfigurationError):
        parse_addresses(text)


@table(
    "text",
    [
        ":9092",
        "a:b",
        "a:-1",
        "::1",
        "2001:db8::5:9092",
        "[::1",
        "[]:9092",
        "[::1]x:9092",
        "[::1]9092",
        "a:1:2",
        "a:0",
        "a:65536",
    ],
)
def test_an_invalid_address_is_named(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_addresses(f"good:1,{text}")
    assert repr(text) in str(caught.value)


@given(st.from_regex(r"[a-z0-9.-]{1,20}|[0-9a-f:]{2,10}:[0-9a-f]{1,4}", fullmatch=True), st.integers(1, 65535))
def test_an_address_survives_a_round_trip(host: str, port: int) -> None:
    address = Address(host, port)
    assert parse_addresses(str(address)) == (address,)


# --- accepted settings ------------------------------------------------------------------------------------------------


def test_a_string_is_taken_as_bootstrap_servers() -> None:
    config = KafkaConfig.of("one:1,two:2")
    assert config.servers == "one:1,two:2"
    assert config.protocol == "PLAINTEXT"
    assert config.sasl is None
    assert config.tls() is None


def test_a_config_is_returned_unchanged() -> None:
    config = KafkaConfig.of("a:1")
    assert KafkaConfig.of(config) is config


def test_settings_and_their_defaults() -> None:
    plain = KafkaConfig.of(SERVERS)
    assert (plain.client_id, plain.socket_timeout, plain.connect_timeout) == ("dualwrite", 30.0, 10.0)
    assert plain.transaction_timeout_ms is None
    given_all = KafkaConfig.of(
        {
            **SERVERS,
            "client.id": "me",
            "socket.timeout.ms": "1500",
            "socket.connection.setup.timeout.ms": 2500,
            "transaction.timeout.ms": "60000",
        }
    )
    assert (given_all.client_id, given_all.socket_timeout, given_all.connect_timeout) == ("me", 1.5, 2.5)
    assert given_all.transaction_timeout_ms == 60_000


def test_the_alias_of_librdkafka_for_the_servers_is_accepted() -> None:
    assert KafkaConfig.of({"metadata.broker.list": "a:1"}).servers == "a:1"


@table("protocol", ["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL", "sasl_ssl", "Plaintext"])
def test_settings_of_every_protocol(protocol: str) -> None:
    config = KafkaConfig.of({**SERVERS, **LOGIN, "security.protocol": protocol})
    assert config.protocol == protocol.upper()
    assert (config.sasl is not None) == config.protocol.startswith("SASL")
    assert (config.tls() is not None) == config.protocol.endswith("SSL")


@table("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "scram-sha-512"])
@table("name", ["sasl.mechanism", "sasl.mechanisms"])
def test_every_mechanism_is_known_by_both_names_of_the_setting(name: str, mechanism: str) -> None:
    login = {name: mechanism, "sasl.username": "me", "sasl.password": "s3cret"}
    sasl = KafkaConfig.of({**SERVERS, "security.protocol": "SASL_PLAINTEXT", **login}).sasl
    assert sasl is not None
    assert (sasl.mechanism, sasl.username, sasl.password) == (mechanism.upper(), "me", "s3cret")


def test_the_password_is_not_shown() -> None:
    config = KafkaConfig.of({**SERVERS, **LOGIN, "security.protocol": "SASL_PLAINTEXT"})
    assert "s3cret" not in repr(config)
    assert "s3cret" not in repr(config.sasl)


# --- rejected settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [None, 5, ["a:1"], b"a:1"])
def test_settings_are_a_dict_or_a_string(settings: Any) -> None:
    with pytest.raises(ConfigurationError, match="dict with librdkafka's names"):
        KafkaConfig.of(settings)


@table(
    ("settings", "named"),
    [
        ({}, r"No Kafka servers"),
        ({**SERVERS, "security.protocol": "TLS"}, r"(?s)Invalid security\.protocol 'TLS'.*one of PLAINTEXT, SSL"),
        ({**SERVERS, "security.protocol": "SASL_SSL"}, r"(?s)Unsupported sasl\.mechanism ''.*PLAIN, SCRAM-SHA-256"),
        (
            {**SERVERS, **LOGIN, "security.protocol": "SASL_SSL", "sasl.mechanism": "GSSAPI"},
            r"Unsupported sasl\.mechanism 'GSSAPI'",
        ),
        (
            {**SERVERS, "security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN"},
            r"requires sasl\.username and sasl\.password",
        ),
        ({**SERVERS, **LOGIN, "security.protocol": "SASL_SSL", "sasl.password": ""}, r"requires sasl\.username"),
        ({**SERVERS, "socket.timeout.ms": "soon"}, r"socket\.timeout\.ms is 'soon'"),
        ({**SERVERS, "socket.timeout.ms": None}, r"socket\.timeout\.ms is None"),
        ({**SERVERS, "socket.timeout.ms": 0}, r"socket\.timeout\.ms is 0"),
        ({**SERVERS, "transaction.timeout.ms": -5}, r"transaction\.timeout\.ms is -5"),
        ({**SERVERS, "transaction.timeout.ms": 0}, r"transaction\.timeout\.ms is 0"),
        ({**SERVERS, "transactional.id": "x"}, r"(?s)transactional\.id is set in the Kafka settings.*transactional_id"),
        ({**SERVERS, "acks": 1}, r"acks is 1; transactions require 'all'"),
        ({**SERVERS, "request.required.acks": "0"}, r"request\.required\.acks is '0'"),
        ({**SERVERS, "enable.idempotence": False}, r"(?s)enable\.idempotence is False.*true"),
        ({**SERVERS, "enable.idempotence": "false"}, r"enable\.idempotence is 'false'"),
        ({**SERVERS, "delivery.report.only.error": True}, r"(?s)delivery\.report\.only\.error is True.*false"),
    ],
)
def test_each_bad_setting_has_its_own_error(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        KafkaConfig.of(settings)


@table(
    "settings",
    [
        {"acks": "all"},
        {"acks": -1},
        {"acks": "-1"},
        {"enable.idempotence": True},
        {"enable.idempotence": "true"},
        {"delivery.report.only.error": "false"},
    ],
)
def test_settings_that_the_recipe_requires_may_be_given(settings: dict[str, Any]) -> None:
    assert KafkaConfig.of({**SERVERS, **settings}).servers == "localhost:9092"


# --- TLS --------------------------------------------------------------------------------------------------------------


class Authority:
    """An authority and a certificate that it signed, as files."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        certificate = self.authority.issue_cert("localhost")
        self.ca = folder / "ca.pem"
        self.certificate = folder / "certificate.pem"
        self.key = folder / "key.pem"
        self.authority.cert_pem.write_to_path(self.ca)
        certificate.cert_chain_pems[0].write_to_path(self.certificate)
        certificate.private_key_pem.write_to_path(self.key)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


def context(**settings: Any) -> ssl.SSLContext:
    given_settings = {name.replace("_", "."): value for name, value in settings.items()}
    made = KafkaConfig.of({**SERVERS, "security.protocol": "SSL", **given_settings}).tls()
    assert made is not None
    return made


def subjects(made: ssl.SSLContext) -> list[Any]:
    return [ca["subject"] for ca in made.get_ca_certs()]


def test_by_default_certificate_and_host_are_verified() -> None:
    made = context()
    assert made.verify_mode is ssl.CERT_REQUIRED
    assert made.check_hostname


def test_with_a_ca_file_only_that_authority_is_trusted(authority: Authority) -> None:
    assert len(subjects(context(ssl_ca_location=str(authority.ca)))) == 1


def test_with_a_ca_as_pem_only_that_authority_is_trusted(authority: Authority) -> None:
    assert len(subjects(context(ssl_ca_pem=authority.ca.read_text()))) == 1


def test_a_configuration_has_one_tls_context() -> None:
    config = KafkaConfig.of({**SERVERS, "security.protocol": "SSL"})
    assert config.tls() is config.tls()


def test_a_folder_of_authorities_is_accepted(authority: Authority) -> None:
    assert context(ssl_ca_location=str(authority.ca.parent)).verify_mode is ssl.CERT_REQUIRED


def test_probe_means_the_authorities_of_the_system() -> None:
    assert len(subjects(context(ssl_ca_location="probe"))) == len(subjects(context()))


def test_the_client_certificate_is_read_from_files_and_from_pem(authority: Authority) -> None:
    context(ssl_certificate_location=str(authority.certificate), ssl_key_location=str(authority.key))
    context(ssl_certificate_pem=authority.certificate.read_text(), ssl_key_pem=authority.key.read_text())
    context(ssl_certificate_location=str(authority.certificate), ssl_key_pem=authority.key.read_text())
    context(ssl_certificate_pem=authority.certificate.read_text(), ssl_key_location=str(authority.key))


def test_verification_can_be_turned_off_by_both_settings_of_librdkafka() -> None:
    host_only = context(ssl_endpoint_identification_algorithm="none")
    assert not host_only.check_hostname
    assert host_only.verify_mode is ssl.CERT_REQUIRED
    nothing = context(enable_ssl_certificate_verification="false")
    assert not nothing.check_hostname
    assert nothing.verify_mode is ssl.CERT_NONE


@pytest.mark.parametrize("name", ["ssl_ca_location", "ssl_certificate_location"])
def test_a_missing_file_is_an_error_that_names_the_settings(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"ssl\.ca\.location, ssl\.certificate\.location"):
        context(**{name: str(tmp_path / "nowhere.pem")})


def test_a_file_that_is_not_a_certificate_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("no certificate")
    with pytest.raises(ConfigurationError, match="No TLS context can be created"):
        context(ssl_ca_location=str(tmp_path / "bad.pem"))


def test_a_pem_that_is_not_a_certificate_is_an_error() -> None:
    with pytest.raises(ConfigurationError):
        context(ssl_ca_pem="no certificate")


@pytest.mark.parametrize("name", ["ssl_keystore_location", "ssl_keystore_password", "ssl_engine_location", "ssl_providers"])
def test_settings_without_a_counterpart_in_python_ssl_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"(?s){name.replace('_', '.')}: not supported.*PEM"):
        context(**{name: "x"})


@table(
    "name", ["ssl_sigalgs_list", "ssl_curves_list", "ssl_ca_certificate_stores", "ssl_certificate_verify_cb", "ssl_of_tomorrow"]
)
def test_a_tls_setting_that_the_native_client_lacks_is_refused_and_not_ignored(name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"(?s){name.replace('_', '.')}: not supported.*OPENSSL_CONF"):
        context(**{name: "x"})


def test_the_cipher_suites_are_those_of_the_setting() -> None:
    """TLS 1.3 has separate cipher suites, which neither OpenSSL's cipher list nor librdkafka's setting affects."""
    older = {
        c["name"] for c in context(ssl_cipher_suites="ECDHE-RSA-AES256-GCM-SHA384").get_ciphers() if c["protocol"] != "TLSv1.3"
    }
    assert older == {"ECDHE-RSA-AES256-GCM-SHA384"}


def test_an_empty_list_of_ciphers_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"ssl\.cipher\.suites"):
        context(ssl_cipher_suites="NONE-SUCH")


def test_a_revocation_list_is_loaded(authority: Authority, tmp_path: Path) -> None:
    assert not context().verify_flags & ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
    revocations = tmp_path / "crl.pem"
    revocations.write_bytes(revocation_list(authority.authority))
    made = context(ssl_ca_location=str(authority.ca), ssl_crl_location=str(revocations))
    assert made.verify_flags & ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
    assert made.cert_store_stats()["crl"] == 1


def test_later_changes_of_the_given_dict_have_no_effect() -> None:
    """The dict that the user gave is copied: changing it later changes nothing."""
    settings = dict(SERVERS)
    config = KafkaConfig.of(settings)
    settings["bootstrap.servers"] = "other:1"
    assert config.properties["bootstrap.servers"] == "localhost:9092"
    with pytest.raises(TypeError):
        config.properties["x"] = 1  # type: ignore[index]  # what must not work
    assert pickle.loads(pickle.dumps(config.bootstrap)) == config.bootstrap
