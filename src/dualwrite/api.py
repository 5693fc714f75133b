"""Build a writer, a pool or a recoverer from arguments, a Settings object and the environment."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack, closing
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Final, TypedDict, Unpack, overload

from sqlalchemy import URL, Connection, Engine

from dualwrite.errors import ConfigurationError, told_briefly
from dualwrite.kafka.choose import ProbedCluster
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.observability.logs import SubjectLogger
from dualwrite.opening import Database, Kafka, as_store, connected, journaled, open_recoverer, the_id
from dualwrite.recovery.plan import RecoveryPlan
from dualwrite.recovery.recoverer import Recoverer, ids_with_lanes
from dualwrite.recovery.report import RecoveryReport
from dualwrite.settings import (
    Acknowledge,
    OnLost,
    ProducerName,
    Settings,
    Timeouts,
    WhenKafkaIsDown,
    validate_acknowledge,
    validate_when_kafka_is_down,
)
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.leases import number_of, numbered
from dualwrite.stores.sql import SqlStateStore
from dualwrite.transactional_id import validate_transactional_id
from dualwrite.writer import DualWriter

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from dualwrite.pool.pool import WriterPool
    from dualwrite.pool.scaling import PoolOptions
    from dualwrite.relay.journal_keeper import JournalKeeper
    from dualwrite.stores.journal import JournalLimits
    from dualwrite.stores.rocksdb import RocksDBStore
    from dualwrite.stores.rocksdb.rocksdb_batch import TransactionBatch
    from dualwrite.stores.sql.orm import SessionSource
    from dualwrite.stores.zookeeper import ZooKeeperStore
    from dualwrite.stores.zookeeper.zookeeper_transaction import ZooKeeperBatch

log = SubjectLogger(__name__)

_LARGE_NUMBER: Final = 99_999
"""A number for which a pool's prefix must leave room in its ids."""


class WriterOptions(TypedDict, total=False):
    """The options that `connect` and `create_pool` have in common; see `connect` for what each means."""

    kafka: Kafka | None
    producer: ProducerName | None
    two_phase: bool | None
    lanes: int | None
    on_lost: OnLost | None
    timeouts: Timeouts | None
    session: SessionSource | None
    schema: str | None
    settings: Settings | None


class ConnectOptions(WriterOptions, total=False):
    """The options of `connect` besides the database; see there for what each means."""

    transactional_id: str | None
    acknowledge: Acknowledge
    when_kafka_is_down: WhenKafkaIsDown
    journal: JournalLimits | None


@overload
def connect(database: URL | Engine | AsyncEngine, **options: Unpack[ConnectOptions]) -> DualWriter[Connection]: ...


@overload
def connect(database: RocksDBStore, **options: Unpack[ConnectOptions]) -> DualWriter[TransactionBatch]: ...


@overload
def connect(database: ZooKeeperStore, **options: Unpack[ConnectOptions]) -> DualWriter[ZooKeeperBatch]: ...


@overload
def connect(database: str | TxnStateStore | None = None, **options: Unpack[ConnectOptions]) -> DualWriter[Any]: ...


