"""Transactions on ZooKeeper: all operations and the row in one multi, refused operations, the size limit."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError
from kazoo.protocol.serialization import CheckVersion, Create, Delete, SetData, Transaction
from kazoo.security import OPEN_ACL_UNSAFE, READ_ACL_UNSAFE
from zookeeper_scene import ID, ORDER, STATE, recorded

from dualwrite.errors import (
    FencedError,
    StoreCommitFailedError,
    StoreError,
    UsageError,
    WriterClosedError,
)
from dualwrite.stores.base import Claim, LostKind, LostTransaction, Resolution
from dualwrite.stores.zookeeper import ZooKeeperBatch, ZooKeeperStore
from dualwrite.stores.zookeeper.paths import DEFAULT_MAX_REQUEST_BYTES, multi_size
from dualwrite.stores.zookeeper.zookeeper_transaction import LONGEST_DELIVERY, ZooKeeperTransaction
from fixtures.pace import LIMIT
from fixtures.tables import table
from fixtures.zookeeper_server import ZooKeeperServer


def test_all_operations_and_the_row_become_visible_together(store: ZooKeeperStore, claim: Claim, plain: KazooClient) -> None:
    plain.create("/stock", b"3")
    plain.create("/old", b"")
    plain.create("/shop", b"")
    transaction = store.begin(claim)
    batch = transaction.handle
    batch.create(ORDER, b"chair")
    batch.create(f"{ORDER}/label", acl=READ_ACL_UNSAFE)
    batch.create(f"{ORDER}/line-", b"1", sequence=True)
    batch.set_data("/stock", b"2", version=0)
    batch.delete("/old")
    batch.check("/shop", 0)
    transaction.record(STATE, generation=2, transaction_number=7)
    assert plain.exists(ORDER) is None
    transaction.commit()
    assert plain.get(ORDER)[0] == b"chair"
    assert plain.get_acls(f"{ORDER}/label")[0] == READ_ACL_UNSAFE
    assert sorted(plain.get_children(ORDER)) == ["label", "line-0000000001"]
    assert plain.get("/stock")[0] == b"2"
    assert plain.exists("/old") is None
    row = store.read_claimed(claim)
    assert (row.prepared_state, row.prepared_generation, row.transaction_number) == (STATE, 2, 7)


def test_a_commit_needs_a_recorded_state(store: ZooKeeperStore, claim: Claim) -> None:
    with pytest.raises(UsageError, match="not recorded"):
        store.begin(claim).commit()


# --- the fence ------------------------------------------------------------------------------------------------------------


def test_fencing_is_reported_even_if_an_operation_of_the_user_fails(
    store: ZooKeeperStore, rival: ZooKeeperStore, claim: Claim, plain: KazooClient
) -> None:
    transaction = recorded(store, claim)
    plain.create(ORDER)
    rival.claim(ID, "theirs", timeout=LIMIT)
    with pytest.raises(FencedError):
        transaction.commit()


def test_a_row_deleted_between_record_and_commit(store: ZooKeeperStore, claim: Claim, plain: KazooClient) -> None:
    transaction = recorded(store, claim)
    plain.delete(f"/kafka_transaction_state/{ID}")
    with pytest.raises(FencedError, match="gone"):
        transaction.commit()
    assert plain.exists(ORDER) is None


# --- operations that fail -------------------------------------------------------------------------------------------------

FAILING: dict[str, tuple[Callable[[ZooKeeperBatch], object], str]] = {
    "create of a node that is there": (lambda b: b.create("/there"), "create of '/there': NodeExistsError"),
    "create without a parent": (lambda b: b.create("/no/parent"), "create of '/no/parent': NoNodeError"),
    "set_data of no node": (lambda b: b.set_data("/missing", b""), "set_data of '/missing': NoNodeError"),
    "set_data of a version": (lambda b: b.set_data("/there", b"", 5), "set_data of '/there': BadVersionError"),
    "delete of no node": (lambda b: b.delete("/missing"), "delete of '/missing': NoNodeError"),
    "delete of a parent": (lambda b: b.delete("/there"), "delete of '/there': NotEmptyError"),
    "check of a version": (lambda b: b.check("/there", 5), "check of '/there': BadVersionError"),
    "check of no node": (lambda b: b.check("/missing", 0), "check of '/missing': NoNodeError"),
    "a path that is none": (lambda b: b.create("/a\x01b"), "create of '/a\\x01b': BadArgumentsError"),
    "a child of an ephemeral": (
        lambda b: (b.create("/e", ephemeral=True), b.create("/e/child")),
        "create of '/e/child': NoChildrenForEphemeralsError",
    ),
}


@table("what", FAILING)
def test_an_operation_that_fails_is_named(store: ZooKeeperStore, claim: Claim, plain: KazooClient, what: str) -> None:
    operate, expected = FAILING[what]
    plain.ensure_path("/there/child")
    transaction = store.begin(claim)
    transaction.handle.create("/first")
    operate(transaction.handle)
    transaction.handle.create("/last")
    transaction.record(STATE, generation=0, transaction_number=1)
    with pytest.raises(StoreCommitFailedError) as caught:
        transaction.commit()
    error = caught.value
    assert error.cause == expected
    assert error.retriable
    assert f"{error.operation} of {error.path!r}: {type(error.__cause__).__name__}" == expected
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert plain.exists("/first") is None
    assert plain.exists("/last") is None
    assert store.read_claimed(claim).prepared_state is None


# --- the batch ------------------------------------------------------------------------------------------------------------


@table("how", ["record", "commit", "rollback"])
def test_a_batch_that_has_ended(store: ZooKeeperStore, claim: Claim, how: str) -> None:
    transaction = store.begin(claim)
    batch = transaction.handle
    if how != "rollback":
        transaction.record(STATE, generation=0, transaction_number=1)
    if how != "record":
        getattr(transaction, how)()
    calls: list[Callable[[], object]] = [
        lambda: batch.create("/b"),
        lambda: batch.set_data("/a", b""),
        lambda: batch.delete("/a"),
        lambda: batch.check("/a", 0),
        lambda: batch.get("/"),
        lambda: batch.exists("/"),
        lambda: batch.get_children("/"),
        batch.commit,
    ]
    for call in calls:
        with pytest.raises(WriterClosedError):
            call()


@table("path", ["/kafka_transaction_state", f"/kafka_transaction_state/{ID}", "kafka_transaction_state//x/y"])
def test_the_block_cannot_write_state_nodes(store: ZooKeeperStore, claim: Claim, path: str) -> None:
    batch = store.begin(claim).handle
    for operate in (
        partial(batch.create, path),
        partial(batch.set_data, path, b""),
        partial(batch.delete, path),
        partial(batch.check, path, 0),
    ):
        with pytest.raises(UsageError, match="only dualwrite writes"):
            operate()
    assert batch.operations == ()
    batch.create("/kafka_transaction_states")


def test_arguments_that_kazoo_refuses_leave_the_batch_unchanged(store: ZooKeeperStore, claim: Claim) -> None:
    transaction = store.begin(claim)
    batch = transaction.handle
    with pytest.raises(TypeError):
        batch.create("/a", "text")
    with pytest.raises(AttributeError):
        batch.create("/a", b"", acl=["anybody"])
    with pytest.raises(ValueError, match="relative"):
        batch.create("/a/../b")
    assert batch.operations == ()
    transaction.record(STATE, generation=0, transaction_number=1)
    transaction.commit()


def test_plain_reads(store: ZooKeeperStore, claim: Claim, plain: KazooClient) -> None:
    plain.create("/a", b"1")
    batch = store.begin(claim).handle
    batch.set_data("/a", b"2")
    data, stat = batch.get("/a")
    assert (data, stat.version) == (b"1", 0)
    assert batch.exists("/b") is None
    assert "a" in batch.get_children("/")
    with pytest.raises(NoNodeError):
        batch.get("/b")


# --- size -----------------------------------------------------------------------------------------------------------------


def test_sizes_are_computed_as_on_the_wire() -> None:
    operations = [
        Create("/a", b"xyz", OPEN_ACL_UNSAFE, 0),
        SetData("/ü", b"", 3),
        Delete("/a", -1),
        CheckVersion("/a", 2),
    ]
    for count in range(len(operations) + 1):
        assert multi_size(operations[:count]) == 8 + len(Transaction(operations[:count]).serialize())


def test_the_server_accepts_a_transaction_of_exactly_the_limit(store: ZooKeeperStore, claim: Claim, plain: KazooClient) -> None:
    """The rest of the space reserved for the row is filled manually, so that the multi has exactly the limit's size."""
    transaction = store.begin(claim)
    batch = transaction.handle
    with pytest.raises(StoreError, match=r"jute\.maxbuffer") as caught:
        batch.create(ORDER, b"x" * DEFAULT_MAX_REQUEST_BYTES)
    assert not isinstance(caught.value, StoreCommitFailedError)
    assert caught.value.limit == DEFAULT_MAX_REQUEST_BYTES
    over = caught.value.size - DEFAULT_MAX_REQUEST_BYTES
    with pytest.raises(StoreError, match=r"1,048,576 bytes"):
        batch.create(ORDER, b"x" * (DEFAULT_MAX_REQUEST_BYTES - over + 1))
    batch.create(ORDER, b"x" * (DEFAULT_MAX_REQUEST_BYTES - over))
    with pytest.raises(StoreError, match=r"jute\.maxbuffer"):
        batch.check(ORDER, 0)
    transaction.record(STATE, generation=0, transaction_number=1, delivery=LONGEST_DELIVERY)
    assert isinstance(transaction, ZooKeeperTransaction)
    operations = [*batch.operations]
    padding = DEFAULT_MAX_REQUEST_BYTES - multi_size(operations)
    assert 0 < padding < 200
    operations[1] = operations[1]._replace(data=operations[1].data + b"x" * padding)
    batch._request.operations[:] = operations[1:]
    transaction.commit()
    assert len(plain.get(ORDER)[0]) == DEFAULT_MAX_REQUEST_BYTES - over + padding


