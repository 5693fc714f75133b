"""Compares the direct path (`with writer.transaction()`) of this checkout with another one's, as ratios. See README.md."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import sqlalchemy as sa

from committed import committed
from figures import Spread
from options import add_servers, count, counts, positive
from progress import show_progress
from records import VerificationError, check_records
from services import Services, services
from surroundings import ROOT, commit, line, surroundings, warnings
from tables import with_range

_PREPARE: Final = "import sys; from dualwrite import migration; migration.upgrade(sys.argv[1])"
_TABLE: Final = "CREATE TABLE direct_orders (id bigserial PRIMARY KEY, item text NOT NULL)"
_ITEMS: Final = "SELECT item FROM direct_orders"


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--other", type=Path, required=True, help="the checkout to compare with: a folder with src/dualwrite")
    parser.add_argument("--seconds", type=positive, default=3.0, help="duration of one measurement")
    parser.add_argument("--rounds", type=count, default=7, help="number of rounds; each measures both checkouts")
    parser.add_argument(
        "--decided", action="store_true", help='acknowledge="decided" in this checkout: the other may not know it'
    )
    parser.add_argument("--writers", type=counts, default=[1, 8], help="numbers of writers, comma-separated")
    add_servers(parser)
    chosen = parser.parse_args(given)
    if not (chosen.other / "src" / "dualwrite").is_dir():
        parser.error(f"{chosen.other} has no src/dualwrite")
    return chosen


@dataclass(frozen=True)
class Figures:
    """One measurement, of all writers together.

    Args:
        rate: Transactions per second.
        cpu: Seconds of the clients' CPU time for a transaction.
    """

    rate: float
    cpu: float


class Checkout:
    """The code of one folder, with a database of its own, and the processes that run it.

    Args:
        source: The folder that contains `dualwrite`.
        url: The database.
        servers: For Kafka's settings.
        topic: The topic; no other checkout writes to it.
        producer: The producer of `dualwrite.connect`.
        options: More arguments of `dualwrite.connect`.
    """

    def __init__(
        self, source: Path, url: str, servers: Services, topic: str, producer: str, options: Mapping[str, str]
    ) -> None:
        self._environment = {**os.environ, "PYTHONPATH": str(source), "DUALWRITE_PRODUCER": producer}
        self._url, self._kafka, self._topic = url, servers.kafka, topic
        self._options = json.dumps(dict(options))
        self._writers: list[subprocess.Popen[str]] = []
        subprocess.run([sys.executable, "-c", _PREPARE, url], env=self._environment, check=True)  # noqa: S603  (the statement above)
        engine = sa.create_engine(url)
        with engine.begin() as connection:
            connection.execute(sa.text(_TABLE))
        engine.dispose()

    def start(self, writers: int) -> None:
        """Start this many writers, and wait until they have warmed up."""
        script = str(Path(__file__).with_name("direct_writer.py"))
        for number in range(len(self._writers), writers):
            names = (str(number), f"direct-{uuid4().hex[:8]}-{number}", self._topic)
            command = [sys.executable, script, self._url, json.dumps(dict(self._kafka)), *names, self._options]
            process = subprocess.Popen(  # noqa: S603  (our own script)
                command, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self._writers.append(process)
            assert _line(process) == "ready"

    def measure(self, writers: int, seconds: float) -> Figures:
        """Let this many of the writers run for some seconds."""
        chosen = self._writers[:writers]
        for process in chosen:
            assert process.stdin is not None
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
        found = [json.loads(_line(process)) for process in chosen]
        done = sum(each["transactions"] for each in found)
        return Figures(sum(each["transactions"] / each["seconds"] for each in found), sum(each["cpu"] for each in found) / done)

    def verify(self) -> int:
        """Let the writers end, and check that every transaction's row and message are there, each once, and nothing else.

        Returns:
            How many there are.

        Raises:
            VerificationError: A row or a message is lost, doubled or altered.
            SystemExit: A writer has failed.
        """
        for process in self._writers:
            assert process.stdin is not None
            process.stdin.close()
        written = {number: int(_line(process)) for number, process in enumerate(self._writers)}
        failed = {number: code for number, process in enumerate(self._writers) if (code := process.wait())}
        if failed:
            raise SystemExit(f"writers have failed, with these exit codes: {failed}; their errors are above")
        engine = sa.create_engine(self._url)
        with engine.connect() as connection:
            rows = [str(item).encode() for item in connection.scalars(sa.text(_ITEMS))]
        engine.dispose()
        check_records(self._topic, "rows", written, rows)
        messages = (message.value() or b"" for message in committed(self._kafka, self._topic))
        return check_records(self._topic, "messages", written, messages)

    def close(self) -> None:
        """End what still runs."""
        for process in self._writers:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    found = process.stdout.readline().strip()
    if not found:
        raise SystemExit("a writer has ended; its error is above")
    return found


@contextmanager
def _databases(servers: Services, number: int) -> Iterator[list[str]]:
    """This many new databases on the server, because the checkouts' tables may differ."""
    engine = sa.create_engine(servers.url, isolation_level="AUTOCOMMIT")
    names = [f"direct_{uuid4().hex[:8]}" for _ in range(number)]
    with engine.connect() as connection:
        for name in names:
            connection.exec_driver_sql(f"CREATE DATABASE {name}")
        try:
            url = sa.engine.make_url(servers.url)
            yield [url.set(database=name).render_as_string(hide_password=False) for name in names]
        finally:
            for name in names:
                connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
    engine.dispose()


