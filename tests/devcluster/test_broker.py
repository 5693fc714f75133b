"""What a running broker supports, and how it behaves when it is killed or paused."""

from __future__ import annotations

import socket
import threading
import uuid

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from dualwrite.devcluster import DevCluster, DevClusterError, readiness
from dualwrite.devcluster.registry import ClusterRecord
from fixtures.pace import LIMIT, until


def commit_one(cluster: DevCluster, *, value: str = "v") -> None:
    producer = Producer(
        {"bootstrap.servers": cluster.bootstrap_servers, "transactional.id": f"t-{uuid.uuid4()}", "log_level": 0}
    )
    producer.init_transactions(LIMIT)
    producer.begin_transaction()
    producer.produce("events", value)
    producer.commit_transaction(LIMIT)


def test_a_temporary_cluster_and_its_coordinators_are_ready_at_once(cluster: DevCluster) -> None:
    status = cluster.status()
    assert status.ready
    assert status.running
    assert status.bootstrap_servers == cluster.bootstrap_servers == cluster.listeners["PLAINTEXT"]
    assert [node.node_id for node in status.nodes] == [1]
    assert "started" in cluster.logs(1)
    assert len(cluster.logs(1, lines=3).splitlines()) == 3
    topics = AdminClient({"bootstrap.servers": cluster.bootstrap_servers}).list_topics(timeout=LIMIT).topics
    assert len(topics["__transaction_state"].partitions) == 4
    assert len(topics["__consumer_offsets"].partitions) == 4


@pytest.mark.slow
def test_a_killed_broker_restarts_with_its_address(cluster: DevCluster) -> None:
    commit_one(cluster)
    before = cluster.status()
    cluster.kill(1)
    status = cluster.status()
    assert not status.ready
    assert not status.nodes[0].alive
    assert len(list(cluster.follow_logs(1, lines=5))) == 5  # ends, since the broker has ended
    with pytest.raises(DevClusterError, match="is not running"):
        cluster.pause(1)

    thread = threading.Thread(target=cluster.start)  # the broker is bound to this process, not to the thread
    thread.start()
    thread.join()
    after = cluster.status()
    assert after.ready
    assert after.bootstrap_servers == before.bootstrap_servers
    assert after.nodes[0].pid != before.nodes[0].pid
    commit_one(cluster)


def test_a_paused_broker_keeps_its_connections_does_not_answer_and_is_not_waited_for(cluster: DevCluster) -> None:
    cluster.pause(1)
    try:
        status = cluster.status()
        assert status.nodes[0].alive
        assert status.nodes[0].paused
        assert not status.ready
        with socket.create_connection(("127.0.0.1", status.nodes[0].port), timeout=1):
            pass
        with pytest.raises(DevClusterError, match=r"(?s)are paused.*resume"):
            cluster.up()
    finally:
        cluster.resume(1)
    cluster.start(1)  # runs already: only waits until it is ready again
    until(lambda: cluster.status().ready, cluster.status)  # on a busy machine its controller may notice the pause only now


def test_another_cluster_on_the_port_is_not_taken_for_this_one(cluster: DevCluster) -> None:
    """It may have taken the port between the check and the start of the broker; its node has the same id."""
    record = ClusterRecord.load(cluster.data_dir)
    assert record is not None
    assert readiness.obstacle(record, record.nodes) is None
    record.cluster_id = "another"
    assert "answered by another cluster" in (readiness.obstacle(record, record.nodes) or "")


def test_an_unknown_node_is_named(cluster: DevCluster) -> None:
    with pytest.raises(DevClusterError, match=r"(?s)no node 7.*its nodes: 1"):
        cluster.kill(7)


@pytest.mark.soak  # all tests do this where no Java is installed
def test_the_bundled_java_runs_a_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin-without-java")
    monkeypatch.setenv("DUALWRITE_JAVA_HOME", "bundled")
    with DevCluster.temporary() as cluster:
        commit_one(cluster)


@pytest.mark.soak  # in CI: the tests of tests/crash with three brokers
def test_three_nodes_continue_with_two() -> None:
    with DevCluster.temporary(nodes=3) as three:
        assert three.status().ready
        assert three.bootstrap_servers.count(":") == 3
        commit_one(three)
        three.kill(2)
        commit_one(three)
        assert not three.status().ready
        three.start(2)
        assert three.status().ready
        three.restart(1)
        assert three.status().ready
        commit_one(three)
