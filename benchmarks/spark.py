"""Compares this Spark sink with Spark's own JDBC and Kafka sinks: times, and a breakdown of this sink's time. See README.md."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import tables
from brokers import WARM_UP_SECONDS
from dualwrite import DualWriteError
from figures import Spread
from options import count, counts, seconds, some_of
from progress import show_progress
from records import VerificationError
from services import services
from spark_session import PackagesError, SparkError, packages, session
from spark_sinks import JDBC_SETTINGS, KAFKA_SETTINGS, NAMES, TITLES
from surroundings import line, surroundings, warnings

if TYPE_CHECKING:
    from spark_bench import Bench, Measured
    from spark_parts import Part

_FAILED: Final = 1
_NO_PACKAGES: Final = 3
_INTERRUPTED: Final = 130


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--times", type=count, default=10, help="how often each of the 336,776 flights is written")
    parser.add_argument("--flights", type=count, help="use only this many flights, the first ones")
    parser.add_argument("--rounds", type=count, default=3, help="number of rounds; each measures every sink")
    parser.add_argument("--partitions", type=counts, default=[4, 2], help="partitions of the frame, comma-separated")
    parser.add_argument("--topic-partitions", type=count, default=4, help="partitions of each topic")
    parser.add_argument("--cores", type=count, default=2, help="how many tasks Spark runs at once")
    parser.add_argument("--memory", default="4g", help="memory of Spark's JVM")
    parser.add_argument("--sinks", type=some_of(NAMES), default=list(NAMES), help="what to measure, comma-separated")
    parser.add_argument("--producer", default="auto", help="this sink's option producer")
    parser.add_argument("--packages", help="spark.jars.packages for Spark's own sinks; default: those of this PySpark version")
    parser.add_argument("--jars", help="files to use instead of packages, comma-separated")
    parser.add_argument("--url", help="an existing PostgreSQL database; by default a server is started")
    parser.add_argument("--kafka", metavar="HOST:PORT", help="an existing cluster; by default one broker is started")
    parser.add_argument("--broker-warm-up", type=seconds, default=WARM_UP_SECONDS, help="see recipe.py")
    parser.add_argument("--no-parts", dest="parts", action="store_false", help="skip the breakdown of this sink's time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to this file")
    return parser.parse_args(given)


def measure_all(bench: Bench, options: argparse.Namespace) -> tuple[list[Measured], dict[int, list[Part]]]:
    """Run a warm-up round with few rows, then all rounds in alternating order, then measure this sink's parts."""
    from spark_bench import WARM_UP_ROWS  # noqa: PLC0415  (needs Spark; --help doesn't)

    small = bench.frame(options.partitions[0], times=1, limit=WARM_UP_ROWS)
    for name in options.sinks:
        show_progress(f"warm-up: {TITLES[name]}")
        bench.measure(0, name, small, options.partitions[0])
    frames = {number: bench.frame(number, times=options.times, limit=options.flights) for number in options.partitions}
    found = []
    for number in range(1, options.rounds + 1):
        for partitions, frame in frames.items():
            for name in options.sinks if number % 2 else reversed(options.sinks):
                measured = bench.measure(number, name, frame, partitions)
                found.append(measured)
                seconds = measured.seconds[name]
                rate = f"{seconds:.1f} s, {measured.rows / seconds:,.0f} rows/s"
                show_progress(f"round {number}/{options.rounds}, {partitions} partitions, {TITLES[name]}: {rate}")
    parts: dict[int, list[Part]] = {}
    if options.parts and "dualwrite" in options.sinks:
        for partitions, frame in frames.items():
            show_progress(f"this sink's parts, {partitions} partitions")
            parts[partitions] = bench.take_apart(frame, partitions)
    return found, parts


# --- the report ---------------------------------------------------------------------------------------------------------------


def report(found: Sequence[Measured], parts: Mapping[int, Sequence[Part]], around: Mapping[str, Any]) -> str:
    """The complete report as text."""
    rounds = len({measured.number for measured in found})
    sections = [line(around), f"{found[0].rows:,} rows; medians of {rounds} rounds:\n\n" + _times(found)]
    for partitions, listed in parts.items():
        lines = [[part.phase, part.name, f"{part.seconds:.2f}", f"{part.share:.0%}"] for part in listed]
        table = tables.table(["phase", "part", "seconds", "of the whole"], lines)
        sections.append(
            f"Time spent in each part of this sink ({partitions} partitions; for the parts of tasks: seconds of the phase, "
            f"averaged over the tasks; parts overlap):\n\n{table}"
        )
    verified = sum(measured.rows for measured in found if measured.name != "read")
    sections.append(f"Verified: {verified:,} rows and as many messages, each with the frame.")
    return "\n\n".join([*sections, *warnings(around)])


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
    """The ratio of ours to theirs, round by round; both figures of a round were measured right after one another."""
    ours, theirs = (
        {measured.number: what(measured) for measured in here if measured.name == name} for name in ("dualwrite", "spark")
    )
    ratio = Spread.of(value / theirs[number] for number, value in ours.items() if number in theirs)
    return "" if ratio is None else tables.with_range(ratio, 2)


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
            show_progress("starting Spark")
            with session(place, cores=options.cores, memory=options.memory, packages=chosen, jars=options.jars) as spark:
                register(spark)
                show_progress("starting the servers")
                with services(options.url, options.kafka, {}, warm_up=options.broker_warm_up) as servers:
                    sinks = (
                        f"{options.jars or options.packages or packages()}; JDBC with {JDBC_SETTINGS} and "
                        f"reWriteBatchedInserts=true, Kafka with {KAFKA_SETTINGS}"
                    )
                    around = surroundings(servers, options, {"pyspark": spark.version, "Spark's sinks": sinks})
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


if __name__ == "__main__":
    sys.exit(main())
