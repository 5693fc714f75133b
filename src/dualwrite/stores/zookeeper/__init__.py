"""The ZooKeeper store: rows as nodes, the user's operations and the row in one multi, by kazoo. One room for each idea."""

from dualwrite.stores.zookeeper.batch import ZooKeeperBatch
from dualwrite.stores.zookeeper.store import ZooKeeperStore

__all__ = ["ZooKeeperBatch", "ZooKeeperStore"]
