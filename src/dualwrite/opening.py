"""Open a writer from complete settings: its store, its side at Kafka, and its journal if it has one."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Engine

from dualwrite.deadline import Limit
from dualwrite.errors import ConfigurationError, DualWriteError, InvalidTransactionalIdError
from dualwrite.kafka.base import ProducerFactory
from dualwrite.kafka.choose import LIBRDKAFKA_LANES, NATIVE_LANES, LateProducers, ProbedCluster, choose_producer
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.native.native_settings import KNOWN_NAMES
from dualwrite.kafka.time_budget import chosen_timeout_ms
from dualwrite.recipe.idle import RECOVER_LIMIT
from dualwrite.recovery.clusters import check_cluster
from dualwrite.recovery.recoverer import describe_owner
from dualwrite.settings import SWITCH_AFTER, Acknowledge, ProducerName, Settings
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.journal import JournalLimits
from dualwrite.stores.leases import number_of
from dualwrite.stores.registry import store_from_url
from dualwrite.stores.sql import SqlStateStore
from dualwrite.transactional_id import TransactionalId, validate_transactional_id
from dualwrite.writer import DualWriter

if TYPE_CHECKING:
    from dualwrite.pool.journal_keeper import JournalKeeper
    from dualwrite.recipe.journaling import Journal, Keeper
    from dualwrite.stores.sql.orm import SessionSource

Database = str | URL | Engine | TxnStateStore
Kafka = str | Mapping[str, Any] | KafkaConfig


def connected_with_journal(
    database: Database | None,
    *,
    settings: Settings,
    kafka: Kafka | None,
    session: SessionSource | None,
    acknowledge: Acknowledge,
    limits: JournalLimits | None,
) -> DualWriter[Any]:
    """See `connect`: a writer with a journal of its own, whose prefix is its id."""
    with ExitStack() as opened:
        store = as_store(database, settings, session)
        if store is not database:
            opened.callback(store.close)
        journal = journal_of(store, _the_id(settings), limits or JournalLimits())
        keeper = journal_keeper(store, journal, kafka, settings)
        opened.callback(keeper.stop)
        writer = connected(
            store,
            settings=settings.with_changes(timeouts=settings.timeouts.with_journal()),
            kafka=kafka,
            session=None,
            acknowledge=acknowledge,
            journal=journal,
            keeper=keeper,
            owns_store=store is not database,
        )
        opened.pop_all()
        return writer


def _the_id(settings: Settings) -> str:
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
    acknowledge: Acknowledge,
    probed: ProbedCluster | None = None,
    journal: Journal | None = None,
    keeper: Keeper | None = None,
    owns_store: bool = False,
) -> DualWriter[Any]:
    """See `connect`; for a pool, `probed` is what its other writers know about the cluster, `journal` that of its prefix.

    The writer owns a store that is made here, or if `owns_store`.
    """
    transactional_id = _the_id(settings)
    config = KafkaConfig.over(kafka, settings.kafka)
    _check_kafka_settings(config, settings.producer)
    store = as_store(database, settings, session)
    writer = _new_writer(
        store,
        config,
        settings,
        transactional_id,
        acknowledge=acknowledge,
        owns_store=owns_store or store is not database,
        probed=probed,
        journal=journal,
        keeper=keeper,
    )
    try:
        return writer.open()
    except BaseException:
        writer.close()
        raise


def _check_kafka_settings(config: KafkaConfig, producer: ProducerName) -> None:
    """Check the settings before anything is claimed: invalid settings must not take the id from a writer that works."""
    chosen_timeout_ms(config)  # raises if it is too short
    if producer == "librdkafka" or not config.properties.keys() <= KNOWN_NAMES:
        from dualwrite.kafka.librdkafka.librdkafka_producer import check_settings  # noqa: PLC0415  (the native producer checks its own)

        check_settings(config)


def _new_writer(
    store: TxnStateStore,
    config: KafkaConfig,
    settings: Settings,
    transactional_id: str,
    *,
    acknowledge: Acknowledge,
    owns_store: bool,
    probed: ProbedCluster | None,
    journal: Journal | None,
    keeper: Keeper | None,
) -> DualWriter[Any]:
    """A writer that is not open yet; after an error, what it would own is closed."""
    coordinator = WireTransactionCoordinator(config, timeout=settings.timeouts.kafka)

    def choosing(timeout: Limit | None = None) -> ProducerFactory:
        return choose_producer(config, coordinator, settings, share_connections=True, probed=probed, timeout=timeout)

    try:
        producers = choosing() if journal is None else _late_producers(choosing, coordinator, settings, journal)
        return DualWriter(
            store,
            transactional_id=transactional_id,
            producers=producers,
            coordinator=coordinator,
            lanes=settings.lanes or producers.lanes,
            timeouts=settings.timeouts,
            on_lost=settings.on_lost,
            mark_republished=settings.mark_republished,
            acknowledge=acknowledge,
            owns_store=owns_store,
            owns_coordinator=True,
            journal=journal,
            keeper=keeper,
        )
    except BaseException:
        coordinator.close()
        if owns_store:
            store.close()
        raise


def _late_producers(
    choosing: Callable[[Limit], ProducerFactory],
    coordinator: WireTransactionCoordinator,
    settings: Settings,
    journal: Journal,
) -> LateProducers:
    """Producers that are chosen now if Kafka answers, or else when it does; then the journal is open."""
    producers = LateProducers(choosing, lanes=LIBRDKAFKA_LANES if settings.producer == "librdkafka" else NATIVE_LANES)
    if not journal.is_lost:
        limit = settings.timeouts.kafka
        try:
            coordinator.cluster_id(timeout=min(limit, SWITCH_AFTER))
            producers.choose(timeout=min(limit, RECOVER_LIMIT))
        except DualWriteError as error:
            if not journal.lost(error):
                raise
    return producers


def journal_of(store: TxnStateStore, prefix: str, limits: JournalLimits) -> Journal:
    """The journal of a prefix.

    Raises:
        ConfigurationError: The store has none.
        InvalidTransactionalIdError: The prefix is too long for the id that drains it.
    """
    from dualwrite.outbox.journal_drain import drainer_id  # noqa: PLC0415  (most programs don't need it)
    from dualwrite.recipe.journaling import Journal  # noqa: PLC0415  (as above)

    try:
        validate_transactional_id(drainer_id(prefix))
    except InvalidTransactionalIdError as error:
        error.cause = "that is the id that drains the journal: the name that you gave, with a suffix"
        raise

    if store.journal is None:
        raise ConfigurationError(
            f'when_kafka_is_down="journal" needs a SQL database, but the store is {store.description}.',
            next_step="use PostgreSQL, MariaDB, MySQL or SQLite, or leave the option out",
        )
    journal = Journal(store.journal, prefix, f"{describe_owner('journal')} {uuid.uuid4().hex[:8]}", limits)
    journal.prepare()
    return journal


def journal_keeper(store: TxnStateStore, journal: Journal, kafka: Kafka | None, settings: Settings) -> JournalKeeper:
    """Looks after a journal once it is started; `stop` releases what it uses."""
    from dualwrite.pool.journal_keeper import JournalKeeper  # noqa: PLC0415  (as above)

    assert store.leases is not None
    coordinator = WireTransactionCoordinator(KafkaConfig.over(kafka, settings.kafka), timeout=settings.timeouts.kafka)

    def open_drainer(name: str) -> DualWriter[Any]:
        check_cluster(store, coordinator, _rows_of(store, journal.prefix))  # a start could not do it
        of_drainer = settings.with_changes(transactional_id=name, lanes=1)
        return connected(store, settings=of_drainer, kafka=kafka, session=None, acknowledge="visible")

    return JournalKeeper(journal, store.leases, lambda: coordinator.cluster_id(timeout=1.0), open_drainer, coordinator.close)


def _rows_of(store: TxnStateStore, prefix: str) -> list[str]:
    """The rows of the ids that write into the journal of a prefix."""
    ids = {row: TransactionalId.of_row(row).logical for row in store.list(prefix)}
    return [row for row, logical in ids.items() if logical == prefix or number_of(prefix, logical) is not None]


def as_store(database: Database | None, settings: Settings, session: SessionSource | None = None) -> TxnStateStore:
    """The store of a `database` argument of the functions above; the caller closes it, unless it is the argument itself."""
    if isinstance(database, TxnStateStore):
        if session is not None:
            raise ConfigurationError(
                "session can't be combined with a store.", next_step="pass it to the store: SqlStateStore(…, session=…)"
            )
        return database
    if isinstance(database, Engine):
        return SqlStateStore(database, session=session, schema=settings.schema)
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
