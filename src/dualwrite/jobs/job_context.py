"""Where a job writes: settings that can be sent to other processes, and the connections that each process opens from them."""

from __future__ import annotations

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
from dualwrite.recipe.republish import RecoveryPublisher
from dualwrite.recovery.recoverer import Recoverer
from dualwrite.settings import OnLost, ProducerName, Settings, Timeouts
from dualwrite.stores.registry import keeps_a_table
from dualwrite.stores.sql import SqlStateStore

DEFAULT_COMMIT_TIMEOUT: Final = 600.0
_HEARTBEAT_INTERVAL: Final = 5.0


@dataclass(frozen=True)
class JobSite:
    """Where a job writes. It can be pickled, and contains passwords if its settings do.

    Args:
        url: The database, as for `store_from_url`; it must be a SQL database.
        kafka: Kafka's settings, with librdkafka's names.
        producer: Which producer to use; "auto" chooses the best one for the broker.
        two_phase: True to require two-phase commit from the broker, False not to use it, None to use it if it is available.
        timeouts: Time limits.
        commit_timeout: Seconds that moving a batch's staged rows may take.
        lease_timeout: Seconds without a heartbeat after which another batch write that holds the prefix is presumed dead.
        parallelism: How many transactions are completed at once.
        schema: The schema of dualwrite's tables in the database.
        on_lost: What happens to messages that Kafka has aborted although the batch is committed: "republish" publishes them
            again, otherwise they stay in the rows of their ids, as LOST.
        mark_republished: Whether messages that are published again get the header `dualwrite-republished`.
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
    on_lost: OnLost = "republish"
    mark_republished: bool = False

    def __post_init__(self) -> None:
        if not keeps_a_table(self.url):
            raise ConfigurationError(
                "A job stages its rows in tables, so it needs a SQL database.",
                next_step="use PostgreSQL, MariaDB, MySQL or SQLite; for other stores use write_partitions",
            )

    @property
    def heartbeat_interval(self) -> float:
        """Seconds between two heartbeats of a task."""
        return min(_HEARTBEAT_INTERVAL, self.lease_timeout / 3)

    @contextmanager
    def opened(self) -> Iterator[OpenSite]:
        """Connect; the connections are closed at the end of the block."""
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
    """A site with its connections to the database and to Kafka's transaction coordinators, in one process."""

    site: JobSite
    store: SqlStateStore
    coordinator: WireTransactionCoordinator

    @cached_property
    def ledger(self) -> JobLedger:
        """Access to the rows of jobs."""
        return JobLedger(self.store, patience=self.site.timeouts.claim)

    @cached_property
    def republisher(self) -> RecoveryPublisher | None:
        """Publishes lost messages again; None if they are to stay in the rows."""
        site = self.site
        if site.on_lost != "republish":
            return None
        marked = site.mark_republished
        return RecoveryPublisher(self.store, self.coordinator, self.producers, timeouts=site.timeouts, is_marked=marked)

    @cached_property
    def recoverer(self) -> Recoverer:
        """Resolves what tasks have left."""
        return Recoverer(self.store, self.coordinator, timeouts=self.site.timeouts, republisher=self.republisher)

    def producers(self, transactional_id: str) -> ProducerFactory:
        """The factory of an id's producers; queries the cluster's capabilities.

        Raises: as `choose_producer`.
        """
        site = self.site
        chosen = Settings(
            transactional_id=transactional_id, producer=site.producer, two_phase=site.two_phase, timeouts=site.timeouts
        )
        return choose_producer(KafkaConfig.of(dict(site.kafka)), self.coordinator, chosen)
