"""Compares the recipe with its alternatives on PostgreSQL: rates, latencies, visibility, load. See README.md."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Engine

import tables
import workload
from agents import Agent, AgentError
from alternatives import NAMES, Target
from cases import Case, rotated
from dualwrite import DualWriteError
from figures import Figures, Rounds
from measurement import WARM_UP_UNITS, Bench, Plan, Work
from options import add_servers, count, counts, positive, some_of
from progress import show_progress
from records import VerificationError
from relay import RelaySettings
from services import Services, services
from steps import Step, take_apart
from surroundings import line, surroundings, warnings
from verification import verify
from writing import Writing

_WARM_UP_SECONDS: Final = 2.0
_FAILED: Final = 1
_INTERRUPTED: Final = 130


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seconds", type=positive, default=5.0, help="duration of one measurement")
    parser.add_argument("--rounds", type=count, default=5, help="number of rounds; each measures every alternative in turn")
    parser.add_argument("--writers", type=counts, default=[1, 4, 8], help="numbers of writers, comma-separated")
    parser.add_argument(
        "--alternatives", type=some_of(NAMES), help="what to measure, comma-separated (default: all; pool only with --threads)"
    )
    parser.add_argument("--threads", action="store_true", help="run the writers as threads of one process, not as processes")
    add_servers(parser)
    parser.add_argument("--no-warm-up", dest="warm_up", action="store_false", help="skip the warm-up round, and the broker's")
    parser.add_argument("--no-steps", dest="steps", action="store_false", help="skip the breakdown of the recipe's time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's figures to this file")
    chosen = parser.parse_args(given)
    if not chosen.warm_up:
        parser.set_defaults(broker_warm_up=0.0)
        chosen = parser.parse_args(given)
    if chosen.alternatives is None:
        chosen.alternatives = [name for name in NAMES if chosen.threads or name != "pool"]
    elif "pool" in chosen.alternatives and not chosen.threads:
        parser.error("a pool serves the threads of one process: add --threads")
    return chosen


def _case(name: str, writers: int) -> Case:
    return Case(name, writers, agents=writers, sends=name != "database", needs_relay=name == "outbox")


def _verify(case: Case, database: Engine, kafka: Mapping[str, Any], topic: str, done: Mapping[int, int]) -> int:
    return verify(case.alternative, database, kafka, topic, done=done)


_WORK: Final = Work(workload.prepare, workload.clean, workload.remove, _verify)


def measure_all(bench: Bench, options: argparse.Namespace) -> list[Figures]:
    """Run the warm-up round, unless it is skipped, then all rounds, with the alternatives in turn."""
    for name in options.alternatives if options.warm_up else ():
        show_progress(f"warm-up: {name}")
        bench.measure(_case(name, max(options.writers)), min(options.seconds, _WARM_UP_SECONDS))
    found = []
    for number in range(1, options.rounds + 1):
        for writers in options.writers:
            for name in rotated(options.alternatives, number - 1):
                figures = bench.measure(_case(name, writers), options.seconds)
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
        target = Target(servers.url, servers.kafka, topic, options.producer)
        steps, done = take_apart(target, options.seconds, warm_up=WARM_UP_UNITS)
        verify("recipe", database, servers.kafka, topic, done={0: done})
    finally:
        workload.remove(database)
        database.dispose()
        if not servers.brokers:
            servers.delete_topic(topic)
    return steps


def report(figures: Sequence[Figures], steps: Sequence[Step], around: dict[str, Any]) -> str:
    """The complete report as text."""
    keys = dict.fromkeys((f.writers, f.alternative) for f in figures)
    rounds = [Rounds(f for f in figures if (f.writers, f.alternative) == key) for key in keys]
    parts = [
        line(around),
        f"Medians of {len(rounds[0].figures)} rounds; ratios are those of the rounds, with their range. A unit is one account "
        "updated, one order inserted, one message.\n\n" + tables.throughput(rounds),
        "Time until a read_committed consumer receives the message:\n\n" + tables.visibility(rounds),
        "Cost of one unit:\n\n" + tables.load(rounds),
    ]
    if steps:
        parts.append(f"Time spent in each step of a dual write (1 writer, {around['producer']}):\n\n" + tables.steps(steps))
    parts.append(f"Verified: {sum(f.verified for f in figures):,} messages against their rows, record by record.")
    return "\n\n".join([*parts, *warnings(around)])


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
        with services(options.url, options.kafka, dict(options.kafka_config), warm_up=options.broker_warm_up) as servers:
            around = surroundings(servers, options, {"writers are": "threads" if options.threads else "processes"})
            starts = [partial(Agent, Writing, number, in_thread=options.threads) for number in range(max(options.writers))]
            with Bench(servers, plan, _WORK, starts) as bench:
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
