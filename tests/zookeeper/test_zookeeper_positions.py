"""Positions in ZooKeeper: a multi whose answer was lost, and two members that create the first position of their group."""

from __future__ import annotations

import pytest
from zookeeper_scene import MULTI

from dualwrite.errors import PositionMovedError, StoreCommitFailedError
from dualwrite.stores.positions import Move, Position
from dualwrite.stores.zookeeper import ZooKeeperStore
from dualwrite.testing.proxy import Link, TcpProxy
from fixtures.pace import LIMIT

GROUP = "billing"
FIRST = [Move(None, Position("orders", number, 5, "id")) for number in range(2)]
SECOND = [Move(one.after, Position("orders", one.after.partition, 9, "id")) for one in FIRST]


@pytest.mark.parametrize("others", [[], [Move(SECOND[0].after, Position("orders", 0, 7, "id"))]], ids=["alone", "and moved on"])
def test_a_reset_whose_answer_was_lost(
    proxied_store: ZooKeeperStore, proxy: TcpProxy, store: ZooKeeperStore, others: list[Move]
) -> None:
    """It has taken effect, and is not an error; unless another process has moved a position since."""
    positions = proxied_store.positions
    positions.prepare()
    positions.reset(GROUP, FIRST)
    cuts: list[Link] = []

    def cut(link: Link) -> None:
        cuts.append(link)
        store.positions.reset(GROUP, others)
        link.cut()

    proxy.on_client_bytes(MULTI, cut, when="answered")
    if others:
        with pytest.raises(PositionMovedError):
            positions.reset(GROUP, SECOND)
    else:
        positions.reset(GROUP, SECOND)
    assert [one.offset for one in positions.read(GROUP).values()] == ([7, 9] if others else [9, 9])
    assert cuts


def test_two_members_create_the_first_position_of_their_group(store: ZooKeeperStore) -> None:
    """Of one partition, one of them has to run its transaction again; that is not a failed attempt at its messages."""
    store.positions.prepare()
    transactions = []
    for number, move in enumerate([*FIRST, FIRST[0]]):
        transaction = store.begin(store.claim(f"member-{number}", "tests", timeout=LIMIT))
        store.positions.move(transaction, GROUP, [move])
        transaction.record(None, generation=0, transaction_number=1)
        transactions.append(transaction)
    for transaction in transactions[:2]:
        transaction.commit()
    with pytest.raises(StoreCommitFailedError) as caught:
        transactions[2].commit()
    assert caught.value.__cause__ is not None
    assert store.is_conflict(caught.value.__cause__)
    assert store.positions.read(GROUP).keys() == {("orders", 0), ("orders", 1)}


def test_a_node_of_the_users_that_exists_is_no_conflict(store: ZooKeeperStore) -> None:
    claim = store.claim("writer", "tests", timeout=LIMIT)
    for number in (1, 2):
        transaction = store.begin(claim)
        transaction.handle.create("/orders", b"")
        transaction.record(None, generation=0, transaction_number=number)
        if number == 1:
            transaction.commit()
    with pytest.raises(StoreCommitFailedError) as caught:
        transaction.commit()
    assert not store.is_conflict(caught.value)
    assert not store.is_conflict(caught.value.__cause__)  # type: ignore[arg-type]  # it has one
