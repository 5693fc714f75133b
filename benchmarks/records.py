"""Numbered records, and the comparison of the records that should be there with those that are. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Final, TypeVar

T = TypeVar("T")

SIZE: Final = 200
_SHOWN: Final = 5


class VerificationError(RuntimeError):
    """The records are not those that were written: the figures are not valid."""


def compare(name: str, what: str, expected: Counter[T], found: Counter[T]) -> None:
    """Compare the records that should be there with those that are.

    Args:
        name: What was measured.
        what: What the records are, in the plural.
        expected: Every record that was written, and how often.
        found: Every record that is there, and how often.

    Raises:
        VerificationError: A record is lost, doubled or altered, or was never written.
    """
    lost, extra = expected - found, found - expected
    if lost or extra:
        raise VerificationError(
            f"{name}: {lost.total()} {what} are missing ({list(lost)[:_SHOWN]}), "
            f"{extra.total()} are unexpected ({list(extra)[:_SHOWN]})"
        )


def record(writer: int, number: int) -> bytes:
    """The record with this number, from 0, of a writer."""
    return (b"%d.%d." % (writer, number)).ljust(SIZE, b"x")


def records(writer: int, first: int = 0) -> Iterator[bytes]:
    """The records of a writer, without end."""
    for number in count(first):
        yield record(writer, number)


def place_of(content: bytes) -> tuple[int, int]:
    """The writer and the number of a record.

    Raises:
        VerificationError: It is not a record.
    """
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
