"""Traces with OpenTelemetry: from a request through a unit, both commits and the message to the handler of a consumer."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from opentelemetry import baggage, context
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.semconv import schemas
from opentelemetry.semconv._incubating.attributes import messaging_attributes as conventions
from opentelemetry.trace import SpanKind, StatusCode, TraceFlags

import dualwrite
from crash.scene import Scene, Worker
from dualwrite import Transaction, aio
from dualwrite.devcluster import DevCluster
from dualwrite.errors import InDoubtTransactionError, LostTransactionError
from dualwrite.observability import events, observers, otel_names, otel_traces, tracing
from dualwrite.processor import DualProcessor, ProcessorOptions
from dualwrite.testing import failpoints as points
from fixtures.broker import read_topic
from fixtures.pace import LIMIT, until, until_recorded
from fixtures.tables import table
from observability.recorded_spans import (
    RecordedSpans,
    linked,
    parent_id,
    recording,
    span_id,
    trace_id,
    traceparent,
)
from pool.aio_scene import INSERT, in_pool
from pool.pool_scene import both, both_producers, held, open_pool
from relay.relay_scene import RelayScene
from relay.relay_scene import running as relaying

COMMITS = ["commit database", "commit kafka", "deliver"]
BRISK = {"fetch.wait.max.ms": 10, "session.timeout.ms": 6000, "heartbeat.interval.ms": 500}


@pytest.fixture
def spans() -> Iterator[RecordedSpans]:
    with recording() as spans:
        yield spans


def headers(scene: Scene, topic: str | None = None) -> list[dict[str, bytes]]:
    """The headers of the topic's messages; none has one twice."""
    found = []
    for message in read_topic(scene.bootstrap, topic or scene.topic):
        pairs = message.headers() or []
        assert len(dict(pairs)) == len(pairs)
        found.append(dict(pairs))
    return found


def consume(scene: Scene, handle: Callable[[Any, Transaction[Any]], None], expected: int, **options: Any) -> None:
    """Process the messages of the topic with a pool, until the handler's units have so many rows."""
    with open_pool(scene) as pool:
        processor = DualProcessor(
            pool,
            {**scene.settings, **BRISK, "group.id": f"group-{scene.transactional_id}"},
            [scene.topic],
            handle=handle,
            options=ProcessorOptions(**options),
        )
        thread = threading.Thread(target=processor.run)
        thread.start()

        def handled() -> list[int]:
            assert thread.is_alive(), "the processor has ended"
            return scene.events.numbers(f"handled-{scene.transactional_id}")

        try:
            until_recorded(handled, range(expected))
        finally:
            processor.stop()
            thread.join(LIMIT)


def booked(scene: Scene, tx: Transaction[Any], number: int) -> None:
    tx.db.execute(INSERT, {"writer": f"handled-{scene.transactional_id}", "number": number})


# --- one trace ----------------------------------------------------------------------------------------------------------------


@both_producers
def test_one_trace_leads_from_a_request_to_the_handler_of_a_consumer(scene: Scene, spans: RecordedSpans) -> None:
    def place_order(tx: Transaction[Any]) -> None:
        with spans.tracer.start_as_current_span("work"):
            both(tx, scene, 1)

    def handle(message: Any, tx: Transaction[Any]) -> None:
        with spans.tracer.start_as_current_span("handled"):
            booked(scene, tx, 0)
            tx.send(f"{scene.topic}-answers", message.value())

    with open_pool(scene) as pool, spans.tracer.start_as_current_span("request"):
        pool.run(place_order)
    consume(scene, handle, 1, batch=1)

    request = spans.one("request")
    unit = spans.child(request, place_order.__qualname__)
    assert spans.children(unit) == [*COMMITS, "work"]
    sent = spans.child(spans.child(unit, "work"), f"send {scene.topic}")
    assert headers(scene) == [{"traceparent": traceparent(sent)}]
    process = spans.child(sent, f"process {scene.topic}")
    (handler,) = [span for span in spans.all if parent_id(span) == span_id(process)]
    assert spans.children(handler) == [*COMMITS, "handled"]
    assert spans.children(spans.child(handler, "handled")) == [f"send {scene.topic}-answers"]
    assert {trace_id(span) for span in spans.all} == {trace_id(request)}
    assert all(span.status.status_code is StatusCode.UNSET for span in spans.all)


