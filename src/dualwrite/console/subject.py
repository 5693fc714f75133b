"""What a console looks at: one database, one Kafka cluster, and the dead letters that it may replay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Final

from dualwrite.admin import TransactionAdmin
from dualwrite.admin.decisions import Decisions
from dualwrite.errors import ConfigurationError
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.opening import as_store, open_recoverer
from dualwrite.processor.dead_letter_topic import DeadLetterTopic
from dualwrite.recovery.recoverer import Recoverer
from dualwrite.relay import Relay
from dualwrite.settings import OnLost, Settings
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.sql import SqlStateStore

LIMIT_SECONDS: Final = 8.0
"""Seconds for one query of Kafka by a section."""


class Subject:
    """The database and the cluster. Thread-safe.

    Args:
        settings: Where they are.
        store: The database, which stays open; None for that of the settings, to which nothing connects yet.
        relays: The relays whose dead letters can be replayed.
        dead_letter_topics: The dead-letter topics of processors.
    """

    def __init__(
        self,
        settings: Settings,
        store: TxnStateStore | None = None,
        relays: Iterable[Relay] = (),
        dead_letter_topics: Iterable[str] = (),
    ) -> None:
        self.settings = settings
        self.relays = {each.name: each for each in relays}
        self.dead_letter_topics = {
            name: DeadLetterTopic(name, settings.kafka, timeout=LIMIT_SECONDS)
            for name in (dead_letter_topics if self.has_kafka else ())
        }
        self._owned = None if store is not None or settings.database_url is None else as_store(None, settings)
        self._store = store or self._owned
        if self._store is None and not self.has_kafka:
            raise ConfigurationError(
                "Neither a database nor Kafka is given.",
                next_step="pass a pool or settings (environment: DUALWRITE_DATABASE_URL, DUALWRITE_KAFKA_BOOTSTRAP_SERVERS)",
            )

    @property
    def has_kafka(self) -> bool:
        """Whether Kafka's address is known."""
        return "bootstrap.servers" in self.settings.kafka

    @property
    def has_database(self) -> bool:
        """Whether a database is known."""
        return self._store is not None

    @property
    def store(self) -> TxnStateStore:
        """The database.

        Raises:
            ConfigurationError: None is given.
        """
        if self._store is None:
            raise ConfigurationError("No database is given.", next_step="pass a pool, or set DUALWRITE_DATABASE_URL")
        return self._store

    @property
    def sql_store(self) -> SqlStateStore | None:
        """The database if it is a SQL database: only these have journals and dead letters."""
        return self._store if isinstance(self._store, SqlStateStore) else None

    @property
    def quick(self) -> Settings:
        """The settings with a short time limit for each query of Kafka."""
        return replace(self.settings, timeouts=replace(self.settings.timeouts, kafka=LIMIT_SECONDS))

    def coordinator(self) -> closing[WireTransactionCoordinator]:
        """The cluster's coordinators, in a `with` statement."""
        return closing(WireTransactionCoordinator(KafkaConfig.of(self.settings.kafka), timeout=LIMIT_SECONDS))

    def admin(self) -> TransactionAdmin:
        """A client for the cluster's transactions; use it in a `with` statement."""
        return TransactionAdmin(settings=self.settings, timeout=LIMIT_SECONDS)

    def recoverer(self, on_lost: OnLost, settings: Settings | None = None) -> Recoverer:
        """A recoverer on the database; use it in a `with` statement."""
        return open_recoverer(self.store, settings=replace(settings or self.settings, on_lost=on_lost))

    @contextmanager
    def decisions(self) -> Iterator[Decisions]:
        """What the database decided about ids."""
        with self.recoverer("report", self.quick) as recoverer:
            yield Decisions(self.store, recoverer)

    def close(self) -> None:
        """Close the database if this has opened it."""
        if self._owned is not None:
            self._owned.close()
