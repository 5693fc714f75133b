"""Listeners with SASL and TLS, used by confluent-kafka."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from dualwrite.devcluster import DevCluster, DevClusterError, TlsFiles
from fixtures.broker import USERS
from fixtures.logins import settings_for
from fixtures.pace import LIMIT
from fixtures.tables import table

pytestmark = pytest.mark.slow


@pytest.fixture
def tls(strict_broker: DevCluster) -> TlsFiles:
    files: TlsFiles = strict_broker.tls_files  # type: ignore[attr-defined]  # see the fixture
    return files


def brokers(cluster: DevCluster, protocol: str, seconds: float = LIMIT, **extra: str) -> int:
    settings = settings_for(cluster, protocol, log_level="0", **extra)
    return len(AdminClient(settings).list_topics(timeout=seconds).brokers)


def login(mechanism: str, user: str, password: str) -> dict[str, str]:
    return {"sasl.mechanism": mechanism, "sasl.username": user, "sasl.password": password}


@table(
    ("protocol", "mechanism", "user"),
    product(["SASL_PLAINTEXT", "SASL_SSL"], ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"], USERS),
)
def test_users_can_log_in_by_every_mechanism(strict_broker: DevCluster, protocol: str, mechanism: str, user: str) -> None:
    assert brokers(strict_broker, protocol, **login(mechanism, user, USERS[user])) == 1


def test_a_wrong_password_is_refused(strict_broker: DevCluster) -> None:
    with pytest.raises(KafkaException):
        brokers(strict_broker, "SASL_PLAINTEXT", 3, **login("SCRAM-SHA-512", "reader", USERS["writer"]))


def test_tls_alone_and_with_a_client_certificate_and_the_plain_listener(strict_broker: DevCluster, tls: TlsFiles) -> None:
    own = {"ssl.certificate.location": str(tls.certificate), "ssl.key.location": str(tls.key)}
    assert [brokers(strict_broker, "SSL"), brokers(strict_broker, "SSL", **own), brokers(strict_broker, "PLAINTEXT")] == [1] * 3
    assert set(strict_broker.status().listeners) == {"PLAINTEXT", "SASL_PLAINTEXT", "SSL", "SASL_SSL"}


def test_a_key_that_kafka_cannot_read_is_refused_before_a_broker_starts(tls: TlsFiles, tmp_path: Path) -> None:
    key = tmp_path / "ec.pem"
    key.write_text(tls.key.read_text().replace("PRIVATE KEY", "EC PRIVATE KEY"))
    with pytest.raises(DevClusterError, match=r"(?s)PKCS#8.*openssl pkcs8"):
        TlsFiles(tls.ca, tls.certificate, key).check()
    with pytest.raises(DevClusterError, match="does not exist"):
        TlsFiles(tls.ca, tls.certificate, tmp_path / "nothing").check()
