"""Processes beside the callers: the outbox's relay, and the consumer that records when each message becomes visible.

The relay polls: one round trip deletes a batch of rows in order of their ids and returns them, and the transaction commits
once Kafka has acknowledged all their messages (at least once). It skips no row, as a relay with a watermark on ids can,
because ids are assigned before the commit; SKIP LOCKED allows a second relay as a standby.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing
from multiprocessing.synchronize import Event
from threading import Thread
from typing import Any, Final

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Message, Producer, TopicPartition
from sqlalchemy import create_engine, text

import dualwrite
from dualwrite.relay import BatchOptions, OutboxLayout, RelayOptions
from records import VerificationError

_DELETE: Final = text(
    "DELETE FROM benchmark_outbox WHERE id = ANY (ARRAY("
    "SELECT id FROM benchmark_outbox ORDER BY id LIMIT :batch FOR UPDATE SKIP LOCKED"
    ")) RETURNING id, topic, key, value"
)
_LIMIT: Final = 60.0
_INTERVAL: Final = 0.01  # many relays poll every 100 ms or more, which delays each message by as much
BATCH: Final = 500
_POLL: Final = 0.05
_FETCH: Final = 10_000
_stopping: Final[list[Event]] = []


class Worker:
    """A process that runs one function at a time, kept for all measurements. `finish` tells the function to come to its end."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # not fork: the threads of librdkafka and psycopg would not survive it
        self._stop = context.Event()
        self._process = ProcessPoolExecutor(1, context, _begin, (self._stop,))
        self._running: Future[Any] = self._process.submit(len, "")

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Start a function; then call `result` or `finish`."""
        self._stop.clear()
        self._running = self._process.submit(function, *arguments)

    def result(self) -> Any:
        """What the function returns or raises."""
        return self._running.result()

    def finish(self) -> Any:
        """The same, once the function has been told to end."""
        self._stop.set()
        return self.result()

    def close(self) -> None:
        self._stop.set()
        self._process.shutdown()


def _begin(stop: Event) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which then stops us
    _stopping.append(stop)


def relay(url: str, kafka: Mapping[str, Any], batch: int = BATCH) -> None:
    """Publish the outbox's rows until told to end and the outbox is empty."""
    database = create_engine(url)
    producer = Producer({**kafka, "enable.idempotence": True, "acks": "all"})
    failed: list[Any] = []

    def delivered(error: Any, message: Any) -> None:
        del message
        if error is not None:
            failed.append(error)

    while True:
        is_last = _stopping[0].is_set()  # read before the poll, which then finds everything committed so far
        with database.begin() as connection:
            rows = connection.execute(_DELETE, {"batch": batch}).all()
            for row in sorted(rows, key=lambda row: row.id):
                producer.produce(row.topic, row.value, row.key, on_delivery=delivered)
            if rows and (producer.flush(_LIMIT) or failed):
                raise KafkaException(*failed[:1])
        if not rows and is_last:
            break
        if not rows:
            _stopping[0].wait(_INTERVAL)
    database.dispose()


def exactly_once(url: str, kafka: Mapping[str, Any], batch: int, name: str, channel: str | None = None) -> None:
    """The same by `dualwrite.Relay`, which looks at an empty outbox as often; with a channel, when it is notified."""
    longest = _INTERVAL if channel is None else 1.0
    options = RelayOptions(
        layout=OutboxLayout("benchmark_outbox"),
        batch=BatchOptions(rows=batch),
        poll=_INTERVAL if channel is None else longest,
        longest_poll=longest,
        listen=channel,
    )
    with dualwrite.Relay(url, kafka=kafka, name=name, options=options) as running:
        thread = Thread(target=_stop_when_told, args=(running,))
        thread.start()
        running.run()
        thread.join()
        running.run(until_empty=True)


def _stop_when_told(running: dualwrite.Relay) -> None:
    _stopping[0].wait()
    running.stop()


def arrivals(kafka: Mapping[str, Any], topic: str) -> list[tuple[bytes, float]]:
    """Every message with the time (`time.monotonic()`) of its arrival, up to the topic's end when told to end."""
    return [(message.value() or b"", time.monotonic()) for message in committed(kafka, topic, _stopping[0])]


def committed_values(kafka: Mapping[str, Any], topic: str) -> Iterator[bytes]:
    """The values of `committed`."""
    return (message.value() or b"" for message in committed(kafka, topic))


def committed(kafka: Mapping[str, Any], topic: str, stopping: Event | None = None) -> Iterator[Message]:
    """What a `read_committed` consumer gets, one by one, up to the end of each partition; with `stopping`, once it is set.

    Raises:
        VerificationError: The topic can't be read to its end within a minute, for example because a transaction stays open.
    """
    settings = {**kafka, "group.id": "dualwrite-benchmark", "enable.auto.commit": False, "log_level": 2}
    ends: dict[int, int] | None = None
    deadline = 0.0
    with closing(Consumer({**settings, "isolation.level": "read_committed"})) as consumer:
        numbers = consumer.list_topics(topic, timeout=_LIMIT).topics[topic].partitions
        places = [TopicPartition(topic, number, OFFSET_BEGINNING) for number in numbers]
        consumer.assign(places)
        while True:
            if ends is None and (stopping is None or stopping.is_set()):
                ends, deadline = _ends(settings, topic, numbers), time.monotonic() + _LIMIT
            if ends is not None and all(
                each.offset >= ends[each.partition] for each in consumer.position(places) if ends[each.partition]
            ):
                return
            first = consumer.poll(_POLL)  # `consume` alone waits for a whole batch, or for its timeout
            messages = [] if first is None else [first, *consumer.consume(_FETCH, 0)]
            for message in messages:
                if (error := message.error()) is not None:
                    raise VerificationError(f"the topic can't be read: {error.str()}")
                yield message
            if messages:
                deadline = time.monotonic() + _LIMIT
            elif ends is not None and time.monotonic() > deadline:
                raise VerificationError(f"{topic} was not read to its end, {ends}: is a transaction open there?")


def _ends(settings: Mapping[str, Any], topic: str, numbers: Iterator[int] | Any) -> dict[int, int]:
    """The end of each partition, behind open transactions too."""
    with closing(Consumer({**settings, "isolation.level": "read_uncommitted"})) as consumer:
        return {number: consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=_LIMIT)[1] for number in numbers}
