"""A host name that resolves to another Kafka cluster after a reconnect: no transaction of the first one is looked up there."""

from __future__ import annotations

import pytest

from dualwrite.devcluster import DevCluster
from dualwrite.errors import ClusterMismatchError
from dualwrite.kafka.client.brokers import Network
from dualwrite.kafka.client.config import Address, KafkaConfig
from dualwrite.testing.proxy import TcpProxy

pytestmark = pytest.mark.slow


def address_of(cluster: DevCluster) -> tuple[str, int]:
    host, _, port = cluster.bootstrap_servers.partition(":")
    return host, int(port)


def test_a_broker_of_another_cluster_is_refused_after_a_reconnect(broker: DevCluster, other_broker: DevCluster) -> None:
    with TcpProxy(*address_of(broker)) as proxy:
        network = Network(KafkaConfig.of(f"127.0.0.1:{proxy.port}"))
        name = Address("127.0.0.1", proxy.port)
        first = network.cluster_id()
        proxy.cut()
        network.connection(name).close()
        assert network.connection(name).usable, "the same cluster, on a new connection"
        network.connection(name).close()
        proxy.redirect(*address_of(other_broker))
        with pytest.raises(ClusterMismatchError) as caught:
            network.connection(name)
        assert caught.value.stored_cluster_id == first
        other = Network(KafkaConfig.of(other_broker.bootstrap_servers))
        assert caught.value.seen_cluster_id == other.cluster_id()
        proxy.redirect(*address_of(broker))
        assert network.connection(name).usable, "the name leads to the first cluster again"
        for each in (network, other):
            each.close()
