"""The ZooKeeper store: rows as nodes, the user's operations and the row in one multi, using kazoo."""

from dualwrite.stores.zookeeper.zookeeper_store import ZooKeeperStore
from dualwrite.stores.zookeeper.zookeeper_transaction import ZooKeeperBatch

__all__ = ["ZooKeeperBatch", "ZooKeeperStore"]
