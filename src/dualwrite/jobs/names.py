"""Transactional ids of a job's task attempts: `<prefix>.<partition>.<attempt>`, read back exactly.

The last two parts are numbers, whatever the prefix holds: `orders.eu.0.1` belongs to the prefix `orders.eu` and never to
`orders`, and `orders.0.1` to `orders` and never to `orders.0`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self

from dualwrite.errors import InvalidTransactionalIdError
from dualwrite.state import MAX_TRANSACTIONAL_ID_LENGTH, validate_transactional_id

SEPARATOR: Final = "."
_NUMBERS_LENGTH: Final = 22  # two separators and two numbers of ten digits: Spark counts both in 32 bits
_ID: Final = re.compile(r"(?P<prefix>.+)\.(?P<partition>0|[1-9][0-9]*)\.(?P<attempt>0|[1-9][0-9]*)", re.ASCII | re.DOTALL)

MAX_PREFIX_LENGTH: Final = MAX_TRANSACTIONAL_ID_LENGTH - _NUMBERS_LENGTH
"""Characters of a prefix."""


@dataclass(frozen=True, slots=True)
class AttemptId:
    """One attempt of the task for one partition.

    Args:
        prefix: The job's prefix.
        partition: Number of the partition, from 0.
        attempt: Number of the attempt, from 0: retries and speculative copies have numbers of their own.
    """

    prefix: str
    partition: int
    attempt: int

    def __str__(self) -> str:
        """The logical transactional id."""
        return f"{self.prefix}{SEPARATOR}{self.partition}{SEPARATOR}{self.attempt}"

    @classmethod
    def parse(cls, transactional_id: str) -> Self | None:
        """What the id stands for, or None where it is none of this form."""
        found = _ID.fullmatch(transactional_id)
        return None if found is None else cls(found["prefix"], int(found["partition"]), int(found["attempt"]))


def validate_prefix(prefix: str) -> str:
    """Return the prefix if the ids of all task attempts can be made of it.

    Raises:
        InvalidTransactionalIdError: It is empty, too long, or holds what no transactional id may hold.
    """
    validate_transactional_id(prefix)
    if len(prefix) > MAX_PREFIX_LENGTH:
        raise InvalidTransactionalIdError(
            f"The prefix has {len(prefix)} characters; {MAX_PREFIX_LENGTH} is the limit: {prefix[:40]!r}…",
            cause="partition and attempt are appended to it, and a transactional id has at most "
            f"{MAX_TRANSACTIONAL_ID_LENGTH} characters",
        )
    return prefix
