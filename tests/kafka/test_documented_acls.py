"""The ACLs and the ids of docs/operations/broker.md: its commands suffice, and Kafka sees no other ids than its table has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
import sqlalchemy as sa
from confluent_kafka import Producer

import dualwrite
from dualwrite.devcluster import DevCluster
from dualwrite.diagnosis import Severity, examine
from dualwrite.kafka import PROBE_ID
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.migration import upgrade
from dualwrite.processor import DeadLetterTopic
from dualwrite.processor.dead_letters import dead_letter_headers
from dualwrite.relay import Relay, RelayOptions
from dualwrite.relay.journal_keeper import drain_journal, replay_letters
from dualwrite.relay.layout import OutboxLayout
from dualwrite.settings import Settings
from dualwrite.stores.sql import SqlStateStore
from fixtures.acls import Names, Operation, Resource, grant
from fixtures.broker import make_topic, read_topic, read_values
from fixtures.logins import login_as
from fixtures.pace import LIMIT, limit
from fixtures.rules_page import ROOT

pytestmark = pytest.mark.slow

PAGE: Final = (ROOT / "docs/operations/broker.md").read_text()
ACLS: Final = PAGE.partition("## ACLs")[2].partition("\n## ")[0]
RESOURCES: Final = {"transactional-id": Resource.TRANSACTIONAL_ID, "topic": Resource.TOPIC}
WRITER: Final = r"(~[0-9]+)?#[0-9a-f]+\.[0-9]+"
"""How an id goes on at Kafka, "as a writer"."""
OPERATIONS: Final = {
    "Write": Operation.WRITE,
    "Read": Operation.READ,
    "Describe": Operation.DESCRIBE,
    "TwoPhaseCommit": Operation.TWO_PHASE_COMMIT,
}


def documented() -> Iterator[tuple[Operation, Resource, str, Names]]:
    """What the commands of the page grant."""
    for command in re.findall(r"kafka-acls\.sh (.*?)(?=kafka-acls|```)", ACLS, re.DOTALL):
        ((kind, name),) = re.findall(r"--(transactional-id|topic) (\S+)", command)
        names = Names.PREFIXED if "--resource-pattern-type prefixed" in command else Names.LITERAL
        for operation in re.findall(r"--operation (\w+)", command):
            yield OPERATIONS[operation], RESOURCES[kind], name, names


def patterns() -> dict[str, str]:
    """For each row of the table a pattern for the ids that Kafka sees."""
    table = ACLS.partition("| who |")[2].partition("\n\n")[0]
    rows = [line.strip("|").split(" | ") for line in table.splitlines()[2:]]
    found = {}
    for who, logical, seen in rows:
        text, end = (logical, WRITER) if "writer" in seen else (seen, "")
        names = [re.escape(name) for name in re.findall(r"`([^`]+)`", text)]
        found[who] = "|".join(re.sub("<[a-z]+>", "[^#]+", name) + end for name in names)
    return found


@pytest.fixture(scope="module")
def shop(guarded: DevCluster) -> DevCluster:
    """The user `writer` has what the page grants, and the topics of its examples exist."""
    for name in ("orders", "orders.dead"):
        make_topic(guarded, name)
    for operation, resource, name, names in documented():
        grant(guarded, "writer", operation, resource, name, names)
    return guarded


@pytest.fixture
def url(tmp_path: Path) -> str:
    found = f"sqlite:///{tmp_path}/shop.db"
    upgrade(found)
    return found


def leave_a_dead_letter(cluster: DevCluster) -> None:
    """A message of `orders` that the group `billing` could not process."""
    message = read_topic(cluster.bootstrap_servers, "orders")[0]
    headers = dead_letter_headers(message, ValueError("broken"), group_id="billing", attempts=1)
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers})
    producer.produce("orders.dead", message.value(), headers=headers)
    producer.flush(LIMIT)


def test_the_commands_of_the_page_suffice_for_all_ids_of_the_page(shop: DevCluster, url: str) -> None:
    kafka = login_as(shop, "writer")
    sent: dict[str, Any] = {"kafka": kafka, "two_phase": True}
    with dualwrite.connect(url, transactional_id="shop-1", **sent) as writer:
        for number in range(3):
            with writer.transaction() as tx:
                tx.send("orders", f"writer {number}")
    with dualwrite.create_pool(url, prefix="shop", **sent) as pool:
        pool.run(lambda tx: tx.send("orders", "pool"))
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE outbox (id INTEGER PRIMARY KEY, topic TEXT, key TEXT, payload TEXT)"))
        connection.execute(sa.text("INSERT INTO outbox (topic, key, payload) VALUES ('orders', 'k', 'relay')"))
    with closing(Relay(url, options=RelayOptions(layout=OutboxLayout("outbox", key="key", value="payload")), **sent)) as relay:
        relay.run_once()
    settings = Settings(kafka=kafka, two_phase=True)
    with closing(SqlStateStore(engine)) as store:
        store.journal.prepare("shop")
        drain_journal(store, settings, "shop")
        replay_letters(store, settings, "shop", [])
    leave_a_dead_letter(shop)
    assert DeadLetterTopic("orders.dead", kafka).replay("billing") == 1
    values = [value.decode() for value in read_values(shop.bootstrap_servers, "orders")]
    assert values == ["writer 0", "writer 1", "writer 2", "pool", "relay", "writer 0"]
    engine.dispose()

    with closing(WireTransactionCoordinator(KafkaConfig.of(shop.bootstrap_servers))) as coordinator:
        seen = {found.kafka_transactional_id for found in coordinator.list_transactions()}
    known = patterns()
    assert [name for name in seen if not re.fullmatch("|".join(known.values()), name)] == []
    unused = [who for who, pattern in known.items() if not any(re.fullmatch(pattern, name) for name in seen)]
    assert [who for who in unused if "Spark" not in who and "job" not in who and "doctor" not in who] == []
    assert PROBE_ID in ACLS


def test_no_right_is_granted_that_another_one_includes() -> None:
    for command in re.findall(r"kafka-acls\.sh .*?(?=kafka-acls|```)", ACLS, re.DOTALL):
        assert not ("Describe" in command and re.search("Write|Read", command)), command


@pytest.mark.parametrize(("id_of_a_service", "severity"), [(None, Severity.UNKNOWN), ("shop-1", Severity.BROKEN)])
def test_the_doctor_shows_topics_although_it_may_not_use_the_id(
    shop: DevCluster, id_of_a_service: str | None, severity: Severity
) -> None:
    """An operator's principal may not use any transactional id: that says nothing about the service."""
    grant(shop, "reader", Operation.DESCRIBE, Resource.TOPIC, "orders")
    settings = Settings(kafka=login_as(shop, "reader"), transactional_id=id_of_a_service)
    found = examine(settings, topics=["orders"], timeout=limit(15))
    (about,) = (finding for finding in found.findings if finding.about == "kafka")
    assert (about.severity, [topic.name for topic in found.topics]) == (severity, ["orders"])
    probed = PROBE_ID if id_of_a_service is None else "shop-1#probe"
    assert repr(probed) in about.what + str(about.change)
    assert "Write" in str(about.change)