@told_briefly
def connect(
    database: Database | None = None,
    *,
    kafka: Kafka | None = None,
    transactional_id: str | None = None,
    producer: ProducerName | None = None,
    two_phase: bool | None = None,
    lanes: int | None = None,
    on_lost: OnLost | None = None,
    acknowledge: Acknowledge = "visible",
    when_kafka_is_down: WhenKafkaIsDown = "fail",
    journal: JournalLimits | None = None,
    timeouts: Timeouts | None = None,
    session: SessionSource | None = None,
    schema: str | None = None,
    settings: Settings | None = None,
) -> DualWriter[Any]:
    """Build a writer and open it. Arguments not given come from `settings`, or else from the environment (`DUALWRITE_*`).

    Args:
        database: A URL (see `store_from_url`), a SQLAlchemy Engine, or a store. A store made from a URL is closed with the
            writer; an engine or store that you pass stays open, and several writers can share it. Of an AsyncEngine, or one of
            another driver (psycopg2, asyncpg, mysqlclient …), only the URL is used, for connections of dualwrite's own by
            psycopg, PyMySQL or sqlite3: your sessions are joined (`WriterPool.join`).
        kafka: All Kafka settings, with librdkafka's names; or only `host:port`, which replaces `bootstrap.servers` in the
            settings from elsewhere.
        transactional_id: Must stay the same across restarts; only one writer may use it at a time.
        producer: "auto" picks the best for the cluster: "native" if it has transaction.version 2, else "librdkafka".
        two_phase: True requires two-phase commit from the broker, False never uses it, None uses it if the broker offers it.
        lanes: The number of transactional ids that the writer rotates over (see DualWriter); the default depends on the
            producer.
        on_lost: See DualWriter.
        acknowledge: When a block ends: "visible" after Kafka's commit, when consumers can read the messages. "journaled" after
            the database's commit, which has the messages as well; a thread publishes them at once, each exactly once, in the
            order of their commits as far as one can know of the other (docs/guides/journaled.md). Then no step of a block waits
            for Kafka, and its outages are not noticed. The id names the journal, which any number of writers and pools may
            share. Only for SQL databases.
        when_kafka_is_down: "fail" raises the error of Kafka. With "journal" messages are written into a table in the database
            transaction of their block, and published later (docs/guides/kafka-down.md). The writer then opens while Kafka is
            down, too, and recovers its id before it sends anything to Kafka. Only for SQL databases. A broker that refuses the
            writer (BrokerAuthorizationError) is not down: that is raised in either case.
        journal: How much that table may contain; then transactions fail.
        timeouts: Time limits.
        session: Makes `tx.session`: a sessionmaker or a Session class; see SqlStateStore. Only for a URL or an Engine.
        schema: The schema that contains dualwrite's tables; see SqlStateStore. Only for a URL or an Engine.
        settings: Supplies the arguments that are not given.

    Returns:
        An open writer. Close it with `with` or `close()`.

    Raises:
        ConfigurationError: A setting is missing, or contradicts another.
        DualWriteError: As for `DualWriter.open`.
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
    is_journaled = validate_acknowledge(acknowledge) == "journaled"
    if validate_when_kafka_is_down(when_kafka_is_down) == "fail" and not is_journaled:
        return connected(database, kafka=kafka, session=session, settings=chosen, uses=("writer",))
    with ExitStack() as opened:
        store = as_store(database, chosen, session)
        if store is not database:
            opened.callback(store.close)
        store.check_rights("writer", "journal")
        keeper = _keeper(is_journaled)(store, the_id(chosen), kafka, chosen, journal)
        opened.callback(keeper.stop)
        if is_journaled:
            writer: DualWriter[Any] = journaled(store, keeper.journal, chosen, keeper=keeper, owns_store=store is not database)
            opened.pop_all()
            return writer
        writer = connected(
            store,
            settings=replace(chosen, timeouts=chosen.timeouts.with_journal()),
            kafka=kafka,
            session=None,
            journal=keeper.journal,
            keeper=keeper,
            owns_store=store is not database,
        )
        opened.pop_all()
        return writer


def _keeper(is_journaled: bool) -> type[JournalKeeper]:
    """What looks after the journal: a thread that publishes it at once, or one that waits for Kafka's return."""
    if is_journaled:
        from dualwrite.relay.journal_publisher import JournalPublisher  # noqa: PLC0415  (most programs don't need it)

        return JournalPublisher
    from dualwrite.relay.journal_keeper import JournalKeeper  # noqa: PLC0415  (as above)

    return JournalKeeper


class PoolArguments(WriterOptions, total=False):
    """The options of `create_pool` besides the database and the prefix; see there for what each means."""

    size: int | None
    options: PoolOptions | None


@overload
def create_pool(
    database: URL | Engine | AsyncEngine, *, prefix: str, **options: Unpack[PoolArguments]
) -> WriterPool[Connection]: ...


@overload
def create_pool(database: RocksDBStore, *, prefix: str, **options: Unpack[PoolArguments]) -> WriterPool[TransactionBatch]: ...


@overload
def create_pool(database: ZooKeeperStore, *, prefix: str, **options: Unpack[PoolArguments]) -> WriterPool[ZooKeeperBatch]: ...


@overload
def create_pool(
    database: str | TxnStateStore | None = None, *, prefix: str, **options: Unpack[PoolArguments]
) -> WriterPool[Any]: ...


