"""Topics are created as soon as the cluster can, also one whose brokers are not alive at first."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from confluent_kafka import KafkaException

from dualwrite.devcluster import DevCluster
from dualwrite.errors import BrokerError, BrokerUnavailableError
from dualwrite.kafka.librdkafka.topic_admin import admin_client, create_topic, delete_topic
from fixtures.broker import started
from fixtures.pace import LIMIT, until

NewName = Callable[[str], str]

SESSION = 2.1
"""Seconds: just over a development broker's `broker.session.timeout.ms`."""


def is_fenced(cluster: DevCluster) -> bool:
    """Try to have the controller fence the broker: pauses of their process, and moments in which only one of them goes on."""
    for _ in range(4):
        cluster.pause()
        time.sleep(SESSION)
        cluster.resume()
        time.sleep(0.005)
    try:
        return admin_client(settings(cluster), LIMIT).list_topics(timeout=LIMIT).controller_id < 0
    except KafkaException:
        return False


def settings(cluster: DevCluster) -> dict[str, str]:
    return {"bootstrap.servers": cluster.bootstrap_servers}


@pytest.mark.soak  # a moment in the start of a broker
def test_a_topic_is_created_although_the_cluster_has_no_controller() -> None:
    """librdkafka, with its defaults, asks for the controller again too late."""
    with started() as cluster:
        until(lambda: is_fenced(cluster), "the broker is fenced", pause=0)
        create_topic(settings(cluster), "t", timeout=LIMIT)
        assert "t" in admin_client(settings(cluster), LIMIT).list_topics(timeout=LIMIT).topics


def test_a_refused_topic(broker: DevCluster, new_name: NewName) -> None:
    name = new_name("topic")
    create_topic(settings(broker), name, 2, config={"max.message.bytes": "2000"}, timeout=LIMIT)
    with pytest.raises(BrokerError, match=f"(?s)creating the topic '{name}'.*already exists") as exists:
        create_topic(settings(broker), name, timeout=LIMIT)
    with pytest.raises(BrokerError, match="replication factor") as impossible:
        create_topic(settings(broker), new_name("topic"), replicas=2, timeout=LIMIT)
    assert not exists.value.retriable
    assert not impossible.value.retriable
    delete_topic(settings(broker), name, timeout=LIMIT)
    with pytest.raises(BrokerError, match=f"deleting the topic '{name}'"):
        delete_topic(settings(broker), name, timeout=LIMIT)


def test_no_broker_answers() -> None:
    with pytest.raises(BrokerUnavailableError, match="creating the topic 't'"):
        create_topic({"bootstrap.servers": "127.0.0.1:1", "log_level": 0}, "t", timeout=0.3)
