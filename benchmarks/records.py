"""Numbered records of 200 bytes: what the benchmarks write, and the check that exactly this is there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Final

SIZE: Final = 200
_SHOWN: Final = 5


class VerificationError(RuntimeError):
    """What is there is not what was written: the figures are not valid."""


def record(writer: int, number: int) -> bytes:
    """The record with this number, from 0, of a writer."""
    return (b"%d.%d." % (writer, number)).ljust(SIZE, b"x")


def records(writer: int) -> Iterator[bytes]:
    """The records of a writer, without end."""
    return (record(writer, number) for number in count())


def place_of(content: bytes) -> tuple[int, int]:
    """The writer and the number of a record."""
    try:
        writer, number, _ = content.split(b".", 2)
        return int(writer), int(number)
    except ValueError as error:
        raise VerificationError(f"this is none of the records: {content!r}") from error


def check_records(name: str, what: str, written: Mapping[int, int], found: Iterable[bytes]) -> int:
    """Check that each writer's first records are there, each exactly once and unaltered, and nothing else.

    They are not kept in memory: there may be millions.

    Args:
        name: What was measured.
        what: What the records are, in the plural.
        written: How many records each writer has written.
        found: What is there, in any order.

    Returns:
        How many records there are.

    Raises:
        VerificationError: A record is lost, doubled or altered, or was never written.
    """
    seen = {writer: bytearray(number) for writer, number in written.items()}
    for content in found:
        writer, number = place_of(content)
        if content != record(writer, number):
            raise VerificationError(f"{name}: one of the {what} is altered: {content!r}")
        if not 0 <= number < len(seen.get(writer, b"")):
            raise VerificationError(f"{name}: number {number} of writer {writer} is among the {what}, but was never written")
        if seen[writer][number]:
            raise VerificationError(f"{name}: number {number} of writer {writer} is twice among the {what}")
        seen[writer][number] = 1
    lost = [f"{writer}.{numbers.index(0)}" for writer, numbers in seen.items() if not all(numbers)]
    if lost:
        missing = sum(numbers.count(0) for numbers in seen.values())
        raise VerificationError(f"{name}: {missing} {what} are missing (the first of each writer: {lost[:_SHOWN]})")
    return sum(written.values())


def run_verified(main: Callable[[], None]) -> None:
    """Run a benchmark, which ends with an error if something is not what was written."""
    try:
        main()
    except VerificationError as error:
        sys.exit(f"VerificationError: {error}")
