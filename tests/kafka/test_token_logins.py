"""SASL/OAUTHBEARER at a real broker: every client logs in with one token of one owner, and says what failed if it can't."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

import dualwrite
from dualwrite.deadline import Deadline
from dualwrite.devcluster import DevCluster
from dualwrite.errors import BrokerAuthorizationError, BrokerUnavailableError, ConfigurationError
from dualwrite.kafka.client.brokers import check_not_refused
from dualwrite.kafka.librdkafka.committed_messages import committed_messages, ends_of_topics
from dualwrite.kafka.librdkafka.consumer import GroupConsumer
from dualwrite.kafka.librdkafka.group_offsets import IdleGroup
from dualwrite.kafka.librdkafka.topic_admin import create_topic
from dualwrite.migration import upgrade
from fixtures.acls import Names, Operation, Resource, grant
from fixtures.broker import make_topic, read_values
from fixtures.command import output_of
from fixtures.pace import LIMIT, until
from fixtures.tables import table
from fixtures.token_broker import with_token
from fixtures.token_server import CLIENT_ID, CLIENT_SECRET, TokenServer, unsecured_token

pytestmark = pytest.mark.slow

NewName = Callable[[str], str]
EVERYTHING: Final = logging.DEBUG - 5


def established(servers: str) -> set[int]:
    """The local ports of our open connections to a listener."""
    port = int(servers.rpartition(":")[2])
    return {
        each.laddr.port
        for each in psutil.Process().net_connections(kind="tcp")
        if each.raddr and each.raddr.port == port and each.status == psutil.CONN_ESTABLISHED
    }


@pytest.fixture
def url(tmp_path: Path) -> str:
    made = f"sqlite:///{tmp_path / 'rows.db'}"
    upgrade(made)
    return made


@pytest.fixture
def server(token_server: TokenServer) -> TokenServer:
    """The token server as it is at first."""
    token_server.lifetime, token_server.failure = 3600.0, None
    token_server.claims.clear()
    token_server.issued.clear()
    token_server.forms.clear()
    return token_server


def with_callback(cluster: DevCluster, callback: Callable[[str], Any], **more: Any) -> dict[str, Any]:
    """The settings of a client of the listener that takes unsecured tokens."""
    return {
        "bootstrap.servers": cluster.listeners["SASL_PLAINTEXT"],
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "OAUTHBEARER",
        "oauth_cb": callback,
        **more,
    }


def write(url: str, kafka: dict[str, Any], topic: str, producer: Any, value: str) -> None:
    with (
        dualwrite.connect(url, kafka=kafka, transactional_id=f"{topic}-{producer}", producer=producer) as writer,
        writer.transaction() as tx,
    ):
        tx.send(topic, value)


def consumed(kafka: dict[str, Any], topic: str) -> list[bytes | None]:
    settings = {**kafka, "group.id": f"{topic}-group"}
    with closing(GroupConsumer(settings, [topic], lambda keys: dict.fromkeys(keys, 0))) as consumer:
        found: list[bytes | None] = []

        def both() -> bool:
            found.extend(message.value() for message in consumer.poll(10, 0.1).messages)
            return len(found) >= 2

        until(both, "the messages")
        return found


def test_every_client_logs_in_with_the_one_token_of_the_endpoint(
    token_broker: DevCluster,
    server: TokenServer,
    url: str,
    new_name: NewName,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And neither the token nor the client's secret is in any log."""
    caplog.set_level(EVERYTHING)
    kafka, topic = with_token(token_broker, server), new_name("orders")
    create_topic(kafka, topic, timeout=LIMIT)
    write(url, kafka, topic, "native", "one")
    write(url, kafka, topic, "librdkafka", "two")
    assert consumed(kafka, topic) == [b"one", b"two"]
    assert [message.value() for message in committed_messages(kafka, topic, timeout=LIMIT)] == [b"one", b"two"]
    assert ends_of_topics(kafka, timeout=LIMIT)[topic] == {0: 4}
    with IdleGroup(kafka, f"{topic}-group", LIMIT) as group:
        assert group.committed([(topic, 0)], LIMIT) == {}
    for name, value in kafka.items():
        monkeypatch.setenv(f"DUALWRITE_KAFKA_{name.upper().replace('.', '_')}", value)
    code, out, err = output_of(capsys, "doctor", "--url", url, "--id", topic, "--json")
    assert code == 0, out + err
    assert len(server.issued) == 1
    for secret in (server.issued[0], CLIENT_SECRET):
        assert secret not in caplog.text + out + err


