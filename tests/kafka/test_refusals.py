"""A broker that refuses a client is told as a refusal, at its first answer, by every client; an outage stays an outage."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest
import trustme
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion
from kafka.protocol.metadata import MetadataRequest
from kafka.protocol.sasl import SaslHandshakeRequest, SaslHandshakeResponse

import dualwrite
from dualwrite.deadline import Deadline
from dualwrite.devcluster import DevCluster, Security, TlsFiles
from dualwrite.errors import BrokerAuthorizationError, BrokerUnavailableError, InDoubtTransactionError
from dualwrite.kafka.client.brokers import Network, check_not_refused
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.librdkafka.committed_messages import ends_of_topics
from dualwrite.kafka.librdkafka.consumer import GroupConsumer
from dualwrite.kafka.librdkafka.group_offsets import IdleGroup
from dualwrite.kafka.librdkafka.topic_admin import create_topic
from dualwrite.migration import upgrade
from dualwrite.processor import DeadLetterTopic
from dualwrite.stores.journal import is_open
from dualwrite.stores.sql import SqlStateStore
from fixtures.acls import AUTHORIZED, Operation, Resource, grant
from fixtures.broker import USERS, make_topic, started, tls_files
from fixtures.logins import LOGIN, login_as
from fixtures.pace import LIMIT, until
from fixtures.tables import table
from fixtures.wire_server import HANG_UP, WireServer

SHORT: Final = 5.0
"""Seconds that expire in tests of outages."""

LISTENERS: Final = ("PLAINTEXT", "SASL_PLAINTEXT", "SSL", "SASL_SSL")


@dataclass(frozen=True)
class Case:
    """A client that a listener refuses, and what the error says; `more` are settings, `{folder}` is that of certificates."""

    listener: str
    protocol: str
    says: str
    more: tuple[tuple[str, str], ...] = ()

    def settings(self, cluster: DevCluster, folder: Path) -> dict[str, Any]:
        found = {"bootstrap.servers": cluster.listeners[self.listener], "security.protocol": self.protocol}
        if "SASL" in self.protocol:
            found |= {"sasl.mechanism": "SCRAM-SHA-256", **LOGIN}
        if "SSL" in self.protocol:
            found["ssl.ca.location"] = "{folder}/ca.pem"
        return {name: value.format(folder=folder) for name, value in (found | dict(self.more)).items()}


def with_certificate(name: str) -> tuple[tuple[str, str], ...]:
    return (("ssl.certificate.location", f"{{folder}}/{name}.pem"),)


def mismatches() -> list[Case]:
    """Each client at each listener of another protocol. A TLS listener shows only a client with TLS what it wants besides."""
    cases = []
    for protocol in LISTENERS:
        for listener in LISTENERS:
            wanted = "SSL or SASL_SSL" if "SSL" in listener and "SSL" not in protocol else listener
            if protocol != listener and (protocol, listener) != ("SASL_SSL", "SSL"):
                cases.append(Case(listener, protocol, f"set security.protocol={wanted}, or set bootstrap.servers"))
    return cases


NO_CERTIFICATE: Final = Case("SSL", "SSL", "set ssl.certificate.location and ssl.key.location")
WRONG_PASSWORD: Final = Case(
    "SASL_PLAINTEXT", "SASL_PLAINTEXT", "check sasl.username and sasl.password", (("sasl.password", "x"),)
)
WRONG_AUTHORITY: Final = Case(
    "SASL_SSL",
    "SASL_SSL",
    "is not trusted: unable to get local issuer certificate",
    (("ssl.ca.location", "{folder}/other-ca.pem"),),
)
SASL_WITHOUT_CERTIFICATE: Final = Case("SSL", "SASL_SSL", "without a certificate")
CERTIFICATES: Final = [
    Case("SSL", "SSL", "check ssl.certificate.location and ssl.key.location", with_certificate(name))
    for name in ("other", "expired")
]
SOME: Final = [
    Case("SASL_PLAINTEXT", "PLAINTEXT", "set security.protocol=SASL_PLAINTEXT"),
    Case("SASL_SSL", "PLAINTEXT", "set security.protocol=SSL or SASL_SSL"),
    Case("PLAINTEXT", "SSL", "set security.protocol=PLAINTEXT"),
    NO_CERTIFICATE,
    CERTIFICATES[0],
    WRONG_PASSWORD,
    WRONG_AUTHORITY,
]
ALL: Final = [*mismatches(), *SOME[3:], SASL_WITHOUT_CERTIFICATE, CERTIFICATES[1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def files(folder: Path) -> TlsFiles:
    """The broker's; and `other-ca.pem`, and clients' certificates: `client.pem`, `expired.pem` and `other.pem`."""
    authority, other = trustme.CA(), trustme.CA()
    past = {"not_before": datetime(2019, 1, 1, tzinfo=UTC), "not_after": datetime(2020, 1, 1, tzinfo=UTC)}
    other.cert_pem.write_to_path(folder / "other-ca.pem")
    for name, issuer, times in (("client", authority, {}), ("expired", authority, past), ("other", other, {})):
        issuer.issue_cert("client.example", **times).private_key_and_cert_chain_pem.write_to_path(folder / f"{name}.pem")
    return tls_files(folder, authority)


@pytest.fixture(scope="module")
def refusing(files: TlsFiles) -> Iterator[DevCluster]:
    """A broker with ACLs, a login, and a TLS listener that requires a client certificate."""
    required = {"listener.name.ssl.ssl.client.auth": "required"}
    with started(security=Security(USERS, files), config={**AUTHORIZED, **required}) as cluster:
        yield cluster


@pytest.fixture
def url(tmp_path: Path) -> str:
    made = f"sqlite:///{tmp_path / 'rows.db'}"
    upgrade(made)
    return made


def let_in(settings: dict[str, Any] | str, limit: float) -> None:
    with closing(Network(KafkaConfig.of(settings))) as network:
        network.any_broker(Deadline(limit))


def refused(call: Callable[[], object]) -> str:
    """The text of the refusal; an outage would be another error, and only after the time limit."""
    with pytest.raises(BrokerAuthorizationError) as caught:
        call()
    assert not caught.value.retriable
    return str(caught.value)


# --- each client, each refusal ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@table("case", ALL)
def test_our_own_connection(refusing: DevCluster, folder: Path, case: Case) -> None:
    assert case.says in refused(lambda: check_not_refused(case.settings(refusing, folder), LIMIT))


@pytest.mark.slow
@table(
    "case",
    [Case(name, name, "", with_certificate("client") if name == "SSL" else ()) for name in LISTENERS],
)
def test_a_client_with_the_right_settings(refusing: DevCluster, folder: Path, case: Case) -> None:
    let_in(case.settings(refusing, folder), LIMIT)


def connecting(producer: Any) -> Callable[[dict[str, Any], str], object]:
    return lambda kafka, url: dualwrite.connect(
        url, kafka=kafka, transactional_id="x", producer=producer, timeouts=dualwrite.Timeouts(kafka=LIMIT)
    )


def consume(kafka: dict[str, Any], _url: str) -> None:
    with closing(GroupConsumer({**kafka, "group.id": "billing"}, ["orders"], lambda keys: dict.fromkeys(keys, 0))) as consumer:
        until(lambda: consumer.poll(1, 0.1).messages, "an error")


def look_at_group(kafka: dict[str, Any], _url: str) -> None:
    IdleGroup(kafka, "billing", LIMIT)


WAYS: Final[dict[str, Callable[[dict[str, Any], str], object]]] = {
    "native": connecting("native"),
    "librdkafka": connecting("librdkafka"),
    "consumer": consume,
    "dead letters": lambda kafka, _url: DeadLetterTopic("orders.dead", kafka, timeout=LIMIT).letters(),
    "ends": lambda kafka, _url: ends_of_topics(kafka, timeout=LIMIT),
    "topics": lambda kafka, _url: create_topic(kafka, "orders", timeout=LIMIT),
    "groups": look_at_group,
}


@pytest.mark.slow
@table("way, case", [(way, case) for way in WAYS for case in SOME])
def test_every_way_in(refusing: DevCluster, folder: Path, url: str, way: str, case: Case) -> None:
    assert case.says in refused(lambda: WAYS[way](case.settings(refusing, folder), url))


@pytest.mark.slow
def test_dead_letters_without_the_acl(refusing: DevCluster, new_name: Callable[[str], str]) -> None:
    topic = new_name("dead")
    make_topic(refusing, topic)
    producer = Producer({"bootstrap.servers": refusing.bootstrap_servers})
    producer.produce(topic, b"x")
    producer.flush()
    letters = DeadLetterTopic(topic, login_as(refusing, "writer"), timeout=LIMIT).letters
    assert topic in refused(letters)
    grant(refusing, "writer", Operation.WRITE, Resource.TOPIC, topic)
    until(lambda: topic in refused(letters) and f"{topic}-0" in refused(letters), "the ACL, which implies Describe")
    assert "grant the principal Read on the topic" in refused(letters)
    grant(refusing, "writer", Operation.READ, Resource.TOPIC, topic)

    def readable() -> bool:
        try:
            return letters() == []
        except BrokerAuthorizationError:
            return False

    until(readable, "the ACL; none on a group is needed")


@pytest.mark.slow
def test_the_error_of_an_acl_names_the_group(refusing: DevCluster) -> None:
    text = refused(lambda: consume(login_as(refusing, "reader"), ""))
    assert "grant the principal Read on the consumer group 'billing'" in text
    assert ".." not in text


# --- in the middle of a service's life ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def logging_in_again() -> Iterator[DevCluster]:
    """A broker at which clients must log in again every three seconds."""
    with started(security=Security(USERS), config={"connections.max.reauth.ms": "3000"}) as cluster:
        yield cluster


def set_password(cluster: DevCluster, password: str) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    made = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
    for done in admin.alter_user_scram_credentials([UserScramCredentialUpsertion("writer", made, password.encode())]).values():
        done.result(LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize("producer", ["native", "librdkafka"])
def test_a_password_that_is_changed_while_a_writer_works(
    logging_in_again: DevCluster, url: str, new_name: Callable[[str], str], producer: Any
) -> None:
    """Messages don't go into the journal: it would hide a fault that does not pass by itself."""
    set_password(logging_in_again, USERS["writer"])
    kafka = login_as(logging_in_again, "writer") | {"sasl.mechanism": "SCRAM-SHA-256"}
    topic = new_name("orders")
    with (
        dualwrite.connect(url, kafka=kafka, transactional_id="x", producer=producer, when_kafka_is_down="journal") as writer,
        SqlStateStore.from_url(url) as store,
    ):

        def write() -> bool:
            with suppress(InDoubtTransactionError), writer.transaction() as tx:  # in doubt: after the database's COMMIT
                tx.send(topic, b"v")
            return False

        write()
        set_password(logging_in_again, "another")
        assert "check sasl.username and sasl.password" in refused(lambda: until(write, "the refusal"))
        assert "check sasl.username and sasl.password" in refused(write)
        assert store.journal is not None
        assert not any(is_open(gate.epoch) for gate in store.journal.gates(counts=False))
        set_password(logging_in_again, USERS["writer"])

        def works() -> bool:
            try:
                write()
            except BrokerAuthorizationError:
                return False
            return True

        until(works, "the writer's recovery")