@told_briefly
def create_pool(
    database: Database | None = None,
    *,
    prefix: str,
    size: int | None = None,
    options: PoolOptions | None = None,
    settings: Settings | None = None,
    session: SessionSource | None = None,
    schema: str | None = None,
    **connecting: Any,
) -> WriterPool[Any]:
    """Build a pool of writers, and open them. Arguments not given come from `settings`, or else from the environment.

    Args:
        database: As for `connect`. A store made from a URL is closed with the pool; an engine or store that you pass stays
            open.
        prefix: The writers' transactional ids are `<prefix>.1`, `<prefix>.2`, and so on: the lowest numbers that no other pool
            has leased. Any number of processes may use a prefix; they recover the ids of processes that have died. With a store
            of your own that has no leases, only one pool may use a prefix at a time.
        size: The number of writers. By default as many as the load asks for, from two on: the pool opens more if it waits for
            the network most of the time, or if threads inside `transaction()` need them, up to the option `max_size` and the
            number of connections that the Engine keeps (`pool_size`). `WriterPool.resize` changes it. With
            `acknowledge="journaled"` there are no writers, and it limits how many units run side by side.
        options: How the pool groups units, and when its calls return.
        settings: Supplies the arguments that are not given.
        session: As for `connect`.
        schema: As for `connect`.
        **connecting: As for `connect`: kafka, producer, two_phase, lanes, on_lost, timeouts. They hold for the recovery of
            ids of dead processes as well. The default of `Timeouts(delivery=…)` is 20 s for a pool.

    Returns:
        A pool. Close it with `with` or `close()`.

    Raises:
        ConfigurationError: A setting is missing, or contradicts another.
        DualWriteError: As for `DualWriter.open`.
    """
    from dualwrite.pool.pool import WriterPool  # noqa: PLC0415  (as above)
    from dualwrite.pool.scaling import PoolOptions  # noqa: PLC0415  (a writer alone does not need it)

    _check_pool_arguments(connecting, {each.name for each in fields(PoolOptions)})
    options = options or PoolOptions()
    if size is not None:
        options.check_size(size)
    chosen = (settings or Settings.from_environment()).with_changes(schema=schema, timeouts=connecting.pop("timeouts", None))
    chosen = replace(chosen, timeouts=chosen.timeouts.in_pool())
    validate_transactional_id(numbered(prefix, max(size or 0, _LARGE_NUMBER)), lanes=chosen.lanes or 1)
    store = as_store(database, chosen, session)
    kafka = connecting.pop("kafka", None)
    # a row locked by a paused process must not keep the pool from recovering other ids: the pool tries again later
    pool_timeouts = replace(chosen.timeouts, claim=min(chosen.timeouts.claim, options.lease))

    probed = ProbedCluster()
    journal, timeouts = None, chosen.timeouts

    def open_writer(name: str) -> DualWriter[Any]:
        if journal is not None and options.is_journaled:
            return journaled(store, journal, chosen)
        of_writer = chosen.with_changes(transactional_id=name, timeouts=timeouts, **connecting)
        try:
            return connected(store, settings=of_writer, kafka=kafka, session=None, probed=probed, journal=journal)
        except BaseException:
            probed.forget()
            raise

    def recoverer() -> Recoverer:
        return open_recoverer(store, kafka=kafka, settings=chosen.with_changes(**connecting), timeouts=pool_timeouts)

    def ask_kafka(ids: list[str], seconds: float) -> object:
        with closing(WireTransactionCoordinator(KafkaConfig.over(kafka, chosen.kafka), timeout=seconds)) as coordinator:
            return coordinator.describe_all(ids) if ids else coordinator.cluster_id()

    with ExitStack() as opened:
        if store is not database:
            opened.callback(store.close)
        config = KafkaConfig.over(kafka, chosen.kafka)
        keeper = None
        store.check_rights("writer", "pool", *(["journal"] if options.when_kafka_is_down == "journal" else ()))
        if options.when_kafka_is_down == "journal":
            keeper = _keeper(options.is_journaled)(store, prefix, kafka, chosen.with_changes(**connecting), options.journal)
            journal, timeouts = keeper.journal, timeouts.with_journal()
            opened.callback(keeper.stop)
        pool: WriterPool[Any] = WriterPool(
            open_writer,
            recoverer,
            size=size,
            store=store,
            settings=chosen.with_changes(transactional_id=prefix, kafka=config.properties, **connecting),
            prefix=prefix,
            options=options,
            owns_store=store is not database,
            keeper=keeper,
            ask_kafka=ask_kafka,
        )
        opened.pop_all()
        opened.push(pool)
        if store.leases is None:
            _recover_above(recoverer, prefix, pool.size)
        opened.pop_all()
        return pool


