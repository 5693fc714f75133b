"""A `read_committed` consumer that records when each message becomes visible."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, TopicPartition

from workload import place_of

_POLL: Final = 0.05


class Arrivals:
    """Consumes in a thread of a process that does nothing else."""

    def __init__(self) -> None:
        self._seen: list[tuple[bytes, float]] = []
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._failure: BaseException | None = None

    def watch(self, kafka: Mapping[str, Any], topic: str, partitions: int) -> None:
        """Start to consume a topic."""
        consumer = Consumer(
            {
                **{
                    name: value
                    for name, value in kafka.items()
                    if name.startswith(("bootstrap.", "security.", "sasl.", "ssl."))
                },
                "group.id": "dualwrite-benchmark",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
            }
        )
        consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in range(partitions)])
        self._seen, self._failure = [], None
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, args=(consumer,), daemon=True)
        self._thread.start()

    def collect(self, expected: int, timeout: float) -> list[tuple[int, int, float]]:
        """Wait until the expected number of messages was seen, then stop.

        Returns:
            Writer, number, and time of arrival (`time.monotonic()`) of each message.

        Raises:
            TimeoutError: Some did not arrive within `timeout` seconds: the slowest would be missing in the figures.
        """
        deadline = time.monotonic() + timeout
        while len(self._seen) < expected and time.monotonic() < deadline and self._failure is None:
            time.sleep(_POLL)
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            raise self._failure
        if len(self._seen) < expected:
            raise TimeoutError(
                f"only {len(self._seen)} of {expected} messages were visible {timeout:g} s after the writers had stopped"
            )
        return [(*place_of(value), seen) for value, seen in self._seen]

    def _run(self, consumer: Consumer) -> None:
        try:
            while not self._stopping.is_set():
                message = consumer.poll(_POLL)
                now = time.monotonic()
                if message is None:
                    continue
                if message.error() is not None:
                    raise KafkaException(message.error())  # noqa: TRY301  (raised by `collect` in its caller's thread)
                self._seen.append((message.value() or b"", now))
        except BaseException as error:  # noqa: BLE001  (as above)
            self._failure = error
        finally:
            consumer.close()
