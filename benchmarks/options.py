"""Types of the benchmarks' command-line arguments, and the arguments for the servers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Final

WARM_UP_SECONDS: Final = 60.0
_MILLI: Final = 1e3


def positive(given: str) -> float:
    if not (number := float(given)) > 0:
        raise argparse.ArgumentTypeError(f"must be greater than 0, not {given}")
    return number


def seconds(given: str) -> float:
    if not (number := float(given)) >= 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, not {given}")
    return number


def count(given: str) -> int:
    if (number := int(given)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {given}")
    return number


def counts(given: str) -> list[int]:
    return [count(part) for part in given.split(",")]


def round_trips(given: str) -> list[float]:
    """Durations in milliseconds, comma-separated; returned in seconds."""
    return [seconds(part) / _MILLI for part in given.split(",")]


def some_of(names: Sequence[str]) -> Callable[[str], list[str]]:
    """Some of these names, comma-separated; returned in the order of `names`."""

    def chosen(given: str) -> list[str]:
        wanted = given.split(",")
        if unknown := sorted(set(wanted) - set(names)):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(names)}")
        return [name for name in names if name in wanted]

    return chosen


def parser_of(what: str | None) -> argparse.ArgumentParser:
    """A parser that shows the defaults."""
    return argparse.ArgumentParser(description=what, formatter_class=argparse.ArgumentDefaultsHelpFormatter)


def add_servers(parser: argparse.ArgumentParser, *, is_writer: bool = True) -> None:
    """The arguments for existing servers, and for a broker of our own."""
    if is_writer:
        parser.add_argument("--producer", default="auto", help="producer of dualwrite's writers")
        parser.add_argument("--url", help="an existing PostgreSQL database; by default a server is started")
    parser.add_argument("--kafka", metavar="HOST:PORT", help="an existing cluster; by default one broker is started")
    parser.add_argument(
        "--broker-warm-up",
        type=seconds,
        default=WARM_UP_SECONDS,
        help="seconds for which our own broker is warmed up, with the JVM options of Kafka's start scripts; "
        "0: a broker that starts fast but is slower",
    )
