"""A network between a benchmark's clients and its servers: both are reached through the delay proxy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import make_url

from counts import Counts
from delay import DelayProxy

_PORT: Final = 5432


@dataclass(frozen=True)
class Passed:
    """What has passed to the servers and back.

    Args:
        database: To and from the database.
        kafka: To and from the broker.
    """

    database: Counts
    kafka: Counts

    def since(self, before: Passed) -> Passed:
        """What has passed since then."""
        return Passed(self.database.since(before.database), self.kafka.since(before.kafka))

    @property
    def lateness(self) -> float:
        """By how many seconds the proxy wrote later than asked, in the mean."""
        database, kafka = self.database, self.kafka
        return Counts(delivered=database.delivered + kafka.delivered, late=database.late + kafka.late).lateness


class Network:
    """The way to a database and a broker.

    Attributes:
        url: The database, through the proxy.
        kafka: Kafka's settings, through the proxy.
        kafka_port: The port that the broker has to tell its clients.
        proxy: The proxy.
    """

    def __init__(self) -> None:
        self.proxy = DelayProxy()
        self.kafka_port = self.proxy.reserve()
        self._database_port = self.proxy.reserve()
        self.url = ""
        self.kafka: Mapping[str, Any] = {}

    @contextmanager
    def to(self, url: str, broker: str, settings: Mapping[str, Any]) -> Iterator[None]:
        """Forward to a database and to a broker's listener for the proxy, inside the block."""
        there = make_url(url)
        self.url = there.set(host="127.0.0.1", port=self._database_port).render_as_string(hide_password=False)
        self.kafka = {**settings, "bootstrap.servers": f"127.0.0.1:{self.kafka_port}"}
        host, _, port = broker.partition(":")
        database = (there.host or "127.0.0.1", there.port or _PORT)
        with self.proxy.forwarding({self._database_port: database, self.kafka_port: (host, int(port))}):
            yield

    def passed(self) -> Passed:
        """What has passed until now."""
        counts = self.proxy.counts()
        return Passed(counts[self._database_port], counts[self.kafka_port])
