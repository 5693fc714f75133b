"""The whole demo: prepares, runs and compares, and returns the verdict."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from dualwrite.demo.flights import read_flights, share_of
from dualwrite.demo.job import Job, id_prefix
from dualwrite.demo.places import Places, prepared
from dualwrite.demo.supervisor import MAX_DELAY, MAX_POOL_DELAY, Supervisor, Tally, plan_kills
from dualwrite.demo.verdict import EXAMPLES, Verdict, compare, read_evidence
from dualwrite.errors import ConfigurationError
from dualwrite.settings import ProducerName, Settings

_LINE_INTERVAL: Final = 5.0


class Screen(Protocol):
    """Shows a run."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def say(self, line: str) -> None:
        """Print a line."""

    def remind(self, line: str) -> None:
        """Print a line about something that stays behind, and that the user must remove."""

    def show(self, tally: Tally, transactions: int) -> None:
        """Show the progress; called often."""


class Silent:
    """Shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def say(self, line: str) -> None:
        """Print nothing."""

    def remind(self, line: str) -> None:
        """Print nothing."""

    def show(self, tally: Tally, transactions: int) -> None:
        """Show nothing."""


class Quiet(Silent):
    """Shows only what stays behind, as for a script that reads the verdict."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def remind(self, line: str) -> None:
        """Print it."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class Lines:
    """A line every few seconds, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next = time.monotonic() + _LINE_INTERVAL

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def say(self, line: str) -> None:
        """Print it."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def remind(self, line: str) -> None:
        """Print it."""
        self.say(line)

    def show(self, tally: Tally, transactions: int) -> None:
        """Print a line, if it is time for the next one."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _LINE_INTERVAL
        self.say(f"{tally.transactions:,} of {transactions:,} flights, {_summary(tally)}")


class Bar:
    """A live bar."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("Flights"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None, visible=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, line: str) -> None:
        """Print it above the bar."""
        self._console.print(line, markup=False, highlight=False)

    def remind(self, line: str) -> None:
        """Print it above the bar."""
        self.say(line)

    def show(self, tally: Tally, transactions: int) -> None:
        """Move the bar; it redraws itself a few times a second."""
        self._bar.update(
            self._task, total=transactions, completed=tally.transactions, description=_summary(tally), visible=True
        )


def screen_for(console: Console, *, quiet: bool) -> Screen:
    """The screen for this console."""
    if quiet:
        return Quiet(console)
    return Bar(console) if console.is_terminal else Lines(console)


def _summary(tally: Tally) -> str:
    text = f"{tally.kills} killed"
    if tally.outcomes:  # a pool recovers in the background and does not report it
        text += f", {sum(number for name, number in tally.outcomes.items() if name != 'NOTHING')} recovered"
    return text + (f", {len(tally.errors)} ERRORS" if tally.errors else "")


def show_verdict(console: Console, verdict: Verdict) -> None:
    """Print the table and the verdict."""
    tally, findings = verdict.tally, verdict.findings.counts()
    p50, p99 = verdict.milliseconds
    table = Table("", "", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.columns[1].justify = "right"

    def row(name: str, value: object, *, bad: bool = False) -> None:
        table.add_row(name, f"[bold red]{value}[/]" if bad else str(value))

    what = "flight" if verdict.pool else "transaction"
    row(f"{what}s", f"{tally.transactions:,}")
    row("departures in the database", f"{verdict.rows:,}")
    row("messages visible to consumers", f"{verdict.messages:,}")
    row("cancelled flights (no message)", f"{tally.transactions - verdict.rows:,}")
    row("kills (SIGKILL)", f"{tally.kills:,}", bad=tally.kills != verdict.kills_wanted)
    recovers_at_start = not (verdict.naive or verdict.pool)
    row("  during recovery" if recovers_at_start else "  during startup", f"{tally.kills_while_opening:,}")
    for name, number in sorted(tally.outcomes.items()):
        when = "recoveries" if recovers_at_start else "recovered at the end"
        row(f"{when}: {name}", f"{number:,}", bad=name in {"LOST", "UNVERIFIED"})
    for name, number in findings.items():
        row(name.replace("_", " "), f"{number:,}", bad=number > 0)
    if verdict.unresolved:
        row("ids left to recover", ", ".join(verdict.unresolved), bad=True)
    row(f"{what}s per second", f"{verdict.per_second:,.0f}")
    if verdict.pool:
        row("flights per commit", f"{verdict.flights_per_commit:.1f}")
    row(f"p50, p99 of a {what}", f"{p50:.1f} ms, {p99:.1f} ms")
    row("slowest start with recovery" if recovers_at_start else "slowest start", f"{max(tally.openings, default=0):.2f} s")
    console.print(table)
    for name, number in findings.items():
        if number:
            some = ", ".join(str(each) for each in getattr(verdict.findings, name)[:EXAMPLES])
            console.print(f"{name.replace('_', ' ')}: {some}{' …' if number > EXAMPLES else ''}", highlight=False)
    for error in tally.errors[:EXAMPLES]:
        console.print(f"a worker failed: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    style = "green" if verdict.all_agree else "yellow" if verdict.naive else "bold red"
    console.print(verdict.summary(), style=style, highlight=False, soft_wrap=True)


REPORTS: Final = 10
"""Maximum number of transactions in one report of a worker."""

REPORTS_PER_RUN: Final = 200
MAX_WORKERS: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to run the demo.

    Args:
        departures: Number of departures, from the start of the year.
        kills: Number of times that a worker is killed.
        seed: Seed for the random times of the kills.
        workers: Number of processes that share the flights; None for 2, or 1 on SQLite, where a second process would spend
            most of its time waiting for the file's only write lock, and would be killed there.
        producer: `producer` of `dualwrite.connect`.
        naive: Write without dualwrite, alternating commit before produce and produce before commit.
        pool: Write through a pool, many flights at once.
        url: The database; None for a SQLite file of the run.
        kafka: The Kafka settings, named as in librdkafka; None for a local broker.
        data_dir: Directory for files; None for the user's state directory.
        keep: Keep broker, topic, database and logs at the end.

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

    Args:
        options: How to run it.
        screen: Shows the progress.

    Raises:
        DualWriteError: Something is missing or can't be reached, or the demo can't continue.
        KeyboardInterrupt: Ctrl-C; the workers are stopped, and the resources removed.
    """
    screen = screen or Silent()
    shares = Counter(share_of(flight.aircraft, options.number_of_workers) for flight in read_flights(options.departures))
    run = secrets.token_hex(3)
    with prepared(
        run,
        workers=options.number_of_workers,
        url=options.url,
        kafka=options.kafka,
        data_dir=options.data_dir,
        keep=options.keep,
        say=screen.say,
        remind=screen.remind,
    ) as places:
        with screen:
            verdict = _run(options, places, shares, screen)
        places.keep = places.keep or not (options.naive or verdict.all_agree)
    return verdict


