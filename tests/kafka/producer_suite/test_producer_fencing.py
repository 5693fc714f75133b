"""The producers' suite: transactions that another process ends, as recovery does, and ids that are taken over."""

from __future__ import annotations

import pytest
from producer_scene import ProducerScene, commit_one, prepare_and_commit

from dualwrite.errors import DeliveryError, PrepareError, ProducerFencedError
from dualwrite.state import TransactionStatus
from fixtures.pace import LIMIT


def test_a_prepared_transaction_aborted_by_another_process_cannot_be_committed(scene: ProducerScene) -> None:
    """EndTxn v5 of another process fences the producer."""
    producer, topic = scene.new_producer(), scene.new_name("topic")
    producer.begin_transaction()
    producer.send(topic, b"lost")
    producer.prepare_transaction(timeout=LIMIT)
    scene.end_by_another_process(producer, commit=False)
    with pytest.raises(ProducerFencedError) as caught:
        producer.commit_transaction(timeout=LIMIT)
    assert caught.value.transactional_id == producer.kafka_transactional_id
    assert producer.must_be_replaced
    assert scene.values(topic) == []


def test_a_prepared_transaction_committed_by_another_process_stays_committed(scene: ProducerScene) -> None:
    """`commit_transaction` returns, or raises ProducerFencedError."""
    producer, topic = scene.new_producer(), scene.new_name("topic")
    producer.begin_transaction()
    producer.send(topic, b"kept")
    producer.prepare_transaction(timeout=LIMIT)
    scene.end_by_another_process(producer, commit=True)
    try:
        producer.commit_transaction(timeout=LIMIT)
    except ProducerFencedError:
        assert producer.must_be_replaced
    assert scene.values(topic) == [b"kept"]


def test_a_prepared_transaction_committed_by_another_process_cannot_be_aborted(scene: ProducerScene) -> None:
    """The message is visible, so `abort_transaction` must not return normally."""
    producer, topic = scene.new_producer(), scene.new_name("topic")
    producer.begin_transaction()
    producer.send(topic, b"kept")
    producer.prepare_transaction(timeout=LIMIT)
    scene.end_by_another_process(producer, commit=True)
    with pytest.raises(ProducerFencedError):
        producer.abort_transaction(timeout=LIMIT)
    assert producer.must_be_replaced
    assert scene.values(topic) == [b"kept"]


def test_a_transaction_aborted_by_another_process_cannot_be_prepared(scene: ProducerScene) -> None:
    """Once the abort markers are written; later messages of the transaction are not stored either.

    Three times, since a client with background threads may notice it at different moments.
    """
    for _ in range(3):
        producer, topic = scene.new_producer(), scene.new_name("topic")
        scene.make_topic(topic)
        producer.begin_transaction()
        scene.send_until_ongoing(producer, topic)
        scene.end_by_another_process(producer, commit=False)
        scene.describe(producer, lambda found: found.status is TransactionStatus.COMPLETE_ABORT)
        with pytest.raises((PrepareError, ProducerFencedError, DeliveryError)):  # noqa: PT012  (in any of the calls)
            producer.send(topic, b"lost, too")
            producer.prepare_transaction(timeout=LIMIT)
        scene.check_next_transaction(producer, topic)


def test_a_producer_whose_id_was_taken_over_is_fenced(scene: ProducerScene) -> None:
    """The takeover aborts its prepared transaction; it can't commit, and must be replaced."""
    kafka_id, topic = scene.new_name("id"), scene.new_name("topic")
    old = scene.new_producer(kafka_id)
    old.begin_transaction()
    old.send(topic, b"old")
    old.prepare_transaction(timeout=LIMIT)
    new = scene.new_producer(kafka_id)
    with pytest.raises(ProducerFencedError):
        old.commit_transaction(timeout=LIMIT)
    assert old.must_be_replaced
    commit_one(new, topic, b"new")
    assert scene.values(topic) == [b"new"]


def test_an_idle_producer_whose_id_was_taken_over_is_fenced_in_its_next_transaction(scene: ProducerScene) -> None:
    """None of its messages become visible, and its successor is not affected."""
    kafka_id, topic = scene.new_name("id"), scene.new_name("topic")
    old = scene.new_producer(kafka_id)
    commit_one(old, topic, b"before")
    new = scene.new_producer(kafka_id)
    new.begin_transaction()
    new.send(topic, b"new")
    with pytest.raises((ProducerFencedError, DeliveryError)):  # noqa: PT012  (in any of the calls)
        old.begin_transaction()
        old.send(topic, b"old")
        old.prepare_transaction(timeout=LIMIT)
    prepare_and_commit(new)
    assert scene.values(topic) == [b"before", b"new"]
