"""What the ZooKeeper tests share: an id, a state, a user's node, and how to end a session from outside."""

from __future__ import annotations

from kazoo.client import KazooClient

from dualwrite.state import PreparedTxnState
from dualwrite.stores.base import Claim, StoreTransaction
from dualwrite.stores.zookeeper import ZooKeeperStore
from fixtures.pace import LIMIT, until

ID = "orders"
STATE = PreparedTxnState(4711, 3)
ORDER = "/order"
SHORT_SESSION = 1.5

MULTI = b"\x00\x00\x00\x0e\x00\x00\x00\x05\x00\xff\xff\xff\xff"
"""How a multi that changes a row begins on the wire: its type, and the header of its first operation, a setData."""


def recorded(store: ZooKeeperStore, claim: Claim, number: int = 1) -> StoreTransaction:
    transaction = store.begin(claim)
    transaction.handle.create(ORDER, b"chair")
    transaction.record(STATE, generation=0, transaction_number=number)
    return transaction


def assert_outcome(store: ZooKeeperStore, claim: Claim, *, committed: bool) -> None:
    """What the writer does after an unknown commit (rule F8)."""
    again = store.claim(ID, "tests", timeout=LIMIT, expected_fence=claim.fence)
    row = store.read_claimed(again)
    assert (row.transaction_number == 1, row.prepared_state) == (committed, STATE if committed else None)
    assert (store.client.exists(ORDER) is not None) is committed


def expire(hosts: str, client: KazooClient) -> None:
    """Let the client's session expire at once: a second connection takes the session over and closes it."""
    session = client.client_id
    assert session is not None
    second = KazooClient(hosts, client_id=session)
    second.start()
    second.stop()
    second.close()
    until(lambda: client.connected and client.client_id[0] != session[0])
