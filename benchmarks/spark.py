"""Spark: this sink beside Spark's own two, JDBC and Kafka, one after the other: wall times, and where ours goes. See README."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import text

import dualwrite
import tables
import workload
from dualwrite import DualWriteError
from services import Services, services
from spark_session import PackagesError, SparkError, packages, session
from spark_sinks import JDBC_SETTINGS, NAMES, TITLES, Name
from verification import VerificationError

if TYPE_CHECKING:
    from spark_bench import Bench, Measured
    from spark_parts import Part

_FAILED: Final = 1
_NO_PACKAGES: Final = 3
_INTERRUPTED: Final = 130


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--times", type=_positive, default=10, help="how often each of the 336,776 flights is written")
    parser.add_argument("--flights", type=_positive, help="take only so many of them")
    parser.add_argument("--rounds", type=_positive, default=3, help="each measures every sink, in an order that changes")
    parser.add_argument("--partitions", type=_whole_numbers, default=[4, 2], help="of the frame, by commas")
    parser.add_argument("--topic-partitions", type=_positive, default=4, help="of each topic")
    parser.add_argument("--cores", type=_positive, default=2, help="how many tasks Spark runs at once")
    parser.add_argument("--memory", default="4g", help="of Spark's JVM")
    parser.add_argument("--sinks", type=_names, default=list(NAMES), help="which of them, by commas")
    parser.add_argument("--producer", default="auto", help="of this sink")
    parser.add_argument("--packages", help="of Spark's own sinks, for spark.jars.packages; those of this PySpark if not given")
    parser.add_argument("--jars", help="files to take instead of packages, by commas")
    parser.add_argument("--url", help="a PostgreSQL to use; one is started if not given")
    parser.add_argument("--kafka", metavar="HOST:PORT", help="a cluster to use; one broker is started if not given")
    parser.add_argument("--no-parts", dest="parts", action="store_false", help="leave out where this sink's time goes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    return parser.parse_args(given)


def _positive(given: str) -> int:
    number = int(given)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{given} is not above 0")
    return number


def _whole_numbers(given: str) -> list[int]:
    return [_positive(part) for part in given.split(",")]


def _names(given: str) -> list[Name]:
    unknown = set(given.split(",")) - set(NAMES)
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: choose from {', '.join(NAMES)}")
    return [name for name in NAMES if name in given.split(",")]


def measure_all(bench: Bench, options: argparse.Namespace) -> tuple[list[Measured], dict[int, list[Part]]]:
    """The warm-up round with few rows, then all rounds: what comes first in one comes last in the next. Then our parts."""
    from spark_bench import WARM_UP_ROWS  # noqa: PLC0415  (needs Spark; --help doesn't)

    small = bench.frame(options.partitions[0], times=1, limit=WARM_UP_ROWS)
    for name in options.sinks:
        _tell(f"warm-up: {TITLES[name]}")
        bench.measure(0, name, small, options.partitions[0])
    frames = {count: bench.frame(count, times=options.times, limit=options.flights) for count in options.partitions}
    found = []
    for number in range(1, options.rounds + 1):
        for partitions, frame in frames.items():
            for name in options.sinks if number % 2 else reversed(options.sinks):
                measured = bench.measure(number, name, frame, partitions)
                found.append(measured)
                seconds = measured.seconds[name]
                rate = f"{seconds:.1f} s, {measured.rows / seconds:,.0f} rows/s"
                _tell(f"round {number}/{options.rounds}, {partitions} partitions, {TITLES[name]}: {rate}")
    parts: dict[int, list[Part]] = {}
    if options.parts and "dualwrite" in options.sinks:
        for partitions, frame in frames.items():
            _tell(f"this sink's parts, {partitions} partitions")
            parts[partitions] = bench.take_apart(frame, partitions)
    return found, parts


def surroundings(servers: Services, options: argparse.Namespace, versions: Mapping[str, str]) -> dict[str, Any]:
    """What the figures depend on."""
    database = workload.engine(servers.url)
    with database.connect() as connection:
        names = ("server_version", "fsync", "synchronous_commit", "full_page_writes")
        postgres = {name: str(connection.scalar(text(f"SHOW {name}"))) for name in names}
    database.dispose()
    return {
        "dualwrite": dualwrite.__version__,
        **versions,
        "machine": f"{os.cpu_count()} processors",
        "load average before": os.getloadavg()[0],
        "producer": options.producer,
        "postgresql": postgres,
        "kafka": "a development cluster of our own, one node" if servers.brokers else servers.kafka["bootstrap.servers"],
        "Spark's sinks": f"{options.jars or options.packages or packages()}; JDBC with {dict(JDBC_SETTINGS)} and "
        "reWriteBatchedInserts=true, Kafka as it is set by itself",
        "options": {name: str(value) for name, value in vars(options).items()},
    }


# --- telling ------------------------------------------------------------------------------------------------------------------


def report(found: Sequence[Measured], parts: Mapping[int, Sequence[Part]], around: Mapping[str, Any]) -> str:
    """Everything as text."""
    told = "; ".join(f"{name}: {value}" for name, value in around.items() if name != "options")
    rounds = len({measured.number for measured in found})
    sections = [told, f"{found[0].rows:,} rows; medians of {rounds} rounds:\n\n" + _times(found)]
    for partitions, listed in parts.items():
        lines = [[part.phase, part.name, f"{part.seconds:.2f}", f"{part.share:.0%}"] for part in listed]
        table = tables.table(["phase", "part", "seconds", "of the whole"], lines)
        sections.append(
            f"Where this sink's time goes ({partitions} partitions; a task's parts: seconds of the phase, as tasks spent them "
            f"on average; they overlap):\n\n{table}"
        )
    verified = sum(measured.rows for measured in found if measured.name != "read")
    sections.append(f"Verified: {verified:,} rows against the frame, and their messages against them.")
    if "off" in (around["postgresql"]["fsync"], around["postgresql"]["synchronous_commit"]):
        sections.append("WARNING: this PostgreSQL does not wait for its disk; a commit here is no durable commit.")
    return "\n\n".join(sections)


def _times(found: Sequence[Measured]) -> str:
    lines = []
    for partitions in dict.fromkeys(measured.partitions for measured in found):
        here = [measured for measured in found if measured.partitions == partitions]
        for title, name in ((title, name) for title in TITLES for name in NAMES):
            shown = [measured for measured in here if measured.name == name and title in measured.seconds]
            if not shown:
                continue
            seconds = [measured.seconds[title] for measured in shown]
            is_whole = title == name
            lines.append(
                [
                    str(partitions),
                    TITLES[title],
                    f"{statistics.median(seconds):.1f}",
                    f"{min(seconds):.1f} … {max(seconds):.1f}",
                    f"{here[0].rows / statistics.median(seconds):,.0f}",
                    _ratio(here, lambda measured: measured.seconds[measured.name]) if title == "dualwrite" else "",
                    f"{statistics.median(measured.processor for measured in shown):.1f}" if is_whole else "",
                    _ratio(here, lambda measured: measured.processor) if title == "dualwrite" else "",
                ]
            )
    head = ["partitions", "what", "seconds", "min … max", "rows/s", "÷ Spark's two", "CPU s", "÷ Spark's two"]
    return tables.table(head, lines)


def _ratio(here: Sequence[Measured], what: Callable[[Measured], float]) -> str:
    """Ours by theirs, round by round: each round's pair was measured side by side."""
    ours, theirs = (
        {measured.number: what(measured) for measured in here if measured.name == name} for name in ("dualwrite", "spark")
    )
    ratios = [value / theirs[number] for number, value in ours.items() if number in theirs]
    if not ratios:
        return ""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})"


