"""Measures the transaction tools with many transactional ids: their time, and the memory of their process.

python benchmarks/transactions.py [--ids 10000] [--kafka HOST:PORT]

Creates the ids on its own broker, unless one is given, then lists and describes all of them. Each is measured twice: for the
time and the growth of the process (RSS), and, since tracing is slow, again for the peak of Python's memory (tracemalloc).
"""

from __future__ import annotations

import argparse
import resource
import secrets
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

from brokers import describe
from dualwrite.admin import TransactionAdmin
from dualwrite.devcluster import DevCluster
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from options import count
from surroundings import line, without_database

_THREADS = 8


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=count, default=10_000, help="how many transactional ids; 10000 by default")
    parser.add_argument("--kafka", metavar="HOST:PORT", help="an existing cluster; the ids are created there and remain")
    given = parser.parse_args()
    with _cluster(given.kafka) as servers:
        print(line(without_database(describe({"bootstrap.servers": servers}), given, {})))
        prefix = f"benchmark-{secrets.token_hex(4)}-"  # the cluster may have ids of an earlier run
        names = [f"{prefix}{number}" for number in range(given.ids)]
        seconds = create(servers, names)
        print(f"{len(names)} ids created in {seconds:.1f} s")
        with TransactionAdmin(servers, timeout=120) as admin:
            measured("list", len(names), lambda: sum(one.transactional_id.startswith(prefix) for one in admin.list()))
            measured("list --pattern, none", 0, lambda: len(admin.list(pattern="nothing-.*")))
            measured("describe", len(names), lambda: sum(one.description is not None for one in admin.describe(iter(names))))


def create(servers: str, names: list[str]) -> float:
    """Initialize the ids; returns how many seconds this took."""
    began = time.perf_counter()

    def some(first: int) -> None:
        with closing(WireTransactionCoordinator(KafkaConfig.of(servers), timeout=60)) as coordinator:
            for name in names[first::_THREADS]:
                coordinator.init_producer_id(name)

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(some, range(_THREADS)))
    return time.perf_counter() - began


def measured(what: str, expected: int, run: Callable[[], int]) -> None:
    """Print the time and memory of a call that returns how many ids it has found."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    found = run()
    seconds = time.perf_counter() - began
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if found != expected:
        raise SystemExit(f"{what} found {found} ids, not {expected}")
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"{what:22} {found:6} ids   {seconds:6.2f} s   peak {peak / 1e6:6.1f} MB   RSS +{grown / 1024:.1f} MB")


@contextmanager
def _cluster(servers: str | None) -> Iterator[str]:
    if servers is not None:
        yield servers
        return
    with DevCluster.temporary() as cluster:
        yield cluster.bootstrap_servers


if __name__ == "__main__":
    main()