def test_a_row_that_grew_since_the_batch_was_filled(url: str) -> None:
    with ZooKeeperStore.from_url(url, max_request_bytes=60_000) as store:
        claim = store.claim(ID, "tests", timeout=LIMIT)
        transaction = store.begin(claim)
        with pytest.raises(StoreError) as caught:
            transaction.handle.create(ORDER, b"x" * 60_000)
        transaction.handle.create(ORDER, b"x" * (120_000 - caught.value.size))
        at = store.read_claimed(claim).updated_at
        for generation in range(5):
            store.record_resolution(claim, Resolution(lost=LostTransaction(LostKind.LOST, STATE, generation, at)))
        with pytest.raises(StoreError, match="the limit is 60,000"):
            transaction.record(STATE, generation=0, transaction_number=1, delivery=LONGEST_DELIVERY)
        transaction.rollback()
        assert store.client.exists(ORDER) is None


@pytest.mark.slow
def test_a_limit_that_was_raised_on_both_sides() -> None:
    with (
        ZooKeeperServer(jvm_options=["-Djute.maxbuffer=4000000"]) as server,
        ZooKeeperStore.from_url(server.url, max_request_bytes=4_000_000) as store,
    ):
        transaction = store.begin(store.claim(ID, "tests", timeout=LIMIT))
        transaction.handle.create(ORDER, b"x" * 3_900_000)
        transaction.record(STATE, generation=0, transaction_number=1)
        transaction.commit()
        assert len(store.client.get(ORDER)[0]) == 3_900_000
