"""Types of the benchmarks' command-line arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Final

from brokers import WARM_UP_SECONDS

_MILLI: Final = 1e3


def positive(given: str) -> float:
    """A number above 0."""
    number = float(given)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be greater than 0, not {given}")
    return number


def seconds(given: str) -> float:
    """A number that is not negative."""
    number = float(given)
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, not {given}")
    return number


def part(given: str) -> float:
    """A share, from 0 to 1."""
    number = float(given)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, not {given}")
    return number


def count(given: str) -> int:
    """A whole number above 0."""
    number = int(given)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {given}")
    return number


def counts(given: str) -> list[int]:
    """Whole numbers above 0, comma-separated."""
    return [count(part) for part in given.split(",")]


def round_trips(given: str) -> list[float]:
    """Durations in milliseconds, comma-separated; returned in seconds."""
    return [seconds(part) / _MILLI for part in given.split(",")]


def some_of(names: Sequence[str]) -> Callable[[str], list[str]]:
    """Some of these names, comma-separated; returned in the order of `names`."""

    def chosen(given: str) -> list[str]:
        wanted = given.split(",")
        unknown = sorted(set(wanted) - set(names))
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(names)}")
        return [name for name in names if name in wanted]

    return chosen


def setting(given: str) -> tuple[str, str]:
    """NAME=VALUE."""
    name, separator, value = given.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{given!r} is not NAME=VALUE")
    return name, value


def add_servers(parser: argparse.ArgumentParser) -> None:
    """The options for the servers and the outbox's relay."""
    parser.add_argument("--url", help="an existing PostgreSQL database; by default a server is started")
    parser.add_argument("--kafka", metavar="HOST:PORT", help="an existing cluster; by default one broker is started")
    parser.add_argument(
        "--kafka-config", action="append", type=setting, default=[], metavar="NAME=VALUE", help="a setting of every client"
    )
    parser.add_argument(
        "--broker-warm-up",
        type=seconds,
        default=WARM_UP_SECONDS,
        help="seconds for which our own broker is warmed up, with the JVM options of Kafka's start scripts; "
        "0: a broker that starts fast but is slower",
    )
    parser.add_argument("--producer", default="auto", help="producer of dualwrite.connect")
    parser.add_argument("--partitions", type=count, default=4, help="partitions of each topic")
    parser.add_argument("--poll-interval", type=positive, default=0.01, help="relay: seconds between polls of an empty outbox")
    parser.add_argument("--batch", type=count, default=500, help="relay: maximum number of rows per batch")
