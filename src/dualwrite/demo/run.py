"""The whole demo: creates what a run needs, runs, compares, removes what it created, and returns the verdict."""

from __future__ import annotations

import json
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from rich.console import Console
from sqlalchemy import make_url, select

import dualwrite
from dualwrite import migration
from dualwrite.demo.flights import Tables, read_flights, share_of
from dualwrite.demo.screen import Screen
from dualwrite.demo.supervisor import MAX_DELAY_SECONDS, MAX_POOL_DELAY_SECONDS, Supervisor, plan_kills
from dualwrite.demo.verdict import Content, DemoVerdict, Evidence, TopicMessage, compare
from dualwrite.demo.worker import Job, Options, id_prefix
from dualwrite.devcluster import DevCluster, DevClusterError, TerminalProgress
from dualwrite.devcluster.locations import make_directory, state_dir
from dualwrite.errors import BrokerError, DualWriteError, NotResolvedError
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.librdkafka.topic_admin import create_topic, delete_topic
from dualwrite.recovery.recoverer import forget
from dualwrite.stores.sql import SqlStateStore
from dualwrite.testing.topics import read_committed
from dualwrite.transactional_id import TransactionalId

PARTITIONS: Final = 3
_ADMIN_TIMEOUT: Final = 30.0
_QUIET: Final = {"log_level": 4}
"""Only warnings and worse: at a higher level, librdkafka logs that an AdminClient was closed with unread events."""


def run_demo(options: Options, screen: Screen | None = None) -> DemoVerdict:
    """Run the demo. Resources created for the run are removed, unless `keep` is set, something disagrees, or it fails.

    Raises:
        DualWriteError: Something is missing or can't be reached, or the demo can't continue.
        KeyboardInterrupt: Ctrl-C; the workers are stopped, and the resources removed.
    """
    screen = screen or Screen(Console(quiet=True))
    shares = Counter(share_of(flight.aircraft, options.number_of_workers) for flight in read_flights(options.departures))
    with prepared(options, secrets.token_hex(3), screen) as run:
        verdict = _verdict(run, shares, screen)
        run.keep = run.keep or not (options.naive or verdict.all_agree)
    return verdict


class DemoRun:
    """A run and its resources: given by the user, or created for it and removed after it, unless `keep` is set.

    The folder has the logs, and the SQLite file if there is one.
    """

    def __init__(self, name: str, options: Options) -> None:
        self.name = name
        self.options = options
        self.keep = options.keep
        self.folder = (options.data_dir.expanduser().absolute() if options.data_dir else state_dir() / "demo") / name
        self.url = options.url or f"sqlite:///{self.folder / 'demo.db'}"
        self.kafka = dict(options.kafka or {})
        self.topic = f"departures-{name}"
        self.store = SqlStateStore.from_url(self.url)
        self.tables = Tables(name, self.store.engine.dialect.name)

    def job(self, worker: int) -> Job:
        """The job of one of the workers."""
        return Job(run=self.name, worker=worker, options=self.options, url=self.url, kafka=self.kafka, topic=self.topic)

    def recover(self) -> dualwrite.RecoveryReport:
        """Recover all ids of the run, which no process uses any more. Raises as `dualwrite.recover`."""
        return dualwrite.recover(self.store, kafka=self.kafka, prefix=id_prefix(self.name))

    def evidence(self) -> Evidence:
        """Flights, database and topic, to be compared. Raises as `read_committed`."""
        with self.store.engine.connect() as connection:
            departures = self.tables.departures
            rows = connection.execute(select(departures).order_by(departures.c.row)).mappings().all()
            aircraft = connection.execute(select(self.tables.aircraft)).mappings().all()
        return Evidence(
            flights=list(read_flights(self.options.departures)),
            rows=[{name: row[name] for name in row if name != "row"} for row in rows],
            messages=[
                TopicMessage(each.partition, (each.key or b"").decode(errors="replace"), _content(each.value))
                for each in read_committed({**self.kafka, **_QUIET}, self.topic)
            ],
            aircraft={row["aircraft"]: {name: row[name] for name in row if name != "aircraft"} for row in aircraft},
        )

    def places(self) -> dict[str, str]:
        """The names and addresses for a user who wants to inspect the result."""
        return {
            "database": make_url(self.url).render_as_string(),  # without the password
            "tables": ", ".join(self.tables.metadata.tables),
            "kafka": KafkaConfig.of(self.kafka).servers,
            "topic": self.topic,
            "logs": str(self.folder),
        }