def test_a_callback_gives_the_token_and_extensions(token_broker: DevCluster, url: str, new_name: NewName) -> None:
    calls: list[str] = []
    topic = new_name("orders")
    make_topic(token_broker, topic)

    def token(config: str) -> tuple[str, float, str, dict[str, str]]:
        calls.append(config)
        return unsecured_token(CLIENT_ID), time.time() + 3600, CLIENT_ID, {"team": "shop"}

    kafka = with_callback(token_broker, token, **{"sasl.oauthbearer.config": "scope=kafka"})
    write(url, kafka, topic, "native", "one")
    write(url, kafka, topic, "librdkafka", "two")
    assert consumed(kafka, topic) == [b"one", b"two"]
    assert calls == ["scope=kafka"]


# --- tokens that expire under load (KIP-368) ----------------------------------------------------------------------------------


@pytest.mark.soak  # a machine that stands still for longer than a sixth of a token's life loses the connection
@pytest.mark.parametrize(("producer", "seconds"), [("native", 10.0), ("librdkafka", 15.0)])  # this one looks once a second
def test_a_writer_goes_on_while_its_tokens_expire(
    token_broker: DevCluster, server: TokenServer, url: str, new_name: NewName, producer: Any, seconds: float
) -> None:
    """The native producer also keeps its connection; the endpoint fails between two tokens, which nobody notices."""
    server.lifetime, topic = seconds, new_name("orders")
    kafka = with_token(token_broker, server, **{"sasl.oauthbearer.scope": topic})
    make_topic(token_broker, topic)
    sent: list[bytes] = []
    with dualwrite.connect(url, kafka=kafka, transactional_id=topic, producer=producer) as writer:

        def write_until(reached: Callable[[], bool]) -> None:
            deadline = Deadline(LIMIT)
            while not reached():
                assert not deadline.expired, server.forms
                sent.append(b"%d" % len(sent))
                with writer.transaction() as tx:
                    tx.send(topic, sent[-1])

        before = established(kafka["bootstrap.servers"])
        write_until(lambda: len(server.issued) == 2)
        server.failure = (503, "")
        write_until(lambda: len(server.forms) > 2)
        server.failure = None
        write_until(lambda: len(server.issued) == 3)
        end = time.monotonic() + seconds  # when the second token, too, has expired
        write_until(lambda: time.monotonic() > end)
        if producer == "native":
            assert established(kafka["bootstrap.servers"]) == before
    found = [message.value() for message in committed_messages(kafka, topic, timeout=LIMIT)]
    assert found == sent


def test_a_certificates_name_is_mapped_to_the_principal_of_acls(
    token_broker: DevCluster, url: str, new_name: NewName, tmp_path: Path
) -> None:
    """With `ssl.principal.mapping.rules` the broker takes a part of the certificate's name for the user."""
    topic = new_name("orders")
    make_topic(token_broker, topic)
    issued = token_broker.authority.issue_cert("x.example", organization_unit_name="billing-service")  # type: ignore[attr-defined]
    issued.private_key_and_cert_chain_pem.write_to_path(tmp_path / "client.pem")
    kafka = {
        "bootstrap.servers": token_broker.listeners["SSL"],
        "security.protocol": "SSL",
        "ssl.ca.location": str(token_broker.tls_files.ca),  # type: ignore[attr-defined]
        "ssl.certificate.location": str(tmp_path / "client.pem"),
        "ssl.key.location": str(tmp_path / "client.pem"),
    }
    grant(token_broker, "billing", Operation.WRITE, Resource.TRANSACTIONAL_ID, topic, Names.PREFIXED)
    with pytest.raises(BrokerAuthorizationError, match=topic):
        write(url, kafka, topic, "native", "refused")
    grant(token_broker, "billing", Operation.WRITE, Resource.TOPIC, topic)

    def allowed() -> bool:
        try:
            write(url, kafka, topic, "native", "one")
        except BrokerAuthorizationError:
            return False
        return True

    until(allowed, "the ACL")
    write(url, kafka, topic, "librdkafka", "two")
    assert read_values(token_broker.bootstrap_servers, topic) == [b"one", b"two"]


# --- what fails ---------------------------------------------------------------------------------------------------------------


