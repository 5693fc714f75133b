"""Put a writer or a recoverer together: from arguments, from a Settings object, from the environment."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

from sqlalchemy import URL, Connection, Engine

from dualwrite.errors import ConfigurationError
from dualwrite.kafka.choose import choose_producer
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.native.settings import KNOWN_NAMES
from dualwrite.kafka.time_budget import chosen_timeout_ms
from dualwrite.recovery.plan import RecoveryPlan
from dualwrite.recovery.recoverer import Recoverer, ids_with_lanes
from dualwrite.recovery.report import RecoveryReport
from dualwrite.settings import OnLost, ProducerName, Settings, Timeouts
from dualwrite.state import validate_transactional_id
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.registry import keeps_a_table, store_from_url
from dualwrite.stores.sql import SqlStateStore
from dualwrite.writer import DualWriter

if TYPE_CHECKING:
    from dualwrite.stores.rocksdb import RocksDBStore
    from dualwrite.stores.rocksdb.batch import TransactionBatch
    from dualwrite.stores.sql.orm import SessionSource
    from dualwrite.stores.zookeeper import ZooKeeperStore
    from dualwrite.stores.zookeeper.batch import ZooKeeperBatch

Database = str | URL | Engine | TxnStateStore
Kafka = str | Mapping[str, Any] | KafkaConfig


class ConnectOptions(TypedDict, total=False):
    """What `connect` takes beside the database; it says what each is."""

    kafka: Kafka | None
    transactional_id: str | None
    producer: ProducerName | None
    two_phase: bool | None
    lanes: int | None
    on_lost: OnLost | None
    timeouts: Timeouts | None
    session: SessionSource | None
    schema: str | None
    settings: Settings | None


@overload
def connect(database: URL | Engine, **options: Unpack[ConnectOptions]) -> DualWriter[Connection]: ...


@overload
def connect(database: RocksDBStore, **options: Unpack[ConnectOptions]) -> DualWriter[TransactionBatch]: ...


@overload
def connect(database: ZooKeeperStore, **options: Unpack[ConnectOptions]) -> DualWriter[ZooKeeperBatch]: ...


@overload
def connect(database: str | TxnStateStore | None = None, **options: Unpack[ConnectOptions]) -> DualWriter[Any]: ...


def connect(
    database: Database | None = None,
    *,
    kafka: Kafka | None = None,
    transactional_id: str | None = None,
    producer: ProducerName | None = None,
    two_phase: bool | None = None,
    lanes: int | None = None,
    on_lost: OnLost | None = None,
    timeouts: Timeouts | None = None,
    session: SessionSource | None = None,
    schema: str | None = None,
    settings: Settings | None = None,
) -> DualWriter[Any]:
    """Build a writer and open it. What is not given comes from `settings`, or else from the environment (`DUALWRITE_*`).

    Args:
        database: A URL (see `store_from_url`), a SQLAlchemy Engine, or a store. What is made from a URL is closed with the
            writer; an engine or a store of yours stays open, and may serve several writers.
        kafka: Settings in librdkafka's names, all of them; or just `host:port`, which takes the place of `bootstrap.servers` in
            the other settings.
        transactional_id: The same over restarts, and used by one writer at a time.
        producer: "auto" takes the best for the cluster: "native" where that has transaction.version 2, else "librdkafka".
        two_phase: True to require two-phase commit of the broker, False to do without, None to have it where it is offered.
        lanes: How many transactional ids the writer takes turns on (see DualWriter); by default as many as suit the producer.
        on_lost: See DualWriter.
        timeouts: Time limits.
        session: What `tx.session` is made by: a sessionmaker, or a Session class; see SqlStateStore. For a URL or an Engine.
        schema: The schema in which the database has our tables; see SqlStateStore. For a URL or an Engine.
        settings: Where the rest comes from.

    Returns:
        An open writer, to be closed: by `with`, or by `close()`.

    Raises:
        ConfigurationError: Something is missing or contradicts itself.
        DualWriteError: As `DualWriter.open`.
    """
    chosen = (settings or Settings.from_environment()).with_changes(
        transactional_id=transactional_id,
        producer=producer,
        two_phase=two_phase,
        lanes=lanes,
        on_lost=on_lost,
        timeouts=timeouts,
        schema=schema,
    )
    if chosen.transactional_id is None:
        raise ConfigurationError(
            "No transactional id is given.",
            next_step="transactional_id=… (environment: DUALWRITE_TRANSACTIONAL_ID): a name that stays over restarts",
        )
    validate_transactional_id(chosen.transactional_id, lanes=chosen.lanes or 1)
    config = _kafka_config(kafka, chosen)
    chosen_timeout_ms(config)  # refuses one that is too short
    if chosen.producer == "librdkafka" or not config.properties.keys() <= KNOWN_NAMES:
        # before the claim: what can't work must not take the id from a writer that does
        from dualwrite.kafka.librdkafka.producer import check_settings  # noqa: PLC0415  (our own producer checks what it reads itself)

        check_settings(config)
    store = _store(database, chosen, session)
    coordinator = WireTransactionCoordinator(config, timeout=chosen.timeouts.kafka)
    try:
        producers = choose_producer(config, coordinator, chosen, share_connections=True)
        writer: DualWriter[Any] = DualWriter(
            store,
            transactional_id=chosen.transactional_id,
            producers=producers,
            coordinator=coordinator,
            lanes=chosen.lanes or producers.lanes,
            timeouts=chosen.timeouts,
            on_lost=chosen.on_lost,
            owns_store=store is not database,
            owns_coordinator=True,
        )
    except BaseException:
        coordinator.close()
        if store is not database:
            store.close()
        raise
    try:
        return writer.open()
    except BaseException:
        writer.close()
        raise


def open_recoverer(
    database: Database | None = None,
    *,
    kafka: Kafka | None = None,
    timeouts: Timeouts | None = None,
    schema: str | None = None,
    settings: Settings | None = None,
) -> Recoverer:
    """Build a Recoverer; arguments as in `connect`. To be closed: by `with`, or by `close()`."""
    chosen = (settings or Settings.from_environment()).with_changes(timeouts=timeouts, schema=schema)
    config = _kafka_config(kafka, chosen)
    store = _store(database, chosen)
    return Recoverer(
        store,
        WireTransactionCoordinator(config, timeout=chosen.timeouts.kafka),
        timeouts=chosen.timeouts,
        owns_store=store is not database,
        owns_coordinator=True,
    )


def _kafka_config(kafka: Kafka | None, settings: Settings) -> KafkaConfig:
    """The settings; servers alone are put into those that there are: a login and TLS don't go with an address."""
    if isinstance(kafka, str):
        # the other name of bootstrap.servers, which would name other servers
        others = {name: value for name, value in settings.kafka.items() if name != "metadata.broker.list"}
        return KafkaConfig.of({**others, "bootstrap.servers": kafka})
    return KafkaConfig.of(settings.kafka if kafka is None else kafka)


