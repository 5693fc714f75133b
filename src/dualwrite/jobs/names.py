"""Transactional ids of a job's task attempts: `<prefix>.<partition>.<attempt>`.

Two numbers come after the prefix, so that no two prefixes share an id: `orders.0.1` is of `orders`, never of `orders.0`.
Which prefix an id belongs to is never guessed from its text, though: the table `kafka_job_attempt` tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dualwrite.errors import InvalidTransactionalIdError
from dualwrite.state import MAX_TRANSACTIONAL_ID_LENGTH, validate_transactional_id

SEPARATOR: Final = "."
_NUMBERS_LENGTH: Final = 22  # two separators and two numbers of ten digits: Spark counts both in 32 bits

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
