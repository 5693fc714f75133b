"""Which transaction a record belongs to, on a real broker."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from dualwrite.admin import Ending, Reason, TransactionAdmin, record_transaction
from dualwrite.errors import BrokerError, BrokerUnavailableError, UnknownTopicError
from dualwrite.kafka.client.log_proof import fate_in_log
from dualwrite.kafka.client.log_reader import LogNotReadableError
from dualwrite.state import Fate
from fixtures.pace import LIMIT, limit
from fixtures.producing import producing
from fixtures.transactions import PRODUCER_ID, Transactions


@pytest.mark.slow
def test_each_record_of_a_partition(scene: Transactions, admin: TransactionAdmin, topic: str) -> None:
    with producing(scene.servers, {"enable.idempotence": False}) as produce:
        produce(topic, b"v")  # 0
    name = scene.open(topic=topic, messages=3)  # 1, 2, 3, its marker at 4
    scene.end()
    scene.open(name, topic)  # 5, 6
    scene.end(commit=False)
    scene.open(name, topic, messages=2)  # 7, 8
    found = [admin.transaction_of(topic, 0, offset) for offset in range(9)]
    expected = [Ending.NONE, *[Ending.COMMITTED] * 4, *[Ending.ABORTED] * 2, *[Ending.OPEN] * 2]
    assert [one.ending for one in found] == expected
    assert [one.offset for one in found if one.is_marker] == [4, 6]
    assert (found[0].producer_id, found[0].described) == (None, None)
    assert {one.transactional_id for one in found[1:]} == {name}
    for one in found[7:]:
        assert one.opened is not None
        assert (one.opened.producer.transaction_start_offset, one.hanging) == (7, None)
        assert one.described is not None
        assert one.described.description is not None
        assert one.epoch == one.described.description.epoch


def test_a_committed_transaction_after_an_open_one(scene: Transactions, admin: TransactionAdmin, topic: str) -> None:
    """It lies beyond the last stable offset; its marker shows the outcome."""
    scene.open(topic=topic)
    scene.write(topic, 2)
    assert [admin.transaction_of(topic, 0, offset).ending for offset in (0, 1, 2)] == [Ending.OPEN, *[Ending.COMMITTED] * 2]


@pytest.mark.slow
def test_a_hanging_transaction(scene: Transactions, admin: TransactionAdmin) -> None:
    found = admin.transaction_of(scene.hang(age_ms=0), 0, 0)
    assert (found.ending, found.transactional_id, found.producer_id) == (Ending.OPEN, None, PRODUCER_ID)
    assert found.hanging is not None
    assert found.hanging.reason is Reason.UNKNOWN_PRODUCER


def test_offsets_without_a_record(scene: Transactions, admin: TransactionAdmin, topic: str) -> None:
    with pytest.raises(BrokerError, match=rf"(?s)There is no record {topic}-0 at 0.*ends at 0"):
        admin.transaction_of(topic, 0, 0)
    with pytest.raises(BrokerError, match=r"retention has deleted it, or it was not written yet"):
        admin.transaction_of(topic, 0, 5)
    with pytest.raises(UnknownTopicError, match="There is no partition"):
        admin.transaction_of(topic, 3, 0)
    with pytest.raises(UnknownTopicError, match="There is no topic"):
        admin.transaction_of(scene.new_name("missing"), 0, 0)


def test_a_record_deleted_during_the_search(
    scene: Transactions, admin: TransactionAdmin, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the record and that at its transaction's end: it is gone, and nothing is waited for."""
    scene.write(topic, 2)
    asked = []

    def deletes_first(*arguments: Any) -> Fate:
        asked.append(arguments)
        client = AdminClient({"bootstrap.servers": scene.servers})
        client.delete_records([TopicPartition(topic, 0, 3)])[TopicPartition(topic, 0)].result(LIMIT)
        return fate_in_log(*arguments)

    monkeypatch.setattr(record_transaction, "fate_in_log", deletes_first)
    with pytest.raises(BrokerError, match=rf"(?s)There is no record {topic}-0 at 0.*retention has deleted it"):
        admin.transaction_of(topic, 0, 0)
    assert len(asked) == 1


@pytest.mark.slow
def test_an_end_that_cannot_be_read(scene: Transactions, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cause is what happened, not a guess."""
    scene.write(topic)

    def fails(*_: Any) -> Fate:
        raise LogNotReadableError("the partition has no leader")

    monkeypatch.setattr(record_transaction, "fate_in_log", fails)
    with (
        TransactionAdmin(scene.servers, timeout=limit(1)) as admin,
        pytest.raises(BrokerUnavailableError, match="could not be read: the partition has no leader"),
    ):
        admin.transaction_of(topic, 0, 0)