def compare(this: Checkout, other: Checkout, options: argparse.Namespace) -> dict[int, list[tuple[Figures, Figures]]]:
    """Both checkouts' figures, round by round, for each number of writers; the order alternates from round to round."""
    rounds: dict[int, list[tuple[Figures, Figures]]] = {}
    for writers in options.writers:
        for checkout in (this, other):
            checkout.start(writers)
        found = rounds[writers] = []
        for number in range(options.rounds):
            show_progress(f"{writers} writers, round {number + 1}")
            order = (this, other) if number % 2 else (other, this)
            figures = {checkout: checkout.measure(writers, options.seconds) for checkout in order}
            found.append((figures[this], figures[other]))
    return rounds


def report(rounds: Mapping[int, Sequence[tuple[Figures, Figures]]]) -> Iterator[str]:
    """A table: this checkout's figures, and their ratios to the other's, as the median of the rounds with the extremes."""
    yield "| writers | client CPU per transaction | of the other's | transactions/s | of the other's |"
    yield "| --- | --- | --- | --- | --- |"
    for writers, pairs in rounds.items():
        cpu = statistics.median(mine.cpu for mine, _ in pairs)
        rate = statistics.median(mine.rate for mine, _ in pairs)
        cpu_ratios = Spread.of(mine.cpu / theirs.cpu for mine, theirs in pairs)
        rates = Spread.of(mine.rate / theirs.rate for mine, theirs in pairs)
        yield f"| {writers} | {cpu * 1e6:.0f} µs | {with_range(cpu_ratios, 2)} | {rate:.0f} | {with_range(rates, 2)} |"


def main(given: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = arguments(given)
    with ExitStack() as stack:
        servers = stack.enter_context(
            services(options.url, options.kafka, dict(options.kafka_config), warm_up=options.broker_warm_up)
        )
        around: dict[str, Any] = surroundings(servers, options, {"other": f"commit {commit(options.other)}"})
        databases = stack.enter_context(_databases(servers, 2))
        checkouts = []
        chosen = ({"acknowledge": "decided"} if options.decided else {}, {})
        for root, url, more in zip((ROOT, options.other.resolve()), databases, chosen, strict=True):
            topic = f"direct-{uuid4().hex[:8]}"
            servers.make_topic(topic, options.partitions)
            stack.callback(servers.delete_topic, topic)
            checkout = Checkout(root / "src", url, servers, topic, options.producer, more)
            stack.callback(checkout.close)
            checkouts.append(checkout)
        rounds = compare(*checkouts, options)
        verified = sum(checkout.verify() for checkout in checkouts)
    print(line(around))
    for warning in warnings(around):
        print(warning)
    print("\n".join(report(rounds)))
    print(f"\nVerified: {verified:,} rows and as many messages, one by one.")


if __name__ == "__main__":
    try:
        main()
    except VerificationError as error:
        sys.exit(f"VerificationError: {error}")
