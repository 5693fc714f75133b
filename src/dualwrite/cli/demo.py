"""`dualwrite demo`: real flights, written atomically to a database and to Kafka by workers that are killed.

Exit codes: 0 database and topic agree (with `--naive`: the demo ran; a disagreement is expected there), 1 they disagree or
the demo could not continue, 2 usage error, 130 interrupted.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from dualwrite.cli.options import AsJson, JsonGroup, grouped
from dualwrite.cli.output import print_json
from dualwrite.demo.run import run_demo
from dualwrite.demo.screen import Screen, show_verdict
from dualwrite.demo.worker import Options

DISAGREES: Final = 1
_DEFAULTS: Final = Options()
_HANGUP: Final = getattr(signal, "SIGHUP", None)  # not on Windows

app = typer.Typer(cls=JsonGroup)


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The options of `dualwrite.demo.worker.Options`."""

    departures: Annotated[int, typer.Option(help="Number of departures, at most 328521.")] = _DEFAULTS.departures
    kills: Annotated[int, typer.Option(help="Number of times that a worker is killed.")] = _DEFAULTS.kills
    seed: Annotated[int, typer.Option(help="Seed for the random times of the kills.")] = _DEFAULTS.seed
    workers: Annotated[
        int | None, typer.Option(help="Number of processes that share the flights.", show_default="1 on SQLite, else 2")
    ] = None
    producer: Annotated[str, typer.Option(help="auto, native or librdkafka.")] = _DEFAULTS.producer
    naive: Annotated[bool, typer.Option("--naive", help="Write without dualwrite, to see what goes wrong.")] = False
    pool: Annotated[bool, typer.Option("--pool", help="Write through a pool, in which flights share commits.")] = False
    url: Annotated[str | None, typer.Option(help="The database, as a SQLAlchemy URL.", show_default="a SQLite file")] = None
    kafka: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Kafka's bootstrap servers.", show_default="a local broker")
    ] = None
    data_dir: Annotated[Path | None, typer.Option(help="Directory for files.", show_default="the state directory")] = None
    keep: Annotated[bool, typer.Option("--keep", help="Keep broker, topic and database at the end.")] = False

    def options(self) -> Options:
        """How to run the demo; `kafka` as a setting."""
        kafka = None if self.kafka is None else {"bootstrap.servers": self.kafka}
        return Options(**(vars(self) | {"kafka": kafka}))


@app.callback(invoke_without_command=True)
@grouped
def demo(*, given: DemoOptions, as_json: AsJson = False) -> None:
    """Write real flights atomically to a database and to Kafka, kill the workers while they write, and compare both sides.

    Each flight from New York in 2013 updates the row and the counts of its aircraft and publishes its departure in one dual
    write; with --pool, many flights share one. Workers are killed by SIGKILL at random times and restarted. At the end, the
    database is compared record by record with the topic, as a read_committed consumer sees it.
    """
    options = given.options()
    with _signals_interrupt():
        verdict = run_demo(options, Screen(Console(stderr=True), quiet=as_json))
    if as_json:
        print_json("demo", verdict.to_json())
    else:
        show_verdict(Console(), verdict)
        if options.keep or not (verdict.all_agree or options.naive):
            for name, place in verdict.places.items():
                typer.echo(f"{name}: {place}")
    if not (options.naive or verdict.all_agree):
        raise typer.Exit(DISAGREES)


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Treat SIGTERM (`timeout`, a cancelled CI job) and SIGHUP (a closed terminal, a lost SSH connection) like Ctrl-C.

    Otherwise the broker would keep running. A SIGHUP that is ignored (`nohup`) stays ignored.
    """
    numbers = [signal.SIGTERM]
    if _HANGUP is not None and signal.getsignal(_HANGUP) is not signal.SIG_IGN:
        numbers.append(_HANGUP)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
