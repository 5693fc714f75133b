"""Measures what importing costs: the CPU time of a new Python process, compared with one that imports SQLAlchemy. No servers.

python benchmarks/imports.py [--rounds N]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys

from options import count
from surroundings import line, without_servers

STATEMENTS = {
    "import sqlalchemy": "import sqlalchemy",
    "import dualwrite": "import dualwrite",
    "what connect loads": "import dualwrite; dualwrite.connect",
    "the native producer": "import dualwrite; dualwrite.connect; from dualwrite.kafka import NativeProducer",
    "librdkafka's producer": "import dualwrite; dualwrite.connect; from dualwrite.kafka import LibrdkafkaProducer",
}


def cpu_seconds(statement: str) -> float:
    """User and system time of a Python process that runs the statement, including its startup."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-W", "ignore", "-c", statement], check=True)  # noqa: S603  (the statements above)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure in turns, so that a slowdown of the machine affects all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=count, default=7, help="number of rounds; each measures every statement in turn")
    options = parser.parse_args()
    print(line(without_servers(options, {})))
    seconds: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for _ in range(options.rounds):
        for name, statement in STATEMENTS.items():
            seconds[name].append(cpu_seconds(statement))
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    baseline = medians["import sqlalchemy"]
    for name, median in medians.items():
        print(f"{name:28} {median:6.3f} s CPU  {median / baseline:5.2f} x import sqlalchemy")


if __name__ == "__main__":
    main()