@pytest.mark.slow
def test_one_trace_leads_through_a_crash_and_recovery(scene: Scene, spans: RecordedSpans) -> None:
    """The service is killed after the database's commit; another process, this one, recovers, and consumes the message."""
    with spans.tracer.start_as_current_span("request") as request:
        parent = f"00-{trace_id(request)}-{span_id(request)}-01"
    where = [scene.url, scene.bootstrap, scene.transactional_id, scene.topic, "1", parent]
    service = Worker(where, "after_db_commit=kill", module="observability.traced_service")
    service.killed()
    assert headers(scene) == []
    report = dualwrite.recover(scene.events.database, kafka=scene.settings, prefix=scene.transactional_id)
    assert not report.failed
    consume(scene, lambda _, tx: booked(scene, tx, 0), 1, batch=1)

    exported = {span["name"]: span for span in map(json.loads, (line for line in service.lines if line.startswith("{")))}
    sent = exported[f"send {scene.topic}"]
    assert headers(scene) == [{"traceparent": f"00-{sent['trace']}-{sent['id']}-01".encode()}]
    process = spans.one(f"process {scene.topic}")
    assert parent_id(process) == sent["id"]
    assert trace_id(process) == sent["trace"] == trace_id(spans.one("request"))
    recovered = [
        span for span in spans.named("recover") if (span.attributes or {})["dualwrite.recovery.outcome"] == "COMMITTED"
    ]
    assert [(span.attributes or {})["dualwrite.transactional_id"] for span in recovered] == [f"{scene.transactional_id}.1"]


# --- units, blocks and groups -------------------------------------------------------------------------------------------------


def test_each_unit_of_a_group_has_the_commits_in_its_own_trace(scene: Scene, spans: RecordedSpans) -> None:
    with open_pool(scene, size=1) as pool:
        with held(pool):
            futures = []
            for number in range(3):
                with spans.tracer.start_as_current_span(f"request {number}"):
                    futures.append(pool.submit(both, scene, number))
        assert sorted(future.result(LIMIT) for future in futures) == [0, 1, 2]
    of_units = [spans.child(spans.one(f"request {number}"), "both") for number in range(3)]
    assert len({trace_id(span) for span in of_units}) == 3
    for unit in of_units:
        assert spans.children(unit) == [*COMMITS, f"send {scene.topic}"]
        attributes = unit.attributes or {}
        assert attributes["dualwrite.group.size"] == 3
        assert attributes["dualwrite.transactional_id"] == f"{scene.transactional_id}.1"
        assert str(attributes["dualwrite.lane"]).startswith(f"{scene.transactional_id}.1")
        assert attributes["dualwrite.outcome"] == "committed"
        assert float(str(attributes["dualwrite.unit.waited"])) > 0
        assert_in_order(unit, *(spans.child(unit, name) for name in ("deliver", "commit database", "commit kafka")))
    commits = spans.named("commit kafka")
    assert len({(span.start_time, span.end_time) for span in commits if parent_id(span) in map(span_id, of_units)}) == 1


def assert_in_order(unit: ReadableSpan, *steps: ReadableSpan) -> None:
    """Check that steps follow each other, after the unit's beginning. Clocks of durations and of times may differ by 1 ms."""
    before = unit.start_time or 0
    for step in steps:
        assert step.start_time is not None
        assert step.end_time is not None
        assert before - 1_000_000 <= step.start_time <= step.end_time
        before = step.end_time


