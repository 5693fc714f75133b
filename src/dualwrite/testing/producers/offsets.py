"""Conformance of consumed offsets: they are committed with the transaction, or not at all (KIP-447)."""

from __future__ import annotations

import pytest

from dualwrite.errors import ProducerFencedError
from dualwrite.kafka.offsets import ConsumedOffset, GroupMetadata
from dualwrite.testing.limits import TIMEOUT
from dualwrite.testing.producers.scene import ProducerScene, prepare_and_commit


class OffsetConformance:
    """`send_offsets_to_transaction`, for a group whose consumers assign their partitions manually."""

    def test_offsets_are_committed_with_the_messages(self, scene: ProducerScene) -> None:
        """Not before, and for every given partition."""
        producer, source, topic = scene.new_producer(), scene.new_name("source"), scene.new_name("topic")
        group = GroupMetadata(scene.new_name("group"))
        scene.make_topic(source, 2)
        producer.begin_transaction()
        producer.send(topic, b"v")
        offsets = [ConsumedOffset(source, 0, 5), ConsumedOffset(source, 1, 7, metadata="a text")]
        producer.send_offsets_to_transaction(offsets, group, timeout=TIMEOUT)
        producer.prepare_transaction(timeout=TIMEOUT)
        assert scene.committed_offset(group.group_id, source, 0) is None
        producer.commit_transaction(timeout=TIMEOUT)
        assert [scene.committed_offset(group.group_id, source, p) for p in (0, 1)] == [5, 7]
        assert scene.values(topic) == [b"v"]

    def test_offsets_alone_are_a_transaction(self, scene: ProducerScene) -> None:
        """The transaction has a state, and is known to the coordinator."""
        producer, source = scene.new_producer(), scene.new_name("source")
        group = GroupMetadata(scene.new_name("group"))
        scene.make_topic(source)
        for offset in (1, 2):
            producer.begin_transaction()
            producer.send_offsets_to_transaction(iter([ConsumedOffset(source, 0, offset)]), group, timeout=TIMEOUT)
            state = producer.prepare_transaction(timeout=TIMEOUT)
            assert state is not None
            assert scene.describe(producer).epoch == state.epoch
            producer.commit_transaction(timeout=TIMEOUT)
            assert scene.committed_offset(group.group_id, source, 0) == offset

    def test_offsets_of_an_aborted_transaction_are_not_committed(self, scene: ProducerScene) -> None:
        """Offsets that were committed before are kept."""
        producer, source = scene.new_producer(), scene.new_name("source")
        group = GroupMetadata(scene.new_name("group"))
        scene.make_topic(source)
        committed, aborted = 3, 9
        for offset, end in ((committed, producer.commit_transaction), (aborted, producer.abort_transaction)):
            producer.begin_transaction()
            producer.send_offsets_to_transaction([ConsumedOffset(source, 0, offset)], group, timeout=TIMEOUT)
            producer.prepare_transaction(timeout=TIMEOUT)
            end(timeout=TIMEOUT)
        assert scene.committed_offset(group.group_id, source, 0) == committed

    def test_an_empty_list_of_offsets_adds_nothing_to_the_transaction(self, scene: ProducerScene) -> None:
        """The transaction stays empty."""
        producer = scene.new_producer()
        producer.begin_transaction()
        producer.send_offsets_to_transaction([], GroupMetadata(scene.new_name("group")), timeout=TIMEOUT)
        assert prepare_and_commit(producer) is None

    def test_a_consumer_of_an_old_generation_is_fenced(self, scene: ProducerScene) -> None:
        """Its partitions may belong to another member now: the transaction can only be aborted."""
        producer, source, topic = scene.new_producer(), scene.new_name("source"), scene.new_name("topic")
        scene.make_topic(source)
        gone = GroupMetadata(scene.new_name("group"), generation_id=7, member_id="gone")
        producer.begin_transaction()
        producer.send(topic, b"lost")
        with pytest.raises(ProducerFencedError, match="generation"):
            producer.send_offsets_to_transaction([ConsumedOffset(source, 0, 5)], gone, timeout=TIMEOUT)
        producer = scene.abort(producer)
        producer.begin_transaction()
        producer.send(topic, b"next")
        prepare_and_commit(producer)
        assert scene.values(topic) == [b"next"]
        assert scene.committed_offset(gone.group_id, source, 0) is None
