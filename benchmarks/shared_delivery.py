"""An idempotent producer for all callers of a process; each waits for its own message."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Final

from confluent_kafka import KafkaException, Producer

_POLL: Final = 0.1


class SharedDelivery:
    """Sends without waiting for more messages (`linger.ms` 0); librdkafka still batches messages that arrive while it sends.

    Args:
        kafka: Kafka's settings, in librdkafka's names.
    """

    def __init__(self, kafka: Mapping[str, Any]) -> None:
        self._producer = Producer({**kafka, "enable.idempotence": True, "acks": "all", "linger.ms": 0})
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def send(self, topic: str, value: str, key: str) -> Future[None]:
        """Queue one message.

        Returns:
            A future that is done when the message is acknowledged; a failed delivery is its exception.
        """
        future: Future[None] = Future()

        def delivered(error: Any, message: Any) -> None:
            del message
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(KafkaException(error))

        self._producer.produce(topic, value, key, on_delivery=delivered)
        return future

    def close(self) -> None:
        """Stop. Every caller must have its result."""
        self._stopping.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._stopping.is_set():
            self._producer.poll(_POLL)
