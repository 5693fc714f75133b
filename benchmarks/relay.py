"""The outbox's polling relay: reads rows in order, publishes them as a batch, deletes them; at least once.

One round trip fetches a batch: the rows are deleted and returned, and the transaction commits once Kafka has acknowledged all
their messages. Uncommitted rows are not visible yet, but no row is skipped forever, as can happen with a watermark on ids,
because ids are assigned before the commit. SKIP LOCKED allows a second relay as a standby; a single relay keeps the order.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import text

from alternatives import Delivery
from workload import engine

_DELETE: Final = text(
    "DELETE FROM benchmark_outbox WHERE id = ANY (ARRAY("
    "SELECT id FROM benchmark_outbox ORDER BY id LIMIT :batch FOR UPDATE SKIP LOCKED"
    ")) RETURNING id, topic, key, value"
)
_DRAIN_TIMEOUT: Final = 300.0


@dataclass(frozen=True)
class RelaySettings:
    """Settings of the relay.

    Args:
        poll_interval: Seconds to wait after a poll that found no rows; otherwise the next poll follows immediately.
        batch: Maximum number of rows per batch.
    """

    poll_interval: float = 0.01
    batch: int = 500


class Relay:
    """Runs the relay in a thread of a process that does nothing else."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._failure: BaseException | None = None

    def start(self, url: str, kafka: Mapping[str, Any], settings: RelaySettings) -> None:
        """Start to publish."""
        self._stopping.clear()
        self._failure = None
        self._thread = threading.Thread(target=self._run, args=(url, kafka, settings), daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """Publish the remaining rows, then stop."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_DRAIN_TIMEOUT)
            if self._thread.is_alive():
                raise TimeoutError(f"the outbox was not empty after {_DRAIN_TIMEOUT:g} s")
            self._thread = None
        if self._failure is not None:
            raise self._failure

    def _run(self, url: str, kafka: Mapping[str, Any], settings: RelaySettings) -> None:
        try:
            database, delivery = engine(url), Delivery(kafka)
            while True:
                last = self._stopping.is_set()  # read before the poll, which then finds everything committed so far
                with database.begin() as connection:
                    batch = connection.execute(_DELETE, {"batch": settings.batch}).all()
                    for row in sorted(batch, key=lambda row: row.id):
                        delivery.send(row.topic, row.value, row.key)
                    if batch:
                        delivery.wait()
                if not batch:
                    if last:
                        break
                    self._stopping.wait(settings.poll_interval)
            database.dispose()
        except BaseException as error:  # noqa: BLE001  (raised by `drain` in its caller's thread)
            self._failure = error