def _check_pool_arguments(given: Iterable[str], of_options: Collection[str]) -> None:
    for name in given:
        if name == "transactional_id":
            raise ConfigurationError("A pool has no transactional_id of its own.", next_step="pass prefix=…")
        if name not in PoolArguments.__annotations__:
            instead = f"; pass options=PoolOptions({name}=…)" if name in of_options else ""
            raise TypeError(f"create_pool() got an unexpected keyword argument {name!r}{instead}")


def _recover_above(new_recoverer: Callable[[], Recoverer], prefix: str, size: int) -> None:
    """Recover the fixed ids that a larger pool with the prefix used before, and that no writer will open now."""
    with new_recoverer() as recoverer:
        pending = recoverer.pending(prefix=f"{prefix}.")
        recoverer.recover([name for name in pending if (number_of(prefix, name) or 0) > size]).raise_for_problems()


def recover(
    database: Database | None = None,
    *,
    kafka: Kafka | None = None,
    ids: Iterable[str] | None = None,
    prefix: str = "",
    on_lost: OnLost | None = None,
    timeouts: Timeouts | None = None,
    schema: str | None = None,
    settings: Settings | None = None,
) -> RecoveryReport:
    """Resolve the in-doubt transactions that crashes left behind, for example when a service starts. See `Recoverer.recover`.

    What Kafka has aborted although the database committed it is published again, unless `on_lost` is "report" or "raise"
    (which mean the same here: it stays in the row, and in the report).

    It fences live writers on these ids. A writer recovers its own id when it opens; use this for other ids. The ids of a job
    (Spark) that is running are skipped unless `ids` lists them; what such a job leaves behind is resolved by its next run, or
    by `dualwrite recover --prefix`. If Kafka does not answer, no id is claimed, and the report has an error for each.
    """
    with open_recoverer(
        database, kafka=kafka, on_lost=on_lost, timeouts=timeouts, schema=schema, settings=settings
    ) as recoverer:
        selected, fences = _selected_ids(recoverer, ids, prefix)
        return recoverer.recover(selected, fences=fences)


def plan_recovery(
    database: Database | None = None,
    *,
    kafka: Kafka | None = None,
    ids: Iterable[str] | None = None,
    prefix: str = "",
    on_lost: OnLost | None = None,
    timeouts: Timeouts | None = None,
    schema: str | None = None,
    settings: Settings | None = None,
) -> RecoveryPlan:
    """What `recover` would do now with the same arguments, and why, for each id and generation. Read-only."""
    with open_recoverer(
        database, kafka=kafka, on_lost=on_lost, timeouts=timeouts, schema=schema, settings=settings
    ) as recoverer:
        return recoverer.plan(_selected_ids(recoverer, ids, prefix)[0])


def _selected_ids(recoverer: Recoverer, ids: Iterable[str] | None, prefix: str) -> tuple[list[str], dict[str, int]]:
    """The requested ids with their lanes; if `ids` is None, without those of running jobs.

    Returns:
        The ids, and the fencing tokens of those that jobs use which are not running: with these only, they may be claimed.
    """
    if ids is not None:
        return ids_with_lanes(recoverer.store, list(ids), prefix=prefix), {}
    listed = ids_with_lanes(recoverer.store, prefix=prefix)
    fences = _fences_of_jobs(recoverer.store)  # read last, so that it has every task's id that is listed
    selected = []
    for name in listed:
        if fences.get(name, 0) is None:
            log.info("skipped: a running job is using it", transactional_id=name)
        else:
            selected.append(name)
    return selected, {name: fence for name, fence in fences.items() if fence is not None}


def _fences_of_jobs(store: TxnStateStore) -> dict[str, int | None]:
    if not isinstance(store, SqlStateStore):
        return {}
    from dualwrite.jobs.ledger import JobLedger  # noqa: PLC0415  (`import dualwrite` does not need it)

    return JobLedger(store).attempt_fences()
