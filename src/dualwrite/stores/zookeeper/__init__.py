"""The ZooKeeper store: rows as nodes, the user's operations and the row in one multi, using kazoo."""

from dualwrite.stores.zookeeper.batch import ZooKeeperBatch
from dualwrite.stores.zookeeper.store import ZooKeeperStore

__all__ = ["ZooKeeperBatch", "ZooKeeperStore"]
