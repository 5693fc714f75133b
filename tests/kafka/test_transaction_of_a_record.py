"""Which transaction a record belongs to, on a real broker."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from confluent_kafka import Producer

from dualwrite.admin import Ending, Reason, TransactionAdmin
from dualwrite.errors import BrokerError, UnknownTopicError
from fixtures.broker import wait_for_markers
from fixtures.open_transactions import left_open
from fixtures.pace import LIMIT
from fixtures.raw_producer import write_behind_the_coordinator

NewName = Callable[[str], str]


def test_each_record_of_a_partition(servers: str, admin: TransactionAdmin, topic: str, new_name: NewName) -> None:
    plain = Producer({"bootstrap.servers": servers, "enable.idempotence": False})
    plain.produce(topic, b"v")  # 0
    assert plain.flush(LIMIT) == 0
    name = new_name("id")
    left_open(servers, name, topic, messages=3).commit_transaction(LIMIT)  # 1, 2, 3, its marker at 4
    wait_for_markers(servers)
    left_open(servers, name, topic).abort_transaction(LIMIT)  # 5, 6
    wait_for_markers(servers)
    producer = left_open(servers, name, topic, messages=2)  # 7, 8
    records = [admin.transaction_of(topic, 0, offset) for offset in range(9)]
    assert [one.ending for one in records] == [
        Ending.NONE,
        *[Ending.COMMITTED] * 4,
        *[Ending.ABORTED] * 2,
        *[Ending.OPEN] * 2,
    ]
    assert [one.offset for one in records if one.is_marker] == [4, 6]
    assert (records[0].producer_id, records[0].described) == (None, None)
    assert {one.transactional_id for one in records[1:]} == {name}
    for one in records[7:]:
        assert one.opened is not None
        assert one.opened.producer.transaction_start_offset == 7
        assert one.hanging is None
        assert one.described is not None
        assert one.described.description is not None
        assert one.epoch == one.described.description.epoch
    del producer


def test_one_that_is_committed_behind_an_open_transaction(
    servers: str, admin: TransactionAdmin, topic: str, new_name: NewName
) -> None:
    """It lies beyond the last stable offset; its marker tells how it ended."""
    producer = left_open(servers, new_name("open"), topic)
    left_open(servers, new_name("id"), topic, messages=2).commit_transaction(LIMIT)
    wait_for_markers(servers)
    assert [admin.transaction_of(topic, 0, offset).ending for offset in (0, 1, 2)] == [Ending.OPEN, *[Ending.COMMITTED] * 2]
    del producer


def test_one_that_hangs(servers: str, admin: TransactionAdmin, topic: str) -> None:
    offset = write_behind_the_coordinator(servers, topic, 4_000_000, 0, int(time.time() * 1000))
    found = admin.transaction_of(topic, 0, offset)
    assert (found.ending, found.transactional_id, found.producer_id) == (Ending.OPEN, None, 4_000_000)
    assert found.hanging is not None
    assert found.hanging.reason is Reason.UNKNOWN_PRODUCER


def test_offsets_without_a_record(servers: str, admin: TransactionAdmin, topic: str, new_name: NewName) -> None:
    with pytest.raises(BrokerError, match=rf"There is no record {topic}-0 at 0.*ends at 0"):
        admin.transaction_of(topic, 0, 0)
    with pytest.raises(BrokerError, match=r"retention has deleted it, or it was not written yet"):
        admin.transaction_of(topic, 0, 5)
    with pytest.raises(UnknownTopicError, match="There is no partition"):
        admin.transaction_of(topic, 3, 0)
    with pytest.raises(UnknownTopicError, match="There is no topic"):
        admin.transaction_of(new_name("missing"), 0, 0)