def _run(options: Options, places: Places, shares: Counter[int], screen: Screen) -> Verdict:
    transactions = shares.total()
    jobs = [_job(options, places, worker) for worker in range(options.number_of_workers)]
    max_delay = MAX_POOL_DELAY if options.pool else MAX_DELAY
    plan = plan_kills(options.kills, transactions - len(shares), options.seed, max_delay=max_delay)
    supervisor = Supervisor(jobs, plan, places.folder, lambda tally: screen.show(tally, transactions))
    try:
        tally = supervisor.run()
    except KeyboardInterrupt:
        done = supervisor.tally
        screen.say(f"Interrupted after {done.transactions:,} of {transactions:,} flights and {done.kills} kills.")
        raise
    except Exception:
        places.keep = True
        raise
    try:
        _recover(places, tally)
        evidence = read_evidence(places.store.engine, places.tables, places.kafka, places.topic, options.departures)
        unresolved = _unresolved(places)
    except Exception:
        places.keep = True
        raise
    return Verdict(
        naive=options.naive,
        departures=options.departures,
        kills_wanted=options.kills,
        rows=len(evidence.rows),
        messages=len(evidence.messages),
        tally=tally,
        findings=compare(evidence),
        unresolved=unresolved,
        places=places.names(),
        pool=options.pool,
    )


def _job(options: Options, places: Places, worker: int) -> Job:
    return Job(
        run=places.run,
        worker=worker,
        workers=options.number_of_workers,
        departures=options.departures,
        url=places.url,
        kafka=dict(places.kafka),
        topic=places.topic,
        producer=options.producer,
        naive=options.naive,
        pool=options.pool,
        report_every=max(1, min(REPORTS, options.departures // REPORTS_PER_RUN)),
    )


def _recover(places: Places, tally: Tally) -> None:
    """Recover what is left: a process that was killed near the end may have left an id that no live pool has recovered yet."""
    report = places.recover()
    tally.outcomes.update(found.outcome.value for found in report)
    tally.unacknowledged = max(tally.unacknowledged, len(report.unacknowledged))


def _unresolved(places: Places) -> tuple[str, ...]:
    """The run's ids on which something is left to recover."""
    rows = (places.store.read(name) for name in places.store.list(id_prefix(places.run)))
    return tuple(row.transactional_id for row in rows if row is not None and row.unresolved_generations)
