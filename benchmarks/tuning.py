"""Compares librdkafka settings for the recipe: rate, latency and steps of each, with one writer, interleaved."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping
from typing import Final

import tables
import workload
from alternatives import Target
from brokers import WARM_UP_SECONDS
from cases import rotated
from measurement import WARM_UP_UNITS
from options import count, positive
from progress import show_progress
from services import services
from steps import FLUSH, KAFKA_COMMIT, WHOLE, Step, take_apart
from surroundings import line, surroundings, warnings
from verification import verify

CANDIDATES: Final[Mapping[str, Mapping[str, str]]] = {
    "dualwrite's defaults": {},
    "linger.ms=5 (librdkafka's default)": {"linger.ms": "5"},
    "socket.nagle.disable=true": {"socket.nagle.disable": "true"},
    "enable.metrics.push=false": {"enable.metrics.push": "false"},
}


def main() -> int:
    """Measure every candidate in every round; print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seconds", type=positive, default=5.0, help="duration of one measurement")
    parser.add_argument("--rounds", type=count, default=5, help="number of rounds; each measures every setting in turn")
    parser.add_argument("--partitions", type=count, default=4, help="partitions of each topic")
    parser.add_argument("--url", help="an existing PostgreSQL database; by default a server is started")
    options = parser.parse_args()
    found: dict[str, list[dict[str, Step]]] = {title: [] for title in CANDIDATES}
    with services(options.url, None, {}, warm_up=WARM_UP_SECONDS) as servers:
        around = surroundings(servers, options, {})
        database = workload.engine(servers.url)
        workload.prepare(database)
        for number in range(options.rounds + 1):
            for place, title in enumerate(rotated(list(CANDIDATES), number)):
                topic = f"tuning-{number}-{place}"
                servers.make_topic(topic, options.partitions)
                workload.clean(database)
                target = Target(servers.url, {**servers.kafka, **CANDIDATES[title]}, topic, producer="librdkafka")
                steps, done = take_apart(target, options.seconds, warm_up=WARM_UP_UNITS)
                verify("recipe", database, servers.kafka, topic, done={0: done})
                if number:  # round 0 is the warm-up
                    found[title].append({step.name: step for step in steps})
                show_progress(f"round {number}, {title}: {done}")
        workload.remove(database)
        database.dispose()
    print("\n\n".join([line(around), _table(found), *warnings(around)]))
    return 0


def _table(found: Mapping[str, list[dict[str, Step]]]) -> str:
    def median(rounds: list[dict[str, Step]], name: str, what: str) -> str:
        return f"{statistics.median(getattr(steps[name], what) for steps in rounds) * 1000:.2f}"

    lines = []
    for title, rounds in found.items():
        rates = [1 / steps[WHOLE].mean for steps in rounds]
        lines.append(
            [
                title,
                f"{statistics.median(rates):,.0f}",
                f"{min(rates):,.0f} … {max(rates):,.0f}",
                *(median(rounds, WHOLE, what) for what in ("p50", "p99")),
                *(median(rounds, FLUSH, what) for what in ("mean", "p50", "p99")),
                *(median(rounds, KAFKA_COMMIT, what) for what in ("p50", "p99")),
            ]
        )
    head = ["settings", "tx/s", "min … max", "p50 ms", "p99 ms", "flush mean", "p50", "p99", "Kafka commit p50", "p99"]
    return tables.table(head, lines, names=1)


if __name__ == "__main__":
    sys.exit(main())