def test_a_unit_that_fails_in_a_group_is_the_only_one_rolled_back(scene: Scene, spans: RecordedSpans) -> None:
    def fails(tx: Transaction[Any]) -> None:
        both(tx, scene, 7)
        raise LookupError("no such customer")

    with open_pool(scene, size=1) as pool:
        with held(pool):
            good, bad = pool.submit(both, scene, 1), pool.submit(fails)
        assert good.result(LIMIT) == 1
        assert isinstance(bad.exception(LIMIT), LookupError)
    assert [(span.attributes or {})["dualwrite.outcome"] for span in spans.named("both")] == ["undone", "committed"]
    undone, committed = spans.named("both")
    assert spans.children(undone) == [f"send {scene.topic}"]
    assert undone.status.status_code is StatusCode.UNSET
    assert spans.children(committed) == [*COMMITS, f"send {scene.topic}"]
    failed = spans.named(fails.__qualname__)
    assert failed
    for span in failed:
        assert spans.children(span) == [f"send {scene.topic}"]
        assert (span.attributes or {})["dualwrite.outcome"] == "rolled back"
        assert (span.attributes or {})["error.type"] == "LookupError"
        assert span.status.status_code is StatusCode.ERROR
        assert [event.name for event in span.events] == ["exception"]


def test_a_block_has_a_span_with_its_commits(scene: Scene, spans: RecordedSpans) -> None:
    with scene.connect() as writer:
        with spans.tracer.start_as_current_span("request"), writer.transaction() as tx:
            both(tx, scene, 1)
            with spans.tracer.start_as_current_span("work"):
                pass
        with suppress(LookupError), writer.transaction() as tx:
            both(tx, scene, 2)
            raise LookupError
        with writer.transaction() as tx:  # no messages: nothing at Kafka
            scene.events.write(tx.db, scene.transactional_id, 3)
    committed = spans.child(spans.one("request"), "transaction")
    assert spans.children(committed) == [*COMMITS, f"send {scene.topic}", "work"]
    failed, without = [span for span in spans.named("transaction") if parent_id(span) is None]
    assert spans.children(failed) == [f"send {scene.topic}"]
    assert (failed.status.status_code, (failed.attributes or {})["dualwrite.outcome"]) == (StatusCode.ERROR, "rolled back")
    assert spans.children(without) == ["commit database"]


def test_a_commit_that_was_in_doubt_for_a_moment(scene: Scene, spans: RecordedSpans) -> None:
    gone = points.armed("before_kafka_commit", points.raises(RuntimeError("gone")))
    with scene.connect() as writer, gone, suppress(RuntimeError), writer.transaction() as tx:
        both(tx, scene, 1)
    assert spans.one("transaction").status.status_code is StatusCode.ERROR  # which says that it has committed
    attributes = spans.one("transaction").attributes or {}
    assert (attributes["dualwrite.was_in_doubt"], attributes["dualwrite.outcome"]) == (True, "committed")
    assert spans.children(spans.one("transaction")) == [*COMMITS, f"send {scene.topic}"]


NAME = ("orders-1", "orders-1~1", 7)
DOUBT = InDoubtTransactionError("No answer.", transactional_id="orders-1", next_step="wait", state="", database_committed=None)
LOST = ["!commit kafka", "commit database", "deliver"]
LOSS = LostTransactionError("Aborted.", transactional_id="orders-1", next_step="publish again", lost=())
PREPARED = events.MessagesDelivered(*NAME, 1, 0.001)
DECIDED = events.DatabaseCommitted(*NAME, 0.001)