# --- what is no refusal -------------------------------------------------------------------------------------------------------


@pytest.fixture
def closing_server() -> Iterator[str]:
    """Accepts connections and closes them at once, as a broker that stops, or a proxy without one."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    server.accept()[0].close()
                except OSError:
                    return

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("protocol", LISTENERS)
def test_a_server_that_closes_connections_does_not_refuse(closing_server: str, protocol: str) -> None:
    settings = {"bootstrap.servers": closing_server, "security.protocol": protocol, "sasl.mechanism": "PLAIN", **LOGIN}
    with pytest.raises(BrokerUnavailableError):
        let_in(settings, SHORT)


@pytest.mark.parametrize("code", [None, 34])
def test_a_broker_that_stops_after_the_first_answer_does_not_refuse(code: int | None) -> None:
    """Asked by a second connection, it does not answer any more, or says that it is what the client takes it for."""
    handshake = lambda _: HANG_UP if code is None else SaslHandshakeResponse(error_code=code, mechanisms=[])  # noqa: E731
    handlers = {MetadataRequest: lambda _: HANG_UP, SaslHandshakeRequest: handshake}
    with WireServer(handlers) as server, pytest.raises(BrokerUnavailableError):
        let_in(server.bootstrap_servers, SHORT)


def test_a_web_server_is_no_broker() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        where = f"127.0.0.1:{server.getsockname()[1]}"
        assert f"{where} is a web server" in refused(lambda: check_not_refused(where, LIMIT))
        thread.join()


@pytest.mark.slow
def test_one_of_several_servers_refuses(refusing: DevCluster, free_port: int) -> None:
    """It does not matter while another works, and is the reason if none does."""
    plain, tls = refusing.listeners["PLAINTEXT"], refusing.listeners["SSL"]
    let_in(f"{tls},{plain}", LIMIT)
    for servers in (f"127.0.0.1:{free_port},{tls}", f"{tls},127.0.0.1:{free_port}"):
        assert "set security.protocol=SSL or SASL_SSL" in refused(lambda servers=servers: check_not_refused(servers, LIMIT))


def test_a_writer_without_a_broker_waits_as_before(url: str, free_port: int) -> None:
    with pytest.raises(BrokerUnavailableError) as caught:
        dualwrite.connect(url, kafka=f"127.0.0.1:{free_port}", transactional_id="x", timeouts=dualwrite.Timeouts(kafka=0.5))
    assert caught.value.retriable