def main() -> int:
    """Measure, verify, print."""
    options = arguments()
    try:
        with tempfile.TemporaryDirectory(prefix="dualwrite-spark-") as folder:
            place = Path(folder)
            from dualwrite.spark import register  # noqa: PLC0415
            from spark_bench import Bench, environment  # noqa: PLC0415  (needs Spark; --help doesn't)

            os.environ |= environment(place)
            needs_packages = "spark" in options.sinks and options.jars is None
            chosen = (options.packages or packages()) if needs_packages else None
            _tell("starting Spark")
            with session(place, cores=options.cores, memory=options.memory, packages=chosen, jars=options.jars) as spark:
                register(spark)
                _tell("starting the servers")
                with services(options.url, options.kafka, {}) as servers:
                    around = surroundings(servers, options, {"pyspark": spark.version})
                    settings = {"topic_partitions": options.topic_partitions, "producer": options.producer}
                    with Bench(servers, spark, place, **settings) as bench:
                        found, parts = measure_all(bench, options)
    except (VerificationError, SparkError, DualWriteError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return _NO_PACKAGES if isinstance(error, PackagesError) else _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED
    print(report(found, parts, around))
    if options.json is not None:
        content = {
            "surroundings": around,
            "rounds": [asdict(measured) for measured in found],
            "parts": {str(partitions): [asdict(part) for part in listed] for partitions, listed in parts.items()},
        }
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    return 0


def _tell(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