@table(
    "reports, error, outcome, children",
    [
        ([PREPARED, events.TransactionRolledBack(*NAME, LookupError(), 1.0)], LookupError(), "rolled back", ["deliver"]),
        ([PREPARED, events.TransactionInDoubt(*NAME, DOUBT, 1.0)], DOUBT, "in doubt", ["!commit database", "deliver"]),
        (
            [PREPARED, DECIDED, events.TransactionInDoubt(*NAME, DOUBT, 1.0)],
            DOUBT,
            "in doubt",
            ["!commit kafka", "commit database", "deliver"],
        ),
        (
            [PREPARED, DECIDED, events.TransactionLost(*NAME, LOSS, 1.0)],
            LOSS,
            "lost",
            ["!commit kafka", "commit database", "deliver"],
        ),
        ([], tracing.UndoneError(), "undone", []),
        ([], asyncio.CancelledError(), "rolled back", []),
        (
            [DECIDED, events.TransactionCommitted(*NAME, "journaled", 1, 1.0, events.Steps(), was_in_doubt=False)],
            None,
            "journaled",
            ["commit database"],
        ),
    ],
)
def test_an_outcome(reports: list[events.Event], error: BaseException | None, outcome: str, children: list[str]) -> None:
    with recording() as spans:
        unit = tracing.unit_trace("unit", "orders-1", NAME[2])
        for event in reports:
            observers.notify(event)
        unit.end(error)
        unit.end(None)
        found = spans.one("unit")
        failed = {span.name for span in spans.all if span.name != "unit" and span.status.status_code is StatusCode.ERROR}
        assert sorted(f"!{name}" if name in failed else name for name in spans.children(found)) == children
        assert (found.attributes or {})["dualwrite.outcome"] == outcome
        is_error = isinstance(error, Exception) and not isinstance(error, tracing.UndoneError)
        assert (found.status.status_code is StatusCode.ERROR) == is_error


def test_coroutines_of_different_requests_never_mix(scene: Scene, spans: RecordedSpans) -> None:
    async def unit(tx: aio.AsyncTransaction[Any], number: int) -> None:
        with spans.tracer.start_as_current_span(f"work {number}"):
            await tx.db.execute(INSERT, {"writer": scene.transactional_id, "number": number})
            await asyncio.sleep(0)
            tx.send(scene.topic, str(number))
        await tx.run_sync(lambda plain: plain.send(scene.topic, str(100 + number)))

    async def request(pool: aio.AsyncWriterPool[Any], number: int) -> None:
        with spans.tracer.start_as_current_span(f"request {number}"):
            if number % 2:
                await pool.run(unit, number)
            else:
                async with pool.transaction() as tx:
                    await unit(tx, number)

    async def use(pool: aio.AsyncWriterPool[Any]) -> None:
        await asyncio.gather(*(request(pool, number) for number in range(6)))

    in_pool(scene, use)
    for number in range(6):
        begun = spans.child(spans.one(f"request {number}"), unit.__qualname__ if number % 2 else "transaction")
        assert spans.children(begun) == [*COMMITS, f"send {scene.topic}", f"work {number}"]
        assert spans.children(spans.child(begun, f"work {number}")) == [f"send {scene.topic}"]
        assert {trace_id(span) for span in spans.all if parent_id(span) == span_id(begun)} == {trace_id(begun)}


async def leave(stream: AsyncIterator[None], spans: RecordedSpans, ended: str) -> None:
    """Read one item of a generator, and wait until the loop has ended its span."""
    async for _ in stream:
        break
    del stream
    async with asyncio.timeout(LIMIT):
        while not spans.named(ended):  # noqa: ASYNC110  (a span sets no event)
            await asyncio.sleep(0.001)


@table("kind, ended", [("unit", "unit"), ("message", "process orders"), ("batch", "process orders")])
def test_a_generator_that_is_left_leaves_no_span_behind(kind: str, ended: str) -> None:
    """Its block ends in another task than it began in. Its span is not the current one of any task after that."""
    begun: list[asyncio.Task[None]] = []

    async def main(spans: RecordedSpans) -> None:
        over = asyncio.Event()

        async def background() -> None:
            await over.wait()
            spans.tracer.start_span("background").end()

        async def stream() -> AsyncIterator[None]:
            trace = tracing.unit_trace("unit", "orders-1", 0)
            messages = [Consumed()] * (1 + (kind == "batch"))
            with tracing.ending(trace), trace.current() if kind == "unit" else tracing.processing("billing", messages):
                begun.append(asyncio.create_task(background()))
                yield

        with spans.tracer.start_as_current_span("request"):
            await leave(stream(), spans, ended)
            over.set()
            await begun[0]
            spans.tracer.start_span("after").end()
            tracing.unit_trace("next", "orders-1", 0).end(None)

    with recording() as spans:
        before = context.get_current()
        asyncio.run(main(spans))
        assert context.get_current() == before
        assert {"after", "background", "next"} <= set(spans.children(spans.one("request")))


