"""Listeners with SASL and TLS, used by confluent-kafka."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from dualwrite.devcluster import DevCluster, DevClusterError, Security, TlsFiles
from fixtures.pace import LIMIT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    place = tmp_path_factory.mktemp("tls")
    files = TlsFiles(ca=place / "ca.pem", certificate=place / "cert.pem", key=place / "key.pem")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(files.ca))
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    files.certificate.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    key = load_pem_private_key(certificate.private_key_pem.bytes(), None)
    files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return files


@pytest.fixture(scope="module")
def secured(tls: TlsFiles) -> Iterator[DevCluster]:
    with DevCluster.temporary(security=Security(users={"alice": "secret", "bob": "hidden"}, tls=tls)) as cluster:
        yield cluster


def brokers(cluster: DevCluster, protocol: str, tls: TlsFiles, seconds: float = LIMIT, **extra: str) -> int:
    config = {"bootstrap.servers": cluster.listeners[protocol], "security.protocol": protocol, "log_level": "0"}
    if "SSL" in protocol:
        config["ssl.ca.location"] = str(tls.ca)
    return len(AdminClient({**config, **extra}).list_topics(timeout=seconds).brokers)


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
@pytest.mark.parametrize("protocol", ["SASL_PLAINTEXT", "SASL_SSL"])
def test_users_can_log_in_by_every_mechanism(secured: DevCluster, tls: TlsFiles, protocol: str, mechanism: str) -> None:
    sasl = {"sasl.mechanism": mechanism, "sasl.username": "alice", "sasl.password": "secret"}
    assert brokers(secured, protocol, tls, **sasl) == 1


def test_a_wrong_password_is_refused(secured: DevCluster, tls: TlsFiles) -> None:
    sasl = {"sasl.mechanism": "SCRAM-SHA-512", "sasl.username": "bob", "sasl.password": "secret"}
    with pytest.raises(KafkaException):
        brokers(secured, "SASL_PLAINTEXT", tls, 3, **sasl)


def test_tls_alone_and_with_a_client_certificate(secured: DevCluster, tls: TlsFiles) -> None:
    assert brokers(secured, "SSL", tls) == 1
    own = {"ssl.certificate.location": str(tls.certificate), "ssl.key.location": str(tls.key)}
    assert brokers(secured, "SSL", tls, **own) == 1


def test_the_plain_listener_stays_available(secured: DevCluster, tls: TlsFiles) -> None:
    assert brokers(secured, "PLAINTEXT", tls) == 1
    assert set(secured.status().listeners) == {"PLAINTEXT", "SASL_PLAINTEXT", "SSL", "SASL_SSL"}


def test_a_key_that_kafka_cannot_read_is_refused_before_a_broker_starts(tls: TlsFiles, tmp_path: Path) -> None:
    key = tmp_path / "ec.pem"
    key.write_text(tls.key.read_text().replace("PRIVATE KEY", "EC PRIVATE KEY"))
    with pytest.raises(DevClusterError, match=r"PKCS#8.*openssl pkcs8"):
        TlsFiles(tls.ca, tls.certificate, key).check()
    with pytest.raises(DevClusterError, match="does not exist"):
        TlsFiles(tls.ca, tls.certificate, tmp_path / "nothing").check()
