"""Events and spans of a KafkaWriter: transactions on Kafka alone, which Kafka's commit decides."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from opentelemetry.trace import StatusCode

from dualwrite import Transaction
from dualwrite.devcluster import DevCluster
from dualwrite.errors import BrokerUnavailableError, InDoubtTransactionError
from dualwrite.observability import events as kinds
from dualwrite.observability import observers
from dualwrite.processor import DualProcessor, KafkaWriter, ProcessorOptions, kafka_writer
from fixtures.broker import make_topic, read_topic
from fixtures.pace import LIMIT, until
from observability.recorded_spans import recording, trace_id, traceparent

BRISK = {"fetch.wait.max.ms": 10, "session.timeout.ms": 6000, "heartbeat.interval.ms": 500}
PUBLISHED = [kinds.TransactionBegun, kinds.MessagesDelivered, kinds.TransactionCommitted]

NewName = Callable[[str], str]


@pytest.fixture
def topic(broker: DevCluster, new_name: NewName) -> str:
    name = new_name("topic")
    make_topic(broker, name, 1)
    return name


def test_a_trace_leads_through_a_processor_on_kafka_alone(broker: DevCluster, topic: str, new_name: NewName) -> None:
    answers = new_name("answers")
    make_topic(broker, answers, 1)
    servers = broker.bootstrap_servers

    def handle(message: Any, tx: Transaction[Any]) -> None:
        tx.send(answers, message.value())

    with recording() as spans, KafkaWriter(servers, transactional_id=new_name("translator")) as writer:
        with spans.tracer.start_as_current_span("request"), writer.transaction() as tx:
            tx.send(topic, b"1")
        processor = DualProcessor(
            writer,
            {"bootstrap.servers": servers, "group.id": new_name("group"), **BRISK},
            [topic],
            handle=handle,
            options=ProcessorOptions(batch=1, offsets="kafka"),
        )
        thread = threading.Thread(target=processor.run)
        thread.start()
        try:
            until(lambda: bool(spans.named(f"process {topic}")), "the message is processed")
        finally:
            processor.stop()
            thread.join(LIMIT)

        request = spans.one("request")
        sent = spans.child(spans.child(request, "transaction"), f"send {topic}")
        process = spans.child(sent, f"process {topic}")
        transaction = spans.child(process, "transaction")
        assert spans.children(transaction) == ["commit kafka", "deliver", f"send {answers}"]
        assert (transaction.attributes or {})["dualwrite.outcome"] == "committed"
        assert trace_id(transaction) == trace_id(request)
        (answer,) = read_topic(servers, answers)
        assert dict(answer.headers() or []) == {"traceparent": traceparent(spans.child(transaction, f"send {answers}"))}
        assert not spans.named("commit database")


def test_its_transactions_report_their_steps(
    broker: DevCluster, topic: str, new_name: NewName, events: list[kinds.Event]
) -> None:
    name = new_name("writer")
    with KafkaWriter(broker.bootstrap_servers, transactional_id=name) as writer:
        with writer.transaction() as tx:
            tx.send(topic, b"1")
            tx.send(topic, b"2")
        assert [type(event) for event in events] == PUBLISHED
        begun, _, last = events
        assert isinstance(begun, kinds.TransactionBegun)
        assert (begun.transactional_id, begun.has_database) == (name, False)
        assert isinstance(last, kinds.TransactionCommitted)
        assert (last.outcome, last.messages, last.number) == ("published", 2, begun.number)
        assert (last.steps.record, last.steps.database_commit) == (0.0, 0.0)
        assert min(last.steps.block, last.steps.delivery, last.steps.kafka_commit) > 0
        events.clear()
        error = ValueError("no")
        with suppress(ValueError), writer.transaction() as tx:
            tx.send(topic, b"3")
            raise error
    assert [type(event) for event in events] == [kinds.TransactionBegun, kinds.TransactionRolledBack]
    rolled_back = events[-1]
    assert isinstance(rolled_back, kinds.TransactionRolledBack)
    assert rolled_back.error is error


def test_an_unanswered_commit_of_kafka_has_the_error(
    broker: DevCluster, topic: str, new_name: NewName, events: list[kinds.Event]
) -> None:
    def silent(**_: Any) -> None:
        raise BrokerUnavailableError("silent")

    with recording() as spans, KafkaWriter(broker.bootstrap_servers, transactional_id=new_name("writer")) as writer:
        writer._producer.commit_transaction = silent  # type: ignore[union-attr, method-assign]
        with pytest.raises(InDoubtTransactionError), writer.transaction() as tx:
            tx.send(topic, b"1")
        transaction = spans.one("transaction")
        assert spans.children(transaction) == ["commit kafka", "deliver", f"send {topic}"]
        assert (transaction.attributes or {})["dualwrite.outcome"] == "in doubt"
        assert spans.child(transaction, "commit kafka").status.status_code is StatusCode.ERROR
        assert transaction.status.status_code is StatusCode.ERROR
    assert [type(event) for event in events][-1] is kinds.TransactionInDoubt


def test_no_event_is_made_while_nobody_listens(
    broker: DevCluster, topic: str, new_name: NewName, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(kafka_writer, "TransactionReport", lambda *names, **_: made.append(names))
    assert not observers.installed
    with KafkaWriter(broker.bootstrap_servers, transactional_id=new_name("writer")) as writer, writer.transaction() as tx:
        tx.send(topic, b"1")
    assert made == []
    assert [message.value() for message in read_topic(broker.bootstrap_servers, topic)] == [b"1"]
