"""Open a writer or a recoverer from complete settings: its store, and its side at Kafka."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeAlias

from sqlalchemy import URL, Engine

from dualwrite.deadline import Limit
from dualwrite.errors import ConfigurationError, DualWriteError
from dualwrite.kafka.base import ProducerFactory
from dualwrite.kafka.choose import LIBRDKAFKA_LANES, NATIVE_LANES, LateProducers, ProbedCluster, choose_producer
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.client.time_budget import chosen_timeout_ms
from dualwrite.kafka.native.native_settings import KNOWN_NAMES
from dualwrite.recipe.idle import RECOVER_LIMIT
from dualwrite.recipe.republish import RecoveryPublisher
from dualwrite.recovery.recoverer import Recoverer
from dualwrite.settings import SWITCH_AFTER, OnLost, ProducerName, Settings, Timeouts, misspelt
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.registry import store_from_url
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.engines import is_of_users, own_url
from dualwrite.transactional_id import validate_transactional_id
from dualwrite.writer import DualWriter, JournaledWriter

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from dualwrite.recipe.journaling import Journal, Keeper
    from dualwrite.stores.sql.orm import SessionSource

Database: TypeAlias = "str | URL | Engine | AsyncEngine | TxnStateStore"
Kafka = str | Mapping[str, Any] | KafkaConfig


def the_id(settings: Settings) -> str:
    """The transactional id, which is valid.

    Raises:
        ConfigurationError: There is none.
        InvalidTransactionalIdError: It is not valid.
    """
    if settings.transactional_id is None:
        raise ConfigurationError(
            "No transactional id was given.",
            next_step="pass transactional_id=… (environment: DUALWRITE_TRANSACTIONAL_ID): a name that stays the same across "
            "restarts",
        )
    return validate_transactional_id(settings.transactional_id, lanes=settings.lanes or 1)


def connected(
    database: Database | None,
    *,
    settings: Settings,
    kafka: Kafka | None,
    session: SessionSource | None,
    probed: ProbedCluster | None = None,
    journal: Journal | None = None,
    keeper: Keeper | None = None,
    owns_store: bool = False,
    uses: tuple[str, ...] = (),
) -> DualWriter[Any]:
    """See `connect`; for a pool, `probed` is what its other writers know about the cluster, `journal` that of its prefix.

    The writer owns a store that is made here, or if `owns_store`. The rights for these uses are checked.
    """
    transactional_id = the_id(settings)
    config = KafkaConfig.over(kafka, settings.kafka)
    _check_kafka_settings(config, settings.producer)
    store = as_store(database, settings, session)
    owns_store = owns_store or store is not database
    with ExitStack() as opened:
        if owns_store:
            opened.callback(store.close)
        coordinator = WireTransactionCoordinator(config, timeout=settings.timeouts.kafka)
        opened.callback(coordinator.close)

        def choosing(timeout: Limit | None = None) -> ProducerFactory:
            return choose_producer(config, coordinator, settings, share_connections=True, probed=probed, timeout=timeout)

        producers = choosing() if journal is None else _late_producers(choosing, coordinator, settings, journal)
        writer: DualWriter[Any] = DualWriter(
            store,
            transactional_id=transactional_id,
            producers=producers,
            coordinator=coordinator,
            lanes=settings.lanes or producers.lanes,
            timeouts=settings.timeouts,
            on_lost=settings.on_lost,
            mark_republished=settings.mark_republished,
            owns_store=owns_store,
            owns_coordinator=True,
            journal=journal,
            keeper=keeper,
        )
        opened.pop_all()  # they are the writer's
        opened.callback(writer.close)
        try:
            store.check_rights(*uses)
            writer.open()
        except DualWriteError as error:
            error.transactional_id = error.transactional_id or transactional_id
            raise
        opened.pop_all()
        return writer


def journaled(
    store: TxnStateStore, journal: Journal, settings: Settings, *, keeper: Keeper | None = None, owns_store: bool = False
) -> JournaledWriter[Any]:
    """A writer that is open, and commits its messages in the journal; see `connect`."""
    writer: JournaledWriter[Any] = JournaledWriter(
        store, journal, timeouts=settings.timeouts, owns_store=owns_store, keeper=keeper
    )
    writer.open()
    return writer


def _check_kafka_settings(config: KafkaConfig, producer: ProducerName) -> None:
    """Check the settings before anything is claimed: invalid settings must not take the id from a writer that works."""
    chosen_timeout_ms(config)  # raises if it is too short
    if producer == "librdkafka" or not config.properties.keys() <= KNOWN_NAMES:
        from dualwrite.kafka.librdkafka.librdkafka_producer import check_settings  # noqa: PLC0415  (the native producer checks its own)

        try:
            check_settings(config)
        except ConfigurationError as error:
            error.cause = error.cause or misspelt(config.properties, KNOWN_NAMES)
            raise


def _late_producers(
    choosing: Callable[[Limit], ProducerFactory],
    coordinator: WireTransactionCoordinator,
    settings: Settings,
    journal: Journal,
) -> LateProducers:
    """Producers that are chosen now if Kafka answers, or else when it does; then the journal is open."""
    lanes = LIBRDKAFKA_LANES if settings.producer == "librdkafka" else NATIVE_LANES
    producers = LateProducers(choosing, lambda limit: coordinator.cluster_id(timeout=limit), lanes=lanes)
    if not journal.is_lost:
        limit = settings.timeouts.kafka
        try:
            coordinator.cluster_id(timeout=min(limit, SWITCH_AFTER))
            producers.choose(timeout=min(limit, RECOVER_LIMIT))
        except DualWriteError as error:
            if not journal.lost(error):
                raise
    return producers


def open_recoverer(
    database: Database | None = None,
    *,
    kafka: Kafka | None = None,
    on_lost: OnLost | None = None,
    timeouts: Timeouts | None = None,
    schema: str | None = None,
    settings: Settings | None = None,
) -> Recoverer:
    """Build a Recoverer. Arguments are as for `connect`; close it with `with` or `close()`.

    It publishes lost messages again if `on_lost` is "republish", with a producer as `connect` would choose it.
    """
    chosen = (settings or Settings.from_environment()).with_changes(on_lost=on_lost, timeouts=timeouts, schema=schema)
    config = KafkaConfig.over(kafka, chosen.kafka)
    store = as_store(database, chosen)
    coordinator = WireTransactionCoordinator(config, timeout=chosen.timeouts.kafka)

    def producers(transactional_id: str) -> ProducerFactory:
        return choose_producer(config, coordinator, chosen.with_changes(transactional_id=transactional_id))

    republisher = None
    if chosen.on_lost == "republish":
        republisher = RecoveryPublisher(
            store, coordinator, producers, timeouts=chosen.timeouts, is_marked=chosen.mark_republished
        )
    return Recoverer(
        store,
        coordinator,
        timeouts=chosen.timeouts,
        republisher=republisher,
        owns_store=store is not database,
        owns_coordinator=True,
    )


def as_store(database: Database | None, settings: Settings, session: SessionSource | None = None) -> TxnStateStore:
    """The store of a `database` argument of the functions above; the caller closes it, unless it is the argument itself."""
    if isinstance(database, TxnStateStore):
        if session is not None:
            raise ConfigurationError(
                "session can't be combined with a store.", next_step="pass it to the store: SqlStateStore(…, session=…)"
            )
        return database
    database = getattr(database, "sync_engine", database)  # of an AsyncEngine
    if isinstance(database, Engine):
        if not is_of_users(database):
            return SqlStateStore(database, session=session, schema=settings.schema)
        database = own_url(database.url.set(drivername=f"{database.dialect.name}+{database.dialect.driver}"))
    url = database or settings.database_url
    if url is None:
        raise ConfigurationError(
            "No database was given.",
            next_step="pass a URL, a SQLAlchemy Engine or a store as the first argument (environment: DUALWRITE_DATABASE_URL)",
        )
    if isinstance(url, URL):
        url = url.render_as_string(hide_password=False)
    if not isinstance(url, str):
        raise ConfigurationError(
            f"Unsupported database type {type(url).__module__}.{type(url).__name__}.",
            next_step="pass a URL, a SQLAlchemy Engine, or wrap it in a store: SqlStateStore.from_psycopg(connection or pool), "
            "RocksDBStore(rdict), ZooKeeperStore(client)",
        )
    return store_from_url(url, schema=settings.schema, session=session, write_lock_timeout=settings.timeouts.claim)
