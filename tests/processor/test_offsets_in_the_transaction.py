"""Offsets in the Kafka transaction (KIP-447): fenced by generation or member epoch, and pending while it is prepared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition

import dualwrite
from dualwrite.admin import TransactionAdmin
from dualwrite.admin.groups import GROUP_OFFSETS_TOPIC
from dualwrite.devcluster import DevCluster
from dualwrite.errors import ProducerFencedError
from dualwrite.kafka.base import GroupMetadata
from dualwrite.testing import failpoints
from fixtures.broker import make_topic, read_topic, wait_for_markers
from fixtures.fork_server import ForkedProcess
from fixtures.pace import LIMIT, ended, until, until_received
from fixtures.producing import producing
from fixtures.tiers import thinned
from processor.ledger import ledger
from processor.offsets_worker import BATCH, consuming

pytestmark = pytest.mark.slow

NewName = Callable[[str], str]
PROTOCOLS = ["classic", "consumer"]


@pytest.fixture
def url(tmp_path: Path) -> str:
    made = f"sqlite:///{tmp_path}/app.db"
    ledger(made).create()
    return made


@pytest.fixture
def source(brisk: DevCluster, new_name: NewName) -> str:
    """A topic of ten numbers."""
    name = new_name("source")
    make_topic(brisk, name)
    with producing(brisk.bootstrap_servers) as produce:
        for number in range(2 * BATCH):
            produce(name, b"%d" % number)
    return name


def next_number(consumer: Consumer) -> int:
    (message,) = until_received(lambda: consumer.consume(1, 0.2), "a message")
    assert message.error() is None
    return int(message.value() or b"")


@pytest.mark.parametrize("protocol", thinned(PROTOCOLS, kept=["consumer"]))
def test_a_prepared_transaction_keeps_the_group_waiting_until_recovery(
    brisk: DevCluster, url: str, source: str, new_name: NewName, protocol: str
) -> None:
    """The database has committed, so the offsets are decided; they become visible by recovery."""
    group, target, name = new_name("group"), new_name("target"), new_name("id")
    servers = brisk.bootstrap_servers
    arguments = [url, servers, group, source, target, name, protocol]
    with ForkedProcess("processor.offsets_worker", arguments, failpoints="after_db_commit=exit") as process:
        assert ended(process) == failpoints.EXIT_CODE
    with TransactionAdmin(servers, timeout=LIMIT) as admin:
        (held,) = admin.stuck(group=group).partitions
        assert held.end.topic == GROUP_OFFSETS_TOPIC
        assert [(one.group_id, one.offset) for one in held.groups] == [(group, None)]
    with consuming(servers, group, source, protocol) as consumer:

        def joined() -> list[TopicPartition]:
            assert consumer.poll(0.2) is None, "a message came before its position is known"
            return consumer.assignment()

        until(joined, "the member has its partition")
        assert consumer.poll(2.0) is None, "a message came before its position is known"
        with pytest.raises(KafkaException):
            consumer.committed([TopicPartition(source, 0)], 1.0)
        dualwrite.recover(url, kafka=servers, prefix=name).raise_for_problems()
        assert next_number(consumer) == BATCH
    assert ledger(url).numbers(group) == list(range(BATCH))
    assert [int(message.value() or b"") for message in read_topic(servers, target)] == list(range(BATCH))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_member_of_an_old_generation_is_fenced(
    brisk: DevCluster, url: str, source: str, new_name: NewName, protocol: str
) -> None:
    """Under KIP-848, the generation is the member's epoch; the coordinator compares it in the same way."""
    group, target = new_name("group"), new_name("target")
    servers = brisk.bootstrap_servers
    with (
        consuming(servers, group, source, protocol) as first,
        dualwrite.connect(url, kafka=servers, transactional_id=new_name("id")) as writer,
    ):
        assert next_number(first) == 0
        before = GroupMetadata.from_librdkafka(first.consumer_group_metadata())
        assert before.generation_id > 0
        assert before.member_id
        with consuming(servers, group, source, protocol) as second:
            until(lambda: _rebalanced(first, second, before), "the second has joined", pause=0.05)

            def late() -> None:
                with writer.transaction() as tx:
                    tx.send(target, "lost")
                    tx.send_offsets(_Stale(before), {(source, 0): 1})

            with pytest.raises(ProducerFencedError, match="generation"):
                late()
    wait_for_markers(servers)
    assert read_topic(servers, target) == []
    with consuming(servers, group, source, protocol) as third:
        assert next_number(third) == 0


def _rebalanced(first: Consumer, second: Consumer, before: GroupMetadata) -> bool:
    second.poll(0.1)
    first.poll(0.1)
    return GroupMetadata.from_librdkafka(first.consumer_group_metadata()).generation_id > before.generation_id


class _Stale:
    """A consumer that still has the metadata of an earlier generation, as one that was paused."""

    def __init__(self, metadata: GroupMetadata) -> None:
        self._metadata = metadata

    def consumer_group_metadata(self) -> Any:
        return self._metadata.for_librdkafka()
