"""Compares the recipe with its alternatives on PostgreSQL: rates, latencies, visibility, load. See README.md."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import confluent_kafka
from sqlalchemy import text

import dualwrite
import tables
import workload
from agents import AgentError
from alternatives import NAMES, Name, Target
from dualwrite import DualWriteError
from figures import Figures, Rounds
from measurement import WARM_UP_UNITS, Bench, Plan
from progress import show_progress
from relay import RelaySettings
from services import Services, services
from steps import Step, take_apart
from verification import VerificationError, verify

_WARM_UP_SECONDS: Final = 2.0
_FAILED: Final = 1
_INTERRUPTED: Final = 130


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seconds", type=_positive, default=5.0, help="duration of one measurement")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds; each measures every alternative in turn")
    parser.add_argument("--writers", type=_whole_numbers, default=[1, 4, 8], help="numbers of writers, comma-separated")
    parser.add_argument(
        "--alternatives", type=_names, help="what to measure, comma-separated (default: all; pool only with --threads)"
    )
    parser.add_argument("--threads", action="store_true", help="run the writers as threads of one process, not as processes")
    parser.add_argument("--url", help="an existing PostgreSQL database; by default a server is started")
    parser.add_argument("--kafka", metavar="HOST:PORT", help="an existing cluster; by default one broker is started")
    parser.add_argument(
        "--kafka-config", action="append", type=_setting, default=[], metavar="NAME=VALUE", help="a setting of every client"
    )
    parser.add_argument("--producer", default="auto", help="producer of dualwrite.connect")
    parser.add_argument("--partitions", type=int, default=4, help="partitions of each topic")
    parser.add_argument("--poll-interval", type=_positive, default=0.01, help="relay: seconds between polls of an empty outbox")
    parser.add_argument("--batch", type=int, default=500, help="relay: maximum number of rows per batch")
    parser.add_argument("--no-steps", dest="steps", action="store_false", help="skip the breakdown of the recipe's time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's figures to this file")
    chosen = parser.parse_args(given)
    if chosen.alternatives is None:
        chosen.alternatives = [name for name in NAMES if chosen.threads or name != "pool"]
    elif "pool" in chosen.alternatives and not chosen.threads:
        parser.error("a pool serves the threads of one process: add --threads")
    return chosen


def _positive(given: str) -> float:
    number = float(given)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be greater than 0, not {given}")
    return number


def _whole_numbers(given: str) -> list[int]:
    numbers = [int(part) for part in given.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError("there must be at least one writer")
    return numbers


def _names(given: str) -> list[Name]:
    unknown = set(given.split(",")) - set(NAMES)
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: choose from {', '.join(NAMES)}")
    return [name for name in NAMES if name in given.split(",")]


def _setting(given: str) -> tuple[str, str]:
    name, separator, value = given.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{given!r} is not NAME=VALUE")
    return name, value


def measure_all(bench: Bench, options: argparse.Namespace) -> list[Figures]:
    """Run the warm-up round, then all rounds, with the alternatives interleaved."""
    for name in options.alternatives:
        show_progress(f"warm-up: {name}")
        bench.measure(name, max(options.writers), min(options.seconds, _WARM_UP_SECONDS))
    found = []
    for number in range(1, options.rounds + 1):
        for writers in options.writers:
            for name in options.alternatives:
                figures = bench.measure(name, writers, options.seconds)
                found.append(figures)
                show_progress(f"round {number}/{options.rounds}, {writers} writers, {name}: {figures.rate:,.0f}/s")
    return found


def measure_steps(servers: Services, options: argparse.Namespace) -> list[Step]:
    """Break down the time of one dual write, with one writer; verified as well."""
    show_progress("measuring the recipe's steps")
    database = workload.engine(servers.url)
    topic = f"benchmark-{int(time.time()):x}-steps"
    servers.make_topic(topic, options.partitions)
    workload.prepare(database)
    try:
        target = Target(servers.url, servers.kafka, topic)
        steps, done = take_apart(target, options.seconds, warm_up=WARM_UP_UNITS)
        verify("recipe", database, servers.kafka, topic, done=done)
    finally:
        workload.remove(database)
        database.dispose()
        if not servers.brokers:
            servers.delete_topic(topic)
    return steps


def surroundings(servers: Services, options: argparse.Namespace) -> dict[str, Any]:
    """The environment that the figures depend on."""
    database = workload.engine(servers.url)
    with database.connect() as connection:
        names = ("server_version", "fsync", "synchronous_commit", "full_page_writes")
        postgres = {name: str(connection.scalar(text(f"SHOW {name}"))) for name in names}
    database.dispose()
    return {
        "dualwrite": dualwrite.__version__,
        "python": platform.python_version(),
        "machine": f"{os.cpu_count()} processors, {platform.machine()}, {platform.system()}",
        "load average before": os.getloadavg()[0],
        "producer": options.producer,
        "librdkafka": confluent_kafka.libversion()[0],
        "postgresql": postgres,
        "kafka": "a development cluster of our own, one node" if servers.brokers else servers.kafka["bootstrap.servers"],
        "writers are": "threads" if options.threads else "processes",
        "options": {name: str(value) for name, value in vars(options).items()},
    }


def report(figures: Sequence[Figures], steps: Sequence[Step], around: dict[str, Any]) -> str:
    """The complete report as text."""
    keys = dict.fromkeys((f.writers, f.alternative) for f in figures)
    rounds = [Rounds(f for f in figures if (f.writers, f.alternative) == key) for key in keys]
    shown = {name: value for name, value in around.items() if name != "options"}
    parts = [
        "; ".join(f"{name}: {value}" for name, value in shown.items()),
        f"Medians of {len(rounds[0].figures)} rounds; a unit is one account updated, one order inserted, one message.\n\n"
        + tables.throughput(rounds),
        "Time until a read_committed consumer receives the message:\n\n" + tables.visibility(rounds),
        "Cost of one unit:\n\n" + tables.load(rounds),
    ]
    if steps:
        parts.append(f"Time spent in each step of a dual write (1 writer, {around['producer']}):\n\n" + tables.steps(steps))
    parts.append(f"Verified: {sum(f.verified for f in figures):,} messages against their rows, record by record.")
    if "off" in (around["postgresql"]["fsync"], around["postgresql"]["synchronous_commit"]):
        parts.append("WARNING: this PostgreSQL does not wait for its disk, so its commits are not durable.")
    return "\n\n".join(parts)


def main() -> int:
    """Measure, verify, print."""
    options = arguments()
    plan = Plan(
        partitions=options.partitions,
        producer=options.producer,
        relay=RelaySettings(options.poll_interval, options.batch),
        keep_topics=options.kafka is None,
    )
    try:
        show_progress("starting the servers")
        with services(options.url, options.kafka, dict(options.kafka_config)) as servers:
            around = surroundings(servers, options)
            with Bench(servers, plan, most_writers=max(options.writers), threads=options.threads) as bench:
                figures = measure_all(bench, options)
            steps = measure_steps(servers, options) if options.steps else []
    except (VerificationError, AgentError, DualWriteError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED
    print(report(figures, steps, around))
    if options.json is not None:
        rounds = [{**asdict(f), "rate": f.rate} for f in figures]
        content = {"surroundings": around, "rounds": rounds, "steps": [asdict(step) for step in steps]}
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
