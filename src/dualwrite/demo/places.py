"""Where the demo runs: broker, topic, database, directory. Given by the user, or created for the run and removed after it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy import make_url

import dualwrite
from dualwrite import migration
from dualwrite.demo.flights import Tables
from dualwrite.demo.job import id_prefix
from dualwrite.devcluster import DevCluster, DevClusterError, TerminalProgress
from dualwrite.devcluster.locations import make_directory, state_dir
from dualwrite.errors import BrokerError, DualWriteError, NotResolvedError
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.librdkafka.topic_admin import create_topic, delete_topic
from dualwrite.recovery.recoverer import forget
from dualwrite.stores.sql import SqlStateStore
from dualwrite.transactional_id import TransactionalId

PARTITIONS: Final = 3
_ADMIN_TIMEOUT: Final = 30.0


@dataclass
class Places:
    """The resources of a run.

    Attributes:
        run: The run's name.
        folder: The directory of the logs, and of the SQLite file if there is one.
        url: The database.
        kafka: The Kafka settings.
        topic: The topic.
        store: The store of the database, opened.
        tables: The demo's tables in it.
        keep: Whether to keep everything at the end. Set if the result should be inspected.
    """

    run: str
    folder: Path
    url: str
    kafka: Mapping[str, Any]
    topic: str
    store: SqlStateStore
    tables: Tables
    keep: bool = False

    def recover(self) -> dualwrite.RecoveryReport:
        """Recover all ids of the run, which no process uses any more.

        Raises:
            StoreError: As for `dualwrite.recover`.
        """
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


@contextmanager
def prepared(
    run: str,
    *,
    workers: int,
    url: str | None,
    kafka: Mapping[str, Any] | None,
    data_dir: Path | None,
    keep: bool,
    say: Callable[[str], None],
    remind: Callable[[str], None],
) -> Iterator[Places]:
    """Prepare the resources of a run; afterwards those created for it are removed, unless `keep` is set.

    Args:
        run: The run's name.
        workers: How many workers there will be.
        url: The database; None for a SQLite file of the run.
        kafka: The Kafka settings; None for a local broker.
        data_dir: Parent of the run's directory; None for the user's state directory.
        keep: Initial value of `Places.keep`.
        say: Called with lines about what is used and started.
        remind: Called with a line about what keeps running.

    Raises:
        DualWriteError: Something can't be reached or created; what was already created is removed.
    """
    folder = (data_dir.expanduser().absolute() if data_dir else state_dir() / "demo") / run
    address = url or f"sqlite:///{folder / 'demo.db'}"
    with SqlStateStore.from_url(address) as store:
        tables = Tables(run, store.engine.dialect.name)
        places = Places(run, folder, address, kafka or {}, f"departures-{run}", store, tables, keep)
        make_directory(folder)
        try:
            with (
                _broker(places, data_dir, say, remind),
                _database(places, workers, own=url is None),
                _topic(places),
                _recovered(places),
            ):
                yield places
        finally:
            store.close()
            if not places.keep:
                shutil.rmtree(folder, ignore_errors=True)
                with suppress(OSError):  # not empty: it has other runs
                    folder.parent.rmdir()


@contextmanager
def _broker(places: Places, data_dir: Path | None, say: Callable[[str], None], remind: Callable[[str], None]) -> Iterator[None]:
    """The given broker, or the cluster `default` if it runs, or a new one for the run."""
    if places.kafka:
        yield
        return
    running = _running("default")
    if running is not None:
        places.kafka = {"bootstrap.servers": running}
        say(f"Using the running broker on {running}.")
        yield
        return
    name = f"demo-{places.run}"
    progress = TerminalProgress()
    cluster = DevCluster(name, data_dir=places.folder / "kafka" if data_dir else None, progress=progress)
    is_up = False
    try:
        with progress:
            status = cluster.up()
        is_up = True
        places.kafka = {"bootstrap.servers": status.bootstrap_servers}
        say(f"Started Kafka {status.kafka_version} on {status.bootstrap_servers}.")
        yield
    finally:
        if places.keep and is_up:
            remind(f"The broker keeps running. To remove it: dualwrite dev down --purge --name {name}")
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
def _database(places: Places, workers: int, *, own: bool) -> Iterator[None]:
    """Create dualwrite's table and the run's tables. At the end, drop the latter and forget the ids in a user's database."""
    migration.upgrade(places.url)
    places.tables.create(places.store.engine, workers)
    try:
        yield
    finally:
        if not own and not places.keep:
            places.tables.drop(places.store.engine)
            _forget_ids(places)


def _forget_ids(places: Places) -> None:
    """Forget the run's ids, and release leases of killed workers, which may not have expired yet."""
    prefix = id_prefix(places.run)
    for name in {TransactionalId.of_row(row).logical for row in places.store.list(prefix)}:
        with suppress(NotResolvedError):
            forget(places.store, name)
    for lease in places.store.leases.entries(prefix):
        places.store.leases.release([lease.transactional_id], lease.owner)


@contextmanager
def _topic(places: Places) -> Iterator[None]:
    try:
        create_topic(places.kafka, places.topic, PARTITIONS, timeout=_ADMIN_TIMEOUT)
    except BrokerError as error:
        raise BrokerError(
            f"The topic {places.topic!r} can't be created on {KafkaConfig.of(places.kafka).servers}.",
            cause=str(error),
            next_step="check --kafka, or omit it to use a local broker",
        ) from error
    try:
        yield
    finally:
        if not places.keep:
            with suppress(BrokerError):  # a leftover topic does no harm
                delete_topic(places.kafka, places.topic, timeout=_ADMIN_TIMEOUT)


@contextmanager
def _recovered(places: Places) -> Iterator[None]:
    """Leave nothing in doubt, even if the run was interrupted just after a kill, before the topic is deleted."""
    try:
        yield
    finally:
        if not places.keep:
            with suppress(DualWriteError):  # then the ids remain, and the error that ended the run is reported
                places.recover()
