"""`SentMessages`, the fixture `sent`: what was committed to a topic since the test began."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from pydantic import BaseModel

import dualwrite
from dualwrite.devcluster import DevCluster
from dualwrite.testing import failpoints
from dualwrite.testing.topics import OpenTransactionsError, SentMessages
from fixtures.broker import make_topic
from fixtures.pace import LIMIT


class Placed(BaseModel):
    item: str


def write(broker: DevCluster, url: str, topic: str, *items: str) -> None:
    with dualwrite.connect(url, kafka=broker.bootstrap_servers, transactional_id=topic) as writer, writer.transaction() as tx:
        for item in items:
            tx.send(topic, item, key="k", headers={"a": "1"}, timestamp=17)


def test_only_what_was_committed_since_then_is_seen(
    broker: DevCluster, sqlite_url: str, new_name: Callable[[str], str]
) -> None:
    topic = new_name("sent")
    write(broker, sqlite_url, topic, "before")
    sent = SentMessages(broker.bootstrap_servers, timeout=LIMIT)
    assert sent(topic) == []
    with pytest.raises(RuntimeError), failpoints.armed("before_db_commit", failpoints.raises(RuntimeError())):
        write(broker, sqlite_url, topic, "rolled back")
    write(broker, sqlite_url, topic, "lamp", "chair")
    first, second = sent(topic)
    assert (first.text, second.text, first.offset < second.offset) == ("lamp", "chair", True)
    assert (first.topic, first.key_text, first.header, first.timestamp, first.partition) == (topic, "k", {"a": b"1"}, 17, 0)
    assert [message.text for message in SentMessages(broker.bootstrap_servers)(topic)] == []


def test_a_topic_that_comes_later_is_read_from_its_beginning(
    broker: DevCluster, sqlite_url: str, new_name: Callable[[str], str]
) -> None:
    sent = SentMessages(broker.bootstrap_servers, timeout=LIMIT)
    topic = dualwrite.Topic.of_models(new_name("sent"), Placed)
    make_topic(broker, topic.name, 3)
    with dualwrite.connect(sqlite_url, kafka=broker.bootstrap_servers, transactional_id="shop") as writer:
        for number in range(9):
            with writer.transaction() as tx:
                topic.send(tx, Placed(item=f"lamp {number}"), key=f"{number}")
    found = sent(topic)
    assert sorted(message.decoded(topic).item for message in found) == [f"lamp {number}" for number in range(9)]
    assert [(m.partition, m.offset) for m in found] == sorted((m.partition, m.offset) for m in found)
    assert len({message.partition for message in found}) > 1


def test_it_waits_for_what_another_thread_sends(broker: DevCluster, sqlite_url: str, new_name: Callable[[str], str]) -> None:
    topic = new_name("sent")
    sent = SentMessages(broker.bootstrap_servers, timeout=LIMIT)
    thread = threading.Thread(target=write, args=(broker, sqlite_url, topic, "lamp", "chair"))
    thread.start()
    assert [message.text for message in sent.wait_for(topic, 2)] == ["lamp", "chair"]
    thread.join()
    with pytest.raises(AssertionError, match=r"(?s)^2 messages instead of 1 in .*:\n.*lamp.*\n.*chair"):
        sent.wait_for(topic, 1)
    with pytest.raises(AssertionError, match=r"^2 messages instead of 3 in "):
        sent.wait_for(topic, 3, timeout=0)


@pytest.mark.slow
def test_an_open_transaction_is_an_error_and_no_missing_message(
    broker: DevCluster, sqlite_url: str, new_name: Callable[[str], str]
) -> None:
    topic = new_name("sent")
    sent = SentMessages(broker.bootstrap_servers, timeout=LIMIT)
    with dualwrite.connect(sqlite_url, kafka=broker.bootstrap_servers, transactional_id=topic) as writer:
        with writer.transaction() as tx:
            tx.send(topic, "first")
        with writer.transaction() as tx:
            tx.send(topic, "second")
            with pytest.raises(OpenTransactionsError, match="dualwrite recover"):
                sent(topic, timeout=3)
    assert [message.text for message in sent(topic)] == ["first", "second"]


def test_a_topic_that_does_not_exist_has_no_messages(strict_broker: DevCluster) -> None:
    sent = SentMessages(strict_broker.bootstrap_servers, timeout=LIMIT)
    assert sent("never-created") == []


def test_without_a_broker_it_says_so() -> None:
    with pytest.raises(dualwrite.BrokerUnavailableError, match=r"^Kafka's topics can't be read"):
        SentMessages({"bootstrap.servers": "127.0.0.1:9", "log_level": 0}, timeout=0.2)
