"""Where a job writes: settings that cross process borders, and what is opened by them in each process."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from dualwrite.errors import ConfigurationError
from dualwrite.jobs.ledger import DEFAULT_LEASE_TIMEOUT, JobLedger
from dualwrite.kafka.base import ProducerFactory
from dualwrite.kafka.choose import choose_producer
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.settings import ProducerName, Settings, Timeouts
from dualwrite.stores.registry import keeps_a_table
from dualwrite.stores.sql import SqlStateStore

log = logging.getLogger(__name__)

DEFAULT_COMMIT_TIMEOUT: Final = 600.0


@dataclass(frozen=True)
class JobSite:
    """Where a job writes. It can be pickled, and holds passwords if its settings do.

    Args:
        url: The database, as for `store_from_url`; one that keeps tables.
        kafka: Kafka's settings in librdkafka's names.
        producer: Which producer; "auto" takes the best for the broker.
        two_phase: True to require two-phase commit of the broker, False to do without, None to have it where it is offered.
        timeouts: Time limits.
        commit_timeout: Seconds that moving a batch's staged rows may take.
        lease_timeout: Seconds without a sign of life, after which another batch write that holds the prefix is given up.
        parallelism: How many transactions are completed at once.
        schema: The schema in which the database has our tables.
    """

    url: str = field(repr=False)
    kafka: Mapping[str, Any] = field(repr=False)
    producer: ProducerName = "auto"
    two_phase: bool | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    commit_timeout: float = DEFAULT_COMMIT_TIMEOUT
    lease_timeout: float = DEFAULT_LEASE_TIMEOUT
    parallelism: int = 8
    schema: str | None = None

    def __post_init__(self) -> None:
        if not keeps_a_table(self.url):
            raise ConfigurationError(
                "A job stages its rows in tables, so it needs a SQL database.",
                next_step="PostgreSQL, MariaDB, MySQL or SQLite; for other stores there is write_partitions",
            )

    @contextmanager
    def opened(self) -> Iterator[OpenSite]:
        """Connect; what was opened is closed at the end of the block."""
        store = SqlStateStore.from_url(self.url, schema=self.schema)
        try:
            coordinator = WireTransactionCoordinator(KafkaConfig.of(dict(self.kafka)), timeout=self.timeouts.kafka)
            try:
                yield OpenSite(self, store, coordinator)
            finally:
                coordinator.close()
        finally:
            store.close()


@dataclass(frozen=True)
class OpenSite:
    """A site with its connections, in one process.

    Args:
        site: The settings.
        store: The database.
        coordinator: Kafka's side.
    """

    site: JobSite
    store: SqlStateStore
    coordinator: WireTransactionCoordinator

    @cached_property
    def ledger(self) -> JobLedger:
        """The rows of jobs."""
        return JobLedger(self.store, patience=self.site.timeouts.claim)

    def producers(self, transactional_id: str) -> ProducerFactory:
        """What makes the producers of an id; asks the cluster what it can do.

        Raises: as `choose_producer`.
        """
        site = self.site
        chosen = Settings(
            transactional_id=transactional_id, producer=site.producer, two_phase=site.two_phase, timeouts=site.timeouts
        )
        return choose_producer(KafkaConfig.of(dict(site.kafka)), self.coordinator, chosen)
