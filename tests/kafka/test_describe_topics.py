"""Describing topics: replicas, limits, ACLs, and missing topics; describing creates nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dualwrite.devcluster import DevCluster
from dualwrite.diagnosis import Severity
from dualwrite.diagnosis.kafka_findings import judge_topic
from dualwrite.kafka.inspect import TRANSACTION_STATE_TOPIC, Retention, TopicFacts, describe_topics
from fixtures.broker import make_topic, started
from fixtures.pace import LIMIT, until

NewName = Callable[[str], str]


def test_a_topic_and_its_settings(broker: DevCluster, new_name: NewName) -> None:
    name = new_name("topic")
    make_topic(
        broker,
        name,
        3,
        max_message_bytes="2000",
        unclean_leader_election_enable="true",
        cleanup_policy="compact,delete",
        retention_bytes="1000000",
        min_compaction_lag_ms="5000",
    )
    assert describe_topics(broker.bootstrap_servers, [name]) == [
        TopicFacts(
            name,
            exists=True,
            partitions=3,
            replicas=1,
            in_sync=1,
            writable=True,
            min_insync_replicas=1,
            unclean_leader_election=True,
            max_message_bytes=2000,
            retention=Retention(
                deletes=True,
                compacts=True,
                retention_ms=604_800_000,
                retention_bytes=1_000_000,
                min_compaction_lag_ms=5000,
                segment_ms=604_800_000,
            ),
        )
    ]


def test_the_transaction_state_topic(broker: DevCluster) -> None:
    (found,) = describe_topics(broker.bootstrap_servers, [TRANSACTION_STATE_TOPIC])
    assert found.exists
    assert (found.replicas, found.min_insync_replicas) == (1, 1)


def test_a_missing_topic_stays_missing(broker: DevCluster, strict_broker: DevCluster, new_name: NewName) -> None:
    name = new_name("missing")
    for _ in range(2):
        found = describe_topics(broker.bootstrap_servers, [name, name])
        assert found == [TopicFacts(name, exists=False, made_at_first_use=True)]
    assert describe_topics(strict_broker.bootstrap_servers, [name])[0].made_at_first_use is False


def test_an_invalid_topic_name(broker: DevCluster) -> None:
    (found,) = describe_topics(broker.bootstrap_servers, ["no topic!"])
    assert (found.exists, found.error) == (False, "INVALID_TOPIC_EXCEPTION")


def test_no_topics_need_no_broker(free_port: int) -> None:
    assert describe_topics(f"127.0.0.1:{free_port}", []) == []


@pytest.mark.soak  # in CI with other requests: test_admin_outage.py
def test_one_of_three_brokers_goes_down(new_name: NewName) -> None:
    with started(nodes=3) as cluster:
        names = {least: new_name("topic") for least in (1, 2, 3)}
        for least, name in names.items():
            make_topic(cluster, name, min_insync_replicas=str(least))

        def severities() -> dict[int, list[Severity]]:
            found = dict(zip(names, describe_topics(cluster.bootstrap_servers, names.values(), timeout=LIMIT), strict=True))
            return {least: [finding.severity for finding in judge_topic(topic)] for least, topic in found.items()}

        def wait_for(expected: dict[int, list[Severity]]) -> None:
            # brokers learn about topics, and about brokers that are down, only after a while
            until(lambda: severities() == expected, severities, pause=0.1, seconds=2 * LIMIT)

        wait_for({1: [Severity.WEAK], 2: [], 3: [Severity.NOTE]})
        cluster.kill(2)
        wait_for({1: [Severity.WEAK], 2: [], 3: [Severity.BROKEN]})