def test_a_block_of_a_pool_in_a_generator_that_is_left(
    scene: Scene, spans: RecordedSpans, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(pool: aio.AsyncWriterPool[Any]) -> None:
        async def stream() -> AsyncIterator[None]:
            async with pool.transaction() as tx:
                tx.send(scene.topic, "never")
                yield

        with spans.tracer.start_as_current_span("request"):
            await leave(stream(), spans, "transaction")
            async with pool.transaction() as tx:
                tx.send(scene.topic, "1")

    in_pool(scene, use)
    assert spans.children(spans.one("request")) == ["transaction", "transaction"]
    assert [message.value() for message in read_topic(scene.bootstrap, scene.topic)] == [b"1"]
    assert "detach" not in caplog.text


# --- messages -----------------------------------------------------------------------------------------------------------------


def test_send_many_makes_one_span_whose_context_all_its_messages_have(scene: Scene, spans: RecordedSpans) -> None:
    with open_pool(scene) as pool:
        pool.run(lambda tx: tx.send_many(scene.topic, ["1", "2", "3"], keys=["a", "b", "c"]))
    with scene.connect(transactional_id=f"{scene.transactional_id}-block") as writer, writer.transaction() as tx:
        tx.send_many(scene.topic, ["4", "5"])
        tx.send_many(scene.topic, [])
    first, second = spans.named(f"send {scene.topic}")
    assert [(span.attributes or {})["messaging.batch.message_count"] for span in (first, second)] == [3, 2]
    assert headers(scene) == [*[{"traceparent": traceparent(first)}] * 3, *[{"traceparent": traceparent(second)}] * 2]


def test_headers_that_the_user_has_given_stay(scene: Scene, spans: RecordedSpans) -> None:
    own = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    given: list[Any] = [
        {"traceparent": own, "kind": "order"},
        [("baggage", b"tenant=9")],
        {"traceparent": b"no trace"},
        None,
    ]
    token = context.attach(baggage.set_baggage("tenant", "1"))
    try:
        with scene.connect() as writer, writer.transaction() as tx:
            for number, each in enumerate(given):
                tx.send(scene.topic, str(number), headers=each)
    finally:
        context.detach(token)
    of_user, *ours = spans.named(f"send {scene.topic}")
    assert headers(scene) == [
        {"traceparent": own, "kind": b"order"},
        {"baggage": b"tenant=9", "traceparent": traceparent(ours[0])},
        {"traceparent": b"no trace", "baggage": b"tenant=1"},
        {"traceparent": traceparent(ours[2]), "baggage": b"tenant=1"},
    ]
    assert (of_user.kind, linked(of_user)) == (SpanKind.CLIENT, {"b7ad6b7169203331"})
    assert {span.kind for span in ours} == {SpanKind.PRODUCER}


@pytest.fixture
def outbox(postgres_url: str, broker: DevCluster, new_name: Callable[[str], str]) -> Iterator[RelayScene]:
    made = RelayScene(postgres_url, broker, new_name)
    yield made
    made.engine.dispose()


def test_rows_of_an_outbox_keep_the_headers_that_they_have(outbox: RelayScene, spans: RecordedSpans) -> None:
    own = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    outbox.insert(1, headers=json.dumps({"traceparent": own}))
    outbox.insert(1)
    with relaying(outbox):
        until(lambda: not outbox.waiting(), "the rows are published")
    found = {int(message.value() or b""): dict(message.headers() or ()) for message in outbox.messages()}
    assert found == {0: {"traceparent": own.encode()}, 1: {}}
    assert {span.name for span in spans.all} <= {"recover"}


def test_a_batch_links_its_messages_and_each_handler_continues_a_trace(scene: Scene, spans: RecordedSpans) -> None:
    seen = []

    def handle(message: Any, tx: Transaction[Any]) -> None:
        with spans.tracer.start_as_current_span("handled"):
            seen.append(baggage.get_baggage("tenant"))
            booked(scene, tx, int(message.value()))

    with open_pool(scene) as pool:
        for number in range(3):
            token = context.attach(baggage.set_baggage("tenant", str(number)))
            with spans.tracer.start_as_current_span(f"request {number}"):
                pool.run(both, scene, number)
            context.detach(token)
    consume(scene, handle, 3, batch=100)
    sent = spans.named(f"send {scene.topic}")
    (batch,) = [span for span in spans.named(f"process {scene.topic}") if parent_id(span) is None]
    attributes = dict(batch.attributes or {})
    assert attributes["messaging.batch.message_count"] == 3
    assert attributes["messaging.destination.partition.id"] == "0"
    assert linked(batch) == {span_id(span) for span in sent}
    (unit,) = [span for span in spans.all if parent_id(span) == span_id(batch)]
    assert spans.children(unit) == ["commit database"]
    for one in sent:
        process = spans.child(one, f"process {scene.topic}")
        assert linked(process) == {span_id(unit)}
        assert spans.children(process) == ["handled"]
        assert (process.attributes or {})["messaging.consumer.group.name"] == f"group-{scene.transactional_id}"
    assert seen == ["0", "1", "2"]


@pytest.mark.slow
def test_a_handler_that_fails_is_recorded_with_each_attempt(scene: Scene, spans: RecordedSpans) -> None:
    attempts = []

    def handle(_: Any, tx: Transaction[Any]) -> None:
        attempts.append(1)
        if len(attempts) == 1:
            raise LookupError("not yet")
        booked(scene, tx, 0)

    with open_pool(scene) as pool:
        pool.run(both, scene, 1)
    consume(scene, handle, 1, batch=1, pause=0.01)
    first, second = spans.named(f"process {scene.topic}")
    assert (first.status.status_code, second.status.status_code) == (StatusCode.ERROR, StatusCode.UNSET)
    assert (first.attributes or {})["error.type"] == "LookupError"


@pytest.mark.slow
def test_an_async_processor_continues_the_trace(scene: Scene, spans: RecordedSpans) -> None:
    async def main(pool: aio.AsyncWriterPool[Any]) -> None:
        async def handle(_: Any, tx: aio.AsyncTransaction[Any]) -> None:
            with spans.tracer.start_as_current_span("handled"):
                await tx.db.execute(INSERT, {"writer": f"handled-{scene.transactional_id}", "number": 0})

        settings = {**scene.settings, **BRISK, "group.id": f"group-{scene.transactional_id}"}
        await pool.run(both, scene, 1)
        options = ProcessorOptions(batch=1)
        processor = dualwrite.processor.AsyncDualProcessor(pool, settings, [scene.topic], handle=handle, options=options)
        running = asyncio.ensure_future(processor.run())
        await asyncio.to_thread(until_recorded, lambda: scene.events.numbers(f"handled-{scene.transactional_id}"), [0])
        processor.stop()
        await running

    in_pool(scene, main)
    process = spans.child(spans.one(f"send {scene.topic}"), f"process {scene.topic}")
    (unit,) = [span for span in spans.all if parent_id(span) == span_id(process)]
    assert spans.children(unit) == ["commit database", "handled"]


# --- names --------------------------------------------------------------------------------------------------------------------

KEYED = {"messaging.kafka.message.key": "k"}
OF_SEND = {"messaging.system": "kafka", "messaging.operation.name": "send", "messaging.operation.type": "send"}
OF_PROCESS = {"messaging.system": "kafka", "messaging.operation.name": "process", "messaging.operation.type": "process"}
TO = {"messaging.destination.name": "orders"}
PLACE = {"messaging.destination.partition.id": "2", "messaging.kafka.offset": 5}


class Consumed:
    """A message with the methods that a tracer uses."""

    def __init__(self, topic: str = "orders", key: Any = b"k", value: Any = b"v", offset: int = 5) -> None:
        self._of = {"topic": topic, "key": key, "value": value, "offset": offset, "partition": 2, "headers": None}

    def __getattr__(self, name: str) -> Any:
        return lambda: self._of[name]


def sent(**changes: Any) -> dualwrite.kafka.base.Message:
    given = {"topic": "orders", "value": b"v", "key": b"k", "headers": None, "partition": None, "timestamp": None, **changes}
    return dualwrite.kafka.base.Message(**given)


@table(
    "trace_it, name, kind, attributes",
    [
        (lambda: tracing.traced([sent()]), "send orders", "PRODUCER", OF_SEND | TO | KEYED),
        (lambda: tracing.traced([sent(key=None)]), "send orders", "PRODUCER", OF_SEND | TO),
        (lambda: tracing.traced([sent(key=b"\xff")]), "send orders", "PRODUCER", OF_SEND | TO),
        (
            lambda: tracing.traced([sent(value=None)]),
            "send orders",
            "PRODUCER",
            OF_SEND | TO | KEYED | {"messaging.kafka.message.tombstone": True},
        ),
        (
            lambda: tracing.traced([sent(partition=3)]),
            "send orders",
            "PRODUCER",
            OF_SEND | TO | KEYED | {"messaging.destination.partition.id": "3"},
        ),
        (
            lambda: tracing.traced([sent(), sent()]),
            "send orders",
            "PRODUCER",
            OF_SEND | TO | {"messaging.batch.message_count": 2},
        ),
        (
            lambda: process_all(Consumed()),
            "process orders",
            "CONSUMER",
            OF_PROCESS | TO | KEYED | PLACE | {"messaging.consumer.group.name": "billing"},
        ),
        (
            lambda: process_all(Consumed(key=7)),
            "process orders",
            "CONSUMER",
            OF_PROCESS | TO | PLACE | {"messaging.kafka.message.key": "7", "messaging.consumer.group.name": "billing"},
        ),
        (
            lambda: process_all(Consumed(), Consumed(offset=6)),
            "process orders",
            "CONSUMER",
            OF_PROCESS
            | TO
            | {
                "messaging.batch.message_count": 2,
                "messaging.consumer.group.name": "billing",
                "messaging.destination.partition.id": "2",
            },
        ),
        (
            lambda: process_all(Consumed(), Consumed("others")),
            "process",
            "CONSUMER",
            OF_PROCESS | {"messaging.batch.message_count": 2, "messaging.consumer.group.name": "billing"},
        ),
    ],
)
def test_a_span_of_messages_has_the_names_of_the_conventions(
    trace_it: Callable[[], object], name: str, kind: str, attributes: dict[str, Any]
) -> None:
    with recording() as spans:
        trace_it()
        (span,) = spans.all
    assert (span.name, span.kind.name, dict(span.attributes or {})) == (name, kind, attributes)
    assert span.instrumentation_scope is not None
    assert span.instrumentation_scope.schema_url == otel_names.SCHEMA_URL


def process_all(*messages: Consumed) -> None:
    with tracing.processing("billing", messages):
        pass


def test_the_names_are_those_of_the_conventions() -> None:
    ours = {value for value in vars(otel_names).values() if isinstance(value, str) and value.startswith("messaging.")}
    assert ours <= {value for value in vars(conventions).values() if isinstance(value, str)}
    assert otel_names.SCHEMA_URL in {each.value for each in schemas.Schemas}


# --- installation, cost and failures ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_not_sampled_makes_no_spans_and_says_so_to_consumers(scene: Scene) -> None:
    with recording(sampler=ParentBased(ALWAYS_OFF)) as spans:
        with open_pool(scene) as pool:
            pool.run(both, scene, 1)
            assert otel_traces._installed is not None
            assert not otel_traces._installed[2]._open
        consume(scene, lambda _, tx: booked(scene, tx, 0), 1, batch=1)
        assert spans.all == []
    (found,) = headers(scene)
    assert not int(found["traceparent"][-2:], 16) & TraceFlags.SAMPLED


def test_no_transaction_is_kept(scene: Scene, spans: RecordedSpans) -> None:
    with open_pool(scene) as pool:
        for number in range(5):
            pool.run(both, scene, number)
    block = f"{scene.transactional_id}-block"
    with suppress(LookupError), scene.connect(transactional_id=block) as writer, writer.transaction():
        raise LookupError
    assert otel_traces._installed is not None
    assert not otel_traces._installed[2]._open
    assert len(spans.named("commit kafka")) == 5


class BrokenTracer:
    """Fails in each of its methods."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class BadTracer:
    """Gives messages headers that can't be sent, and traces that fail."""

    def unit(self, *_: Any) -> Any:
        return BrokenTracer()

    def sending(self, _: Any) -> Any:
        return [("traceparent", "text")]

    def processing(self, *_: Any) -> Any:
        return BrokenTracer()


@pytest.mark.parametrize("tracer", [BrokenTracer(), pytest.param(BadTracer(), marks=pytest.mark.slow)], ids=["broken", "bad"])
def test_a_tracer_that_fails_never_fails_the_work(
    scene: Scene, tracer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "tracer", tracer)
    monkeypatch.setattr(tracing, "_has_failed", False)
    with open_pool(scene) as pool:
        pool.run(both, scene, 1)
        with pool.transaction() as tx:
            both(tx, scene, 2)
            tx.send_many(scene.topic, ["3"], keys=[scene.transactional_id])
            scene.events.write(tx.db, scene.transactional_id, 3)
        with suppress(LookupError), pool.transaction():
            raise LookupError
    consume(scene, lambda message, tx: booked(scene, tx, int(message.value()) - 1), 3, batch=100)
    assert scene.agree() == [1, 2, 3]
    assert [record.message for record in caplog.records if "tracer" in record.message] == [
        "the tracer has failed; this is logged once, and the work goes on without it"
    ]


def test_install_again_changes_nothing_and_uninstall_ends_it() -> None:
    first, second = RecordedSpans(), RecordedSpans()
    try:
        otel_traces.install(first.provider)
        installed = tracing.tracer
        otel_traces.install(first.provider)
        assert tracing.tracer is installed
        assert len(observers.installed) == 1
        otel_traces.install(second.provider)
        assert len(observers.installed) == 1
        tracing.traced([sent()])
        assert (len(first.all), len(second.all)) == (0, 1)
    finally:
        otel_traces.uninstall()
        otel_traces.uninstall()
    assert tracing.tracer is None
    assert observers.installed == ()


def test_the_package_is_named_if_it_is_missing() -> None:
    program = "import sys; sys.modules['opentelemetry'] = None; import dualwrite.observability.otel_traces"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "MissingDependencyError" in done.stderr
    assert 'pip install "dualwrite[otel]"' in done.stderr


INSTRUMENTED = """
import sys
from opentelemetry.instrumentation.confluent_kafka import ConfluentKafkaInstrumentor
from observability.recorded_spans import RecordedSpans
from opentelemetry import trace

spans = RecordedSpans()
trace.set_tracer_provider(spans.provider)
ConfluentKafkaInstrumentor().instrument()

import dualwrite
from dualwrite.observability import otel_traces

otel_traces.install()
url, bootstrap, name, topic = sys.argv[1:]
with dualwrite.connect(url, kafka=bootstrap, transactional_id=name, producer="librdkafka") as writer:
    with writer.transaction() as tx:
        tx.send(topic, "1")
print(sorted(span.name for span in spans.all))
"""


@pytest.mark.slow
def test_auto_instrumentation_of_confluent_kafka_adds_no_second_span_or_header(scene: Scene) -> None:
    command = [sys.executable, "-c", INSTRUMENTED, scene.url, scene.bootstrap, scene.transactional_id, scene.topic]
    folder = str(__file__).rsplit("/", 2)[0]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([*COMMITS, f"send {scene.topic}", "transaction"])
    (found,) = headers(scene)
    assert set(found) == {"traceparent"}