def failing(config: str) -> tuple[str, float]:
    raise OSError(f"no answer to {config}")


def test_what_failed_is_said_and_no_secret(
    token_broker: DevCluster, server: TokenServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(EVERYTHING)
    texts = []

    def error_of(kafka: dict[str, Any], kind: type[Exception]) -> str:
        with pytest.raises(kind) as caught:
            check_not_refused(kafka, LIMIT) if kind is not BrokerUnavailableError else create_topic(kafka, "x", timeout=2)
        texts.append(f"{caught.value!r} {caught.value}")
        return texts[-1]

    def variant(**more: str) -> dict[str, Any]:
        return with_token(token_broker, server, **{f"sasl.oauthbearer.{name}": value for name, value in more.items()})

    server.claims["aud"] = "another"
    said = error_of(variant(scope="a"), BrokerAuthorizationError)
    assert "refused the SASL OAUTHBEARER login with a token from http://127.0.0.1" in said
    assert '{"status":"invalid_token"}' in said
    bad = "wr0ng-s3cret"
    wrong = with_token(token_broker, server, **{"sasl.oauthbearer.client.secret": bad})
    assert "refuses the client 'shop': 401 Unauthorized (invalid_client: no client shop:***)" in error_of(
        wrong, BrokerAuthorizationError
    )
    expired = with_callback(token_broker, lambda _: (unsecured_token("me", -5), time.time() + 60))
    assert "with a token from oauth_cb" in error_of(expired, BrokerAuthorizationError)
    raising = with_callback(token_broker, failing, **{"sasl.oauthbearer.config": bad})
    assert "oauth_cb raised OSError: no answer to ***." in error_of(raising, BrokerUnavailableError)
    old = with_callback(token_broker, lambda _: (unsecured_token("me"), time.time() - 5))
    assert "expired 5 s ago" in error_of(old, BrokerUnavailableError)
    nowhere = with_token(token_broker, server, **{"sasl.oauthbearer.token.endpoint.url": "http://127.0.0.1:1/token"})
    assert "http://127.0.0.1:1/token can't be reached" in error_of(nowhere, BrokerUnavailableError)
    for secret in (*server.issued, CLIENT_SECRET, bad):
        assert secret not in caplog.text + "".join(texts)


@pytest.mark.soak
@pytest.mark.parametrize("producer", ["native", "librdkafka"])
def test_without_a_token_messages_go_into_the_journal(
    token_broker: DevCluster, server: TokenServer, url: str, new_name: NewName, producer: Any
) -> None:
    topic = new_name("orders")
    make_topic(token_broker, topic)
    kafka = with_token(token_broker, server, **{"sasl.oauthbearer.scope": topic})
    server.failure = (503, "")
    given: dict[str, Any] = {"kafka": kafka, "transactional_id": topic, "producer": producer}
    with pytest.raises(BrokerUnavailableError, match=r"The token endpoint http.* has no token at the moment: 503"):
        dualwrite.connect(url, **given, timeouts=dualwrite.Timeouts(kafka=3))
    with dualwrite.connect(url, **given, when_kafka_is_down="journal") as writer, writer.transaction() as tx:
        tx.send(topic, "journaled")
    assert read_values(token_broker.bootstrap_servers, topic) == []
    server.failure = None
    with dualwrite.connect(url, **given, when_kafka_is_down="journal"):
        until(lambda: read_values(token_broker.bootstrap_servers, topic) == [b"journaled"], "the journal's message")


@table(
    "call",
    [
        lambda kafka: check_not_refused(kafka, LIMIT),
        lambda kafka: create_topic(kafka, "x"),
        lambda kafka: GroupConsumer({**kafka, "group.id": "g"}, ["x"], lambda _: {}),
        lambda kafka: IdleGroup(kafka, "g", LIMIT),
        lambda kafka: committed_messages(kafka, "x", timeout=LIMIT),
        lambda kafka: dualwrite.connect("sqlite://", kafka=kafka, transactional_id="x"),
    ],
)
def test_kerberos_is_refused_at_once_by_every_client(call: Callable[[dict[str, Any]], object]) -> None:
    kafka = {"bootstrap.servers": "127.0.0.1:1", "security.protocol": "SASL_SSL", "sasl.mechanism": "GSSAPI"}
    with pytest.raises(ConfigurationError, match=r"Unsupported sasl\.mechanism 'GSSAPI': dualwrite has no Kerberos"):
        call(kafka)
