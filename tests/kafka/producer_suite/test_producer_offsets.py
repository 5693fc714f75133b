"""The producers' suite: `send_offsets_to_transaction` (KIP-447)."""

from __future__ import annotations

import pytest
from confluent_kafka import Consumer
from producer_scene import ProducerScene, prepare_and_commit

from dualwrite.errors import ProducerFencedError
from dualwrite.kafka.base import GroupMetadata, progress_of
from dualwrite.state import ConsumedOffset
from fixtures.pace import LIMIT


@pytest.mark.parametrize("instance", [None, "static member"])
def test_consumer_offsets_are_part_of_the_transaction(scene: ProducerScene, instance: str | None) -> None:
    """The group metadata of confluent-kafka's consumer matches what the group's coordinator knows (KIP-447)."""
    producer, source = scene.new_producer(), scene.new_name("source")
    producer.begin_transaction()
    producer.send(source, b"in")
    producer.commit_transaction(timeout=LIMIT)
    settings = {
        "bootstrap.servers": scene.servers,
        "group.id": scene.new_name("group"),
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
    }
    consumer = Consumer(settings if instance is None else {**settings, "group.instance.id": instance})
    consumer.subscribe([source])
    try:
        message = consumer.poll(LIMIT)
        assert message is not None
        assert message.value() == b"in"
        offsets, group = progress_of(consumer)
        assert group.group_instance_id == instance
        assert group.generation_id > 0
        producer.begin_transaction()
        producer.send_offsets_to_transaction(offsets, group, timeout=LIMIT)
        assert producer.prepare_transaction(timeout=LIMIT) is not None
        producer.commit_transaction(timeout=LIMIT)
        (position,) = consumer.committed(consumer.assignment(), timeout=LIMIT)
        assert position.offset == 1
    finally:
        consumer.close()


def test_offsets_are_committed_with_the_messages(scene: ProducerScene) -> None:
    """Not before, and for every given partition."""
    producer, source, topic = scene.new_producer(), scene.new_name("source"), scene.new_name("topic")
    group = GroupMetadata(scene.new_name("group"))
    scene.make_topic(source, 2)
    producer.begin_transaction()
    producer.send(topic, b"v")
    offsets = [ConsumedOffset(source, 0, 5), ConsumedOffset(source, 1, 7, metadata="a text")]
    producer.send_offsets_to_transaction(offsets, group, timeout=LIMIT)
    producer.prepare_transaction(timeout=LIMIT)
    assert scene.committed_offset(group.group_id, source, 0) is None
    producer.commit_transaction(timeout=LIMIT)
    assert [scene.committed_offset(group.group_id, source, p) for p in (0, 1)] == [5, 7]
    assert scene.values(topic) == [b"v"]


def test_offsets_alone_are_a_transaction(scene: ProducerScene) -> None:
    """The transaction has a state, and is known to the coordinator."""
    producer, source = scene.new_producer(), scene.new_name("source")
    group = GroupMetadata(scene.new_name("group"))
    scene.make_topic(source)
    for offset in (1, 2):
        producer.begin_transaction()
        producer.send_offsets_to_transaction(iter([ConsumedOffset(source, 0, offset)]), group, timeout=LIMIT)
        state = producer.prepare_transaction(timeout=LIMIT)
        assert state is not None
        assert scene.describe(producer).epoch == state.epoch
        producer.commit_transaction(timeout=LIMIT)
        assert scene.committed_offset(group.group_id, source, 0) == offset


def test_offsets_of_an_aborted_transaction_are_not_committed(scene: ProducerScene) -> None:
    """Offsets that were committed before are kept."""
    producer, source = scene.new_producer(), scene.new_name("source")
    group = GroupMetadata(scene.new_name("group"))
    scene.make_topic(source)
    committed, aborted = 3, 9
    for offset, end in ((committed, producer.commit_transaction), (aborted, producer.abort_transaction)):
        producer.begin_transaction()
        producer.send_offsets_to_transaction([ConsumedOffset(source, 0, offset)], group, timeout=LIMIT)
        producer.prepare_transaction(timeout=LIMIT)
        end(timeout=LIMIT)
    assert scene.committed_offset(group.group_id, source, 0) == committed


def test_an_empty_list_of_offsets_adds_nothing_to_the_transaction(scene: ProducerScene) -> None:
    """The transaction stays empty."""
    producer = scene.new_producer()
    producer.begin_transaction()
    producer.send_offsets_to_transaction([], GroupMetadata(scene.new_name("group")), timeout=LIMIT)
    assert prepare_and_commit(producer) is None


def test_a_consumer_of_an_old_generation_is_fenced(scene: ProducerScene) -> None:
    """Its partitions may belong to another member now: the transaction can only be aborted."""
    producer, source, topic = scene.new_producer(), scene.new_name("source"), scene.new_name("topic")
    scene.make_topic(source)
    gone = GroupMetadata(scene.new_name("group"), generation_id=7, member_id="gone")
    producer.begin_transaction()
    producer.send(topic, b"lost")
    with pytest.raises(ProducerFencedError, match="generation"):
        producer.send_offsets_to_transaction([ConsumedOffset(source, 0, 5)], gone, timeout=LIMIT)
    scene.check_next_transaction(producer, topic)
    assert scene.committed_offset(gone.group_id, source, 0) is None