def _store(database: Database | None, settings: Settings, session: SessionSource | None = None) -> TxnStateStore:
    if isinstance(database, TxnStateStore):
        if session is not None:
            raise ConfigurationError("session is given beside a store.", next_step="SqlStateStore(…, session=…)")
        return database
    if isinstance(database, Engine):
        return SqlStateStore(database, session=session, schema=settings.schema)
    url = database or settings.database_url
    if url is None:
        raise ConfigurationError(
            "No database is given.",
            next_step="a URL, a SQLAlchemy Engine or a store as the first argument (environment: DUALWRITE_DATABASE_URL)",
        )
    if isinstance(url, URL):
        url = url.render_as_string(hide_password=False)
    if not isinstance(url, str):
        raise ConfigurationError(
            f"A {type(url).__module__}.{type(url).__name__} is no database that dualwrite knows by itself.",
            next_step="a URL, a SQLAlchemy Engine, or a store around it: SqlStateStore.from_psycopg(connection or pool), "
            "RocksDBStore(rdict), ZooKeeperStore(client)",
        )
    if session is None:
        return store_from_url(url, schema=settings.schema)
    if not keeps_a_table(url):
        raise ConfigurationError("session is given, but the database is not a SQL database.", next_step="leave it out")
    return SqlStateStore.from_url(url, session=session, schema=settings.schema)


log = logging.getLogger(__name__)


def recover(
    database: Database | None = None,
    *,
    kafka: Kafka | None = None,
    ids: Iterable[str] | None = None,
    prefix: str = "",
    timeouts: Timeouts | None = None,
    schema: str | None = None,
    settings: Settings | None = None,
) -> RecoveryReport:
    """Settle what crashes left behind, in one call: a start-up hook of a service. See `Recoverer.recover`.

    It takes the ids from live writers. Opening a writer recovers its own id by itself; this is for the ids of others. The
    tasks of a job (Spark) that has a run open keep theirs, unless they are named by `ids`; what such a job leaves is settled
    by its next run, or by `dualwrite recover --prefix`. Where Kafka does not answer, no id is taken: each one's error stands in
    the report.
    """
    with open_recoverer(database, kafka=kafka, timeouts=timeouts, schema=schema, settings=settings) as recoverer:
        return recoverer.recover(_chosen(recoverer, ids, prefix))


def plan_recovery(
    database: Database | None = None,
    *,
    kafka: Kafka | None = None,
    ids: Iterable[str] | None = None,
    prefix: str = "",
    timeouts: Timeouts | None = None,
    schema: str | None = None,
    settings: Settings | None = None,
) -> RecoveryPlan:
    """What `recover` would do with the same arguments now, and why, for each id and generation. Changes nothing."""
    with open_recoverer(database, kafka=kafka, timeouts=timeouts, schema=schema, settings=settings) as recoverer:
        return recoverer.plan(_chosen(recoverer, ids, prefix))


def _chosen(recoverer: Recoverer, ids: Iterable[str] | None, prefix: str) -> list[str]:
    """The ids that were asked for, with their lanes; without those of jobs at work where none was named."""
    ids = None if ids is None else list(ids)
    spared = _ids_at_work(recoverer.store) if ids is None else frozenset()
    chosen = ids_with_lanes(recoverer.store, ids, prefix=prefix)
    for name in spared.intersection(chosen):
        log.info("%s: left alone: a job that is at work has it", name)
    return [name for name in chosen if name not in spared]


def _ids_at_work(store: TxnStateStore) -> frozenset[str]:
    if not isinstance(store, SqlStateStore):
        return frozenset()
    from dualwrite.jobs.ledger import JobLedger  # noqa: PLC0415  (`import dualwrite` needs none of it)

    return JobLedger(store).attempts_at_work()