def _content(value: bytes | None) -> Content | None:
    try:
        content = json.loads(value or b"")
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _verdict(run: DemoRun, shares: Counter[int], screen: Screen) -> DemoVerdict:
    options, transactions = run.options, shares.total()
    max_delay = MAX_POOL_DELAY_SECONDS if options.pool else MAX_DELAY_SECONDS
    plan = plan_kills(options.kills, transactions - len(shares), options.seed, max_delay=max_delay)
    jobs = [run.job(worker) for worker in range(options.number_of_workers)]
    supervisor = Supervisor(jobs, plan, run.folder, lambda tally: screen.show(tally, transactions))
    tally = supervisor.tally
    try:
        supervisor.run()
        # A process that was killed near the end may have left an id that no live pool has recovered yet.
        report = run.recover()
        tally.outcomes.update(found.outcome.value for found in report)
        tally.unacknowledged = max(tally.unacknowledged, len(report.unacknowledged))
        evidence = run.evidence()
        rows = [run.store.read(name) for name in run.store.list(id_prefix(run.name))]
    except KeyboardInterrupt:
        screen.say(f"Interrupted after {tally.transactions:,} of {transactions:,} flights and {tally.kills} kills.")
        raise
    except Exception:
        run.keep = True
        raise
    return DemoVerdict(
        options=options,
        rows=len(evidence.rows),
        messages=len(evidence.messages),
        tally=tally,
        findings=compare(evidence),
        unresolved=tuple(row.transactional_id for row in rows if row is not None and row.unresolved_generations),
        places=run.places(),
    )


@contextmanager
def prepared(options: Options, name: str, screen: Screen) -> Iterator[DemoRun]:
    """A run with its broker, database and topic. What was created for it is removed at the end, and after an error here.

    Raises:
        DualWriteError: Something can't be reached or created.
    """
    run = DemoRun(name, options)
    make_directory(run.folder)
    try:
        with run.store, _broker(run, screen), _database(run), _topic(run):
            yield run
    finally:
        if not run.keep:
            shutil.rmtree(run.folder, ignore_errors=True)
            with suppress(OSError):  # not empty: it has other runs
                run.folder.parent.rmdir()


@contextmanager
def _broker(run: DemoRun, screen: Screen) -> Iterator[None]:
    """The given broker, or the cluster `default` if it runs, or a new one for the run."""
    if not run.kafka and (running := _default_cluster()):
        run.kafka["bootstrap.servers"] = running
        screen.say(f"Using the running broker on {running}.")
    if run.kafka:
        yield
        return
    name = f"demo-{run.name}"
    progress = TerminalProgress()
    cluster = DevCluster(name, data_dir=run.folder / "kafka" if run.options.data_dir else None, progress=progress)
    is_up = False
    try:
        with progress:
            status = cluster.up()
        is_up = True
        run.kafka["bootstrap.servers"] = status.bootstrap_servers
        screen.say(f"Started Kafka {status.kafka_version} on {status.bootstrap_servers}.")
        yield
    finally:
        if run.keep and is_up:
            screen.remind(f"The broker keeps running. To remove it: dualwrite dev down --purge --name {name}")
        else:
            cluster.down(purge=True)


def _default_cluster() -> str | None:
    try:
        status = DevCluster().status()
    except DevClusterError:  # it does not exist
        return None
    return status.bootstrap_servers if status.ready else None


@contextmanager
def _database(run: DemoRun) -> Iterator[None]:
    """Create dualwrite's table and the run's tables. At the end, drop the latter and forget the ids in a user's database."""
    migration.upgrade(run.url)
    run.tables.create(run.store.engine, run.options.number_of_workers)
    try:
        yield
    finally:
        if run.options.url is not None and not run.keep:
            run.tables.drop(run.store.engine)
            prefix = id_prefix(run.name)
            for name in {TransactionalId.of_row(row).logical for row in run.store.list(prefix)}:
                with suppress(NotResolvedError):
                    forget(run.store, name)
            for lease in run.store.leases.entries(prefix):  # of killed workers: they may not have expired yet
                run.store.leases.release([lease.transactional_id], lease.owner)


@contextmanager
def _topic(run: DemoRun) -> Iterator[None]:
    """Create the topic. Before it is deleted, nothing is left in doubt, even if the run was interrupted just after a kill."""
    try:
        create_topic(run.kafka, run.topic, PARTITIONS, timeout=_ADMIN_TIMEOUT)
    except BrokerError as error:
        raise BrokerError(
            f"The topic {run.topic!r} can't be created on {KafkaConfig.of(run.kafka).servers}.",
            cause=str(error),
            next_step="check --kafka, or omit it to use a local broker",
        ) from error
    try:
        yield
    finally:
        if not run.keep:
            with suppress(DualWriteError):  # then the ids remain, and the error that ended the run is reported
                run.recover()
            with suppress(BrokerError):  # a leftover topic does no harm
                delete_topic(run.kafka, run.topic, timeout=_ADMIN_TIMEOUT)
