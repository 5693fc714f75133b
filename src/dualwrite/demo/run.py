"""The whole demo: creates what a run needs, runs, compares, removes what it created, and returns the verdict."""

from __future__ import annotations

import secrets
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from sqlalchemy import make_url

import dualwrite
from dualwrite import migration
from dualwrite.demo.flights import Tables, read_flights, share_of
from dualwrite.demo.screen import Screen
from dualwrite.demo.supervisor import MAX_DELAY, MAX_POOL_DELAY, Supervisor, plan_kills
from dualwrite.demo.verdict import Verdict, compare, read_evidence
from dualwrite.demo.worker import Job, id_prefix
from dualwrite.devcluster import DevCluster, DevClusterError, TerminalProgress
from dualwrite.devcluster.locations import make_directory, state_dir
from dualwrite.errors import BrokerError, ConfigurationError, DualWriteError, NotResolvedError
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.librdkafka.topic_admin import create_topic, delete_topic
from dualwrite.recovery.recoverer import forget
from dualwrite.settings import ProducerName, Settings
from dualwrite.stores.sql import SqlStateStore
from dualwrite.transactional_id import TransactionalId

REPORTS: Final = 10
"""Maximum number of transactions in one report of a worker."""

REPORTS_PER_RUN: Final = 200
MAX_WORKERS: Final = 32
PARTITIONS: Final = 3
_ADMIN_TIMEOUT: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to run the demo; the options of `dualwrite demo` say what each is. Kafka's settings are named as in librdkafka.

    By default, the database is a SQLite file of the run, the broker a local one, and there are two workers, or one on SQLite: a
    second process would spend most of its time waiting for the file's only write lock, and would be killed there.

    Raises:
        ConfigurationError: A number is out of range, the producer is unknown, or `naive` and `pool` are both set.
    """

    departures: int = 20_000
    kills: int = 20
    seed: int = 939
    workers: int | None = None
    producer: ProducerName = "auto"
    naive: bool = False
    pool: bool = False
    url: str | None = None
    kafka: Mapping[str, Any] | None = None
    data_dir: Path | None = None
    keep: bool = False

    def __post_init__(self) -> None:
        Settings(producer=self.producer)
        if self.naive and self.pool:
            raise ConfigurationError("naive and pool can't be combined.", next_step="use --pool or --naive, not both")
        if self.kills < 0:
            raise ConfigurationError(f"kills must be at least 0, not {self.kills}.")
        if not 0 < self.number_of_workers <= MAX_WORKERS:
            raise ConfigurationError(f"workers must be between 1 and {MAX_WORKERS}, not {self.workers}.")

    @property
    def number_of_workers(self) -> int:
        """`workers`, or its default."""
        if self.workers is not None:
            return self.workers
        return 1 if self.url is None or self.url.startswith("sqlite") else 2


def run_demo(options: Options, screen: Screen | None = None) -> Verdict:
    """Run the demo. Resources created for the run are removed, unless `keep` is set, something disagrees, or it fails.

    Raises:
        DualWriteError: Something is missing or can't be reached, or the demo can't continue.
        KeyboardInterrupt: Ctrl-C; the workers are stopped, and the resources removed.
    """
    screen = screen or Screen(Console(quiet=True))
    shares = Counter(share_of(flight.aircraft, options.number_of_workers) for flight in read_flights(options.departures))
    with prepared(options, secrets.token_hex(3), screen) as resources:
        with screen:
            verdict = _run(options, resources, shares, screen)
        resources.keep = resources.keep or not (options.naive or verdict.all_agree)
    return verdict


@dataclass
class Resources:
    """The resources of a run: given by the user, or created for the run and removed after it.

    The folder has the logs, and the SQLite file if there is one. `keep` is set if the result should be inspected.
    """

    run: str
    folder: Path
    url: str
    kafka: Mapping[str, Any]
    topic: str
    store: SqlStateStore
    tables: Tables
    keep: bool

    def recover(self) -> dualwrite.RecoveryReport:
        """Recover all ids of the run, which no process uses any more. Raises as `dualwrite.recover`."""
        return dualwrite.recover(self.store, kafka=self.kafka, prefix=id_prefix(self.run))

    def names(self) -> dict[str, str]:
        """The names and addresses for a user who wants to inspect the result."""
        return {
            "database": make_url(self.url).render_as_string(),  # without the password
            "tables": ", ".join(self.tables.metadata.tables),
            "kafka": KafkaConfig.of(self.kafka).servers,
            "topic": self.topic,
            "logs": str(self.folder),
        }


def _run(options: Options, resources: Resources, shares: Counter[int], screen: Screen) -> Verdict:
    transactions = shares.total()
    max_delay = MAX_POOL_DELAY if options.pool else MAX_DELAY
    plan = plan_kills(options.kills, transactions - len(shares), options.seed, max_delay=max_delay)
    jobs = [job_of(options, resources, worker) for worker in range(options.number_of_workers)]
    supervisor = Supervisor(jobs, plan, resources.folder, lambda tally: screen.show(tally, transactions))
    tally = supervisor.tally
    try:
        supervisor.run()
        # A process that was killed near the end may have left an id that no live pool has recovered yet.
        report = resources.recover()
        tally.outcomes.update(found.outcome.value for found in report)
        tally.unacknowledged = max(tally.unacknowledged, len(report.unacknowledged))
        evidence = read_evidence(resources.store.engine, resources.tables, resources.kafka, resources.topic, options.departures)
        rows = [resources.store.read(name) for name in resources.store.list(id_prefix(resources.run))]
    except KeyboardInterrupt:
        screen.say(f"Interrupted after {tally.transactions:,} of {transactions:,} flights and {tally.kills} kills.")
        raise
    except Exception:
        resources.keep = True
        raise
    return Verdict(
        naive=options.naive,
        departures=options.departures,
        kills_wanted=options.kills,
        rows=len(evidence.rows),
        messages=len(evidence.messages),
        tally=tally,
        findings=compare(evidence),
        unresolved=tuple(row.transactional_id for row in rows if row is not None and row.unresolved_generations),
        places=resources.names(),
        pool=options.pool,
    )


def job_of(options: Options, resources: Resources, worker: int) -> Job:
    """The job of one of the workers."""
    return Job(
        run=resources.run,
        worker=worker,
        workers=options.number_of_workers,
        departures=options.departures,
        url=resources.url,
        kafka=dict(resources.kafka),
        topic=resources.topic,
        producer=options.producer,
        naive=options.naive,
        pool=options.pool,
        report_every=max(1, min(REPORTS, options.departures // REPORTS_PER_RUN)),
    )


@contextmanager
def prepared(options: Options, run: str, screen: Screen) -> Iterator[Resources]:
    """Prepare the resources of a run; afterwards those created for it are removed, unless `Resources.keep` is set.

    Raises:
        DualWriteError: Something can't be reached or created; what was already created is removed.
    """
    folder = (options.data_dir.expanduser().absolute() if options.data_dir else state_dir() / "demo") / run
    url = options.url or f"sqlite:///{folder / 'demo.db'}"
    with SqlStateStore.from_url(url) as store:
        tables = Tables(run, store.engine.dialect.name)
        resources = Resources(run, folder, url, options.kafka or {}, f"departures-{run}", store, tables, options.keep)
        make_directory(folder)
        try:
            with _broker(options, resources, screen), _database(options, resources), _topic(resources), _recovered(resources):
                yield resources
        finally:
            store.close()
            if not resources.keep:
                shutil.rmtree(folder, ignore_errors=True)
                with suppress(OSError):  # not empty: it has other runs
                    folder.parent.rmdir()


@contextmanager
def _broker(options: Options, resources: Resources, screen: Screen) -> Iterator[None]:
    """The given broker, or the cluster `default` if it runs, or a new one for the run."""
    if resources.kafka:
        yield
        return
    running = _running("default")
    if running is not None:
        resources.kafka = {"bootstrap.servers": running}
        screen.say(f"Using the running broker on {running}.")
        yield
        return
    name = f"demo-{resources.run}"
    progress = TerminalProgress()
    cluster = DevCluster(name, data_dir=resources.folder / "kafka" if options.data_dir else None, progress=progress)
    is_up = False
    try:
        with progress:
            status = cluster.up()
        is_up = True
        resources.kafka = {"bootstrap.servers": status.bootstrap_servers}
        screen.say(f"Started Kafka {status.kafka_version} on {status.bootstrap_servers}.")
        yield
    finally:
        if resources.keep and is_up:
            screen.remind(f"The broker keeps running. To remove it: dualwrite dev down --purge --name {name}")
        else:
            cluster.down(purge=True)


def _running(name: str) -> str | None:
    cluster = DevCluster(name)
    try:
        status = cluster.status() if cluster.exists else None
    except DevClusterError:
        return None
    return status.bootstrap_servers if status is not None and status.ready else None


@contextmanager
def _database(options: Options, resources: Resources) -> Iterator[None]:
    """Create dualwrite's table and the run's tables. At the end, drop the latter and forget the ids in a user's database."""
    migration.upgrade(resources.url)
    resources.tables.create(resources.store.engine, options.number_of_workers)
    try:
        yield
    finally:
        if options.url is not None and not resources.keep:
            resources.tables.drop(resources.store.engine)
            prefix = id_prefix(resources.run)
            for name in {TransactionalId.of_row(row).logical for row in resources.store.list(prefix)}:
                with suppress(NotResolvedError):
                    forget(resources.store, name)
            for lease in resources.store.leases.entries(prefix):  # of killed workers: they may not have expired yet
                resources.store.leases.release([lease.transactional_id], lease.owner)


@contextmanager
def _topic(resources: Resources) -> Iterator[None]:
    try:
        create_topic(resources.kafka, resources.topic, PARTITIONS, timeout=_ADMIN_TIMEOUT)
    except BrokerError as error:
        raise BrokerError(
            f"The topic {resources.topic!r} can't be created on {KafkaConfig.of(resources.kafka).servers}.",
            cause=str(error),
            next_step="check --kafka, or omit it to use a local broker",
        ) from error
    try:
        yield
    finally:
        if not resources.keep:
            with suppress(BrokerError):  # a leftover topic does no harm
                delete_topic(resources.kafka, resources.topic, timeout=_ADMIN_TIMEOUT)


@contextmanager
def _recovered(resources: Resources) -> Iterator[None]:
    """Leave nothing in doubt, even if the run was interrupted just after a kill, before the topic is deleted."""
    try:
        yield
    finally:
        if not resources.keep:
            with suppress(DualWriteError):  # then the ids remain, and the error that ended the run is reported
                resources.recover()
