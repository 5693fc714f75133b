"""`dualwrite metrics`: what the database and Kafka know about transactions, for Prometheus. Read-only; needs no service.

Exit codes: 0 printed, or stopped; 1 a `DualWriteError`, or with `--once` a side did not answer; 2 usage error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Final, TypeVar

import typer
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import GaugeMetricFamily

from dualwrite.admin import TransactionAdmin
from dualwrite.admin.facts import RUNNING
from dualwrite.cli.exported import LATE, Cluster, Stored, Values, of_both, of_database, of_kafka, of_sides
from dualwrite.cli.offsets import with_kafka
from dualwrite.cli.options import Target, coordinator_for, grouped, refuse, say, store_for
from dualwrite.cli.status import StatusData, in_store
from dualwrite.deadline import Deadline
from dualwrite.errors import DualWriteError, StateTableMissingError
from dualwrite.observability.in_thread import InThread
from dualwrite.outbox.dead_letters import letters_by_relay
from dualwrite.outbox.journal_state import JournalState, read_journals
from dualwrite.settings import Settings
from dualwrite.stopping import StopFlag, stopped_by_sigterm
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.sql import SqlStateStore
from dualwrite.texts import error_text

_STEP: Final = 3600.0
_LARGEST_PORT: Final = 65535

T = TypeVar("T")

app = typer.Typer()


@app.callback(invoke_without_command=True)
@grouped
def metrics(
    *,
    target: Target,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where to serve /metrics; it has no login.")
    ] = "127.0.0.1:9464",
    once: Annotated[bool, typer.Option("--once", help="Print the metrics once, and end.")] = False,
    limit: Annotated[
        float, typer.Option("--limit", metavar="SECONDS", min=0.1, help="The time within which a scrape is answered.")
    ] = 8.0,
    late: Annotated[
        float, typer.Option("--late", metavar="SECONDS", min=0, help="After which an open transaction is late (KIP-664).")
    ] = LATE,
) -> None:
    """Serve metrics of the database and of Kafka for Prometheus, or print them once. Changes nothing, and needs no service.

    With only a database or only Kafka's address it shows what that side knows. If a side does not answer within the limit,
    `dualwrite_up` of it is 0, its other metrics are missing, and the scrape is answered all the same.
    """
    settings = target.settings()
    sides = ["database"] if settings.database_url is not None else []
    sides += ["kafka"] if "bootstrap.servers" in settings.kafka else []
    if not sides:
        refuse("Neither a database nor Kafka is given: use --url, --kafka, or their environment variables.")
    exporter = Exporter(settings, sides, limit=limit, late=late)
    registry = CollectorRegistry()
    registry.register(exporter)
    if once:
        typer.echo(generate_latest(registry).decode(), nl=False)
        raise typer.Exit(0 if exporter.is_complete else 1)
    host, port = _address(listen)
    stopped = StopFlag()
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        refuse(f"{listen} can't be used: {error.strerror or error}.")
    say(f"Serving http://{host}:{server.server_port}/metrics", err=True)
    try:
        with stopped_by_sigterm(stopped.set):
            while not stopped.is_set():
                stopped.wait(_STEP)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _address(text: str) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    if not (separator and host and port.isascii() and port.isdecimal() and int(port) <= _LARGEST_PORT):
        raise typer.BadParameter(f"{text!r} is not of the form HOST:PORT.", param_hint="--listen")
    return host.strip("[]"), int(port)


class Exporter:
    """A collector of prometheus_client that reads both sides, each within the limit.

    Args:
        settings: Database and Kafka.
        sides: Which of them are given: "database", "kafka".
        limit: Seconds within which a collection ends.
        late: Seconds after which an open transaction is late.
    """

    def __init__(self, settings: Settings, sides: list[str], *, limit: float, late: float) -> None:
        self._settings = settings
        self._sides = sides
        self._limit = limit
        self._late = late
        self._database: InThread[Stored] = InThread("dualwrite metrics")
        self._kafka: InThread[Cluster] = InThread("dualwrite metrics")
        self._both: InThread[StatusData] = InThread("dualwrite metrics")
        self._lock = threading.Lock()
        self._values: Values = {}
        self._read_at = 0.0
        self._problems: dict[str, str] = {}

    @property
    def is_complete(self) -> bool:
        """Whether both sides have answered the last time."""
        return not self._problems

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Nothing is read when it is registered."""
        return iter(())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The metrics now; of two collections at the same time, the second one gets the result of the first."""
        asked = time.monotonic()
        with self._lock:
            if self._read_at < asked:
                self._values = self._read()
                self._read_at = time.monotonic()
            values = self._values
        for metric, samples in values.items():
            family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
            for labels, value in samples.items():
                family.add_metric(labels, value)
            yield family

    def _read(self) -> Values:
        deadline, settings = Deadline.after(self._limit), self._settings
        durations: dict[str, float | None] = dict.fromkeys(self._sides)
        if "database" in durations:
            self._database.start(lambda: read_database(settings))
        if "kafka" in durations:
            self._kafka.start(lambda: read_cluster(settings, self._limit))
        stored, cluster = (self._result("database", self._database, deadline), self._result("kafka", self._kafka, deadline))
        both = None
        if stored is not None and cluster is not None:
            self._both.start(lambda: read_both(stored.status, settings))
            both = self._result("kafka", self._both, deadline)
        values: Values = {}
        if stored is not None:
            durations["database"] = self._database.seconds
            values |= of_database(stored, time.time())
        if cluster is not None:
            values |= of_kafka(cluster, time.time(), late=self._late)
            if stored is None or both is not None:
                durations["kafka"] = self._kafka.seconds + (0.0 if both is None else self._both.seconds)
        if both is not None:
            values |= of_both(both, time.time())
        return of_sides(durations) | values

    def _result(self, side: str, reading: InThread[T], deadline: Deadline) -> T | None:
        """What was read; None if there is nothing, and the reason on stderr if it is a new one."""
        if side not in self._sides:
            return None
        try:
            found = reading.result(deadline)
        except DualWriteError as error:
            self._note(side, error_text(error))
            return None
        except TimeoutError:
            self._note(side, f"The {side} did not answer within {self._limit:g} s.")
            return None
        if self._problems.pop(side, None) is not None:
            say(f"The {side} answers again.", err=True)
        return found

    def _note(self, side: str, text: str) -> None:
        if self._problems.get(side) != text:
            self._problems[side] = text
            typer.echo(text, err=True)


# --- reading --------------------------------------------------------------------------------------------------------------


def read_database(settings: Settings) -> Stored:
    """What the database knows.

    Raises:
        DualWriteError: As for the store's methods.
    """
    with store_for(settings) as store:
        return Stored(in_store(store), _journals(store), _dead_letters(store))


def _journals(store: TxnStateStore) -> tuple[JournalState, ...]:
    try:
        return tuple(read_journals(store))
    except StateTableMissingError:  # the user's own migrations, for writers without a journal
        return ()


def _dead_letters(store: TxnStateStore) -> dict[str, int]:
    if not isinstance(store, SqlStateStore):
        return {}
    try:
        return letters_by_relay(store)
    except StateTableMissingError:  # the user's own migrations, without a relay
        return {}


def read_cluster(settings: Settings, timeout: float) -> Cluster:
    """What Kafka knows about the transactions of all clients, as far as the principal may see them.

    Raises:
        DualWriteError: As for TransactionAdmin's methods.
    """
    with TransactionAdmin(settings=settings, timeout=timeout) as admin:
        stuck = admin.stuck().partitions
        running = [one.transactional_id for one in admin.list(states=RUNNING)]
        described = [one.description for one in admin.describe(running)]
    return Cluster(stuck, tuple(one for one in described if one is not None and one.status in RUNNING))


def read_both(found: StatusData, settings: Settings) -> StatusData:
    """What Kafka knows about the ids and positions in the database.

    Raises:
        DualWriteError: Kafka does not respond.
    """
    known = replace(found, seen={}, gone=[])  # the caller may go on without it
    with coordinator_for(settings) as coordinator:
        known.ask(coordinator)
    known.positions = with_kafka(found.positions, settings) if found.positions else []
    return known
