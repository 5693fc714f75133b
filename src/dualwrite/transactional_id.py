"""A transactional id in its three forms: the user's, the one of a lane's row, and the one that Kafka sees. No I/O.

| form | example | where |
| --- | --- | --- |
| logical | `orders` | what the user chose |
| row | `orders~2` | the row of lane 2; lane 0 has the logical id itself |
| Kafka | `orders~2#0123456789ab.12` | generation 12 of that lane, acquired by the store `0123456789ab` |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

from dualwrite.errors import DualWriteError, InvalidTransactionalIdError

MAX_TRANSACTIONAL_ID_LENGTH: Final = 255
STORE_ID_LENGTH: Final = 12
GENERATION_MARK: Final = "#"
LANE_MARK: Final = "~"
RESERVED_CHARACTERS: Final = GENERATION_MARK + LANE_MARK
DRAINER_SUFFIX: Final = ".journal"
"""What the id has after its prefix that drains a journal."""

_ROW = re.compile(r"([^#~]+)~([1-9][0-9]*)", re.ASCII)
_KAFKA = re.compile(r"([^#]+)#([0-9a-f]+)\.([1-9][0-9]*)", re.ASCII)
_NAMED = re.compile(rf"(.+?)(?:\.[0-9]+|{re.escape(DRAINER_SUFFIX)})*", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True, order=True)
class TransactionalId:
    """A logical id, one lane of it, and, for the form that Kafka sees, a generation of that lane.

    The store's part separates databases that use the same logical id on one cluster (rule ST).

    Args:
        logical: The user's id.
        lane: The number of the lane.
        generation: The generation, from 1; 0 for the row's form.
        store_id: The store's id; empty in the row's form.
    """

    logical: str
    lane: int = 0
    generation: int = 0
    store_id: str = ""

    @classmethod
    def of_row(cls, text: str) -> Self:
        """Parse a row's id; one that is not in the form of a lane's is a logical id with lane 0."""
        found = _ROW.fullmatch(text)
        return cls(text) if found is None else cls(found[1], int(found[2]))

    @classmethod
    def of_kafka(cls, text: str) -> Self | None:
        """Parse an id that Kafka shows; None if it is not in this form."""
        found = _KAFKA.fullmatch(text)
        return None if found is None else cls.of_row(found[1]).at(int(found[3]), found[2])

    def at(self, generation: int, store_id: str) -> Self:
        """A generation of the lane, as Kafka sees it."""
        return replace(self, generation=generation, store_id=store_id)

    @property
    def row(self) -> str:
        """The id of the lane's row."""
        return f"{self.logical}{LANE_MARK}{self.lane}" if self.lane else self.logical

    def __str__(self) -> str:
        """The row's id, or, with a generation, the id as Kafka sees it."""
        return f"{self.row}{GENERATION_MARK}{self.store_id}.{self.generation}" if self.generation else self.row


def lanes_of(row_ids: Iterable[str], logical: str) -> list[str]:
    """Those of the ids that are lanes of the logical id, in the order of their numbers."""
    ids = map(TransactionalId.of_row, row_ids)
    return [lane.row for lane in sorted(found for found in ids if found.logical == logical)]


def name_of(row_id: str) -> str:
    """What all ids of a prefix, a relay's name or a job have in common, without numbers: it belongs to one cluster (rule CL).

    It is `shop` for the writers `shop.1` and `shop.2~1`, for `shop.journal`, which drains their journal, for `shop.journal.1`,
    which publishes dead letters of it, and for the task `shop.3.0`.
    """
    found = _NAMED.fullmatch(TransactionalId.of_row(row_id).logical)
    return row_id if found is None else found[1]


def further_lanes(row_ids: Iterable[str], lanes: Sequence[str]) -> list[str]:
    """The lanes of an id other than `lanes`, whose first is lane 0; none if that is itself a lane of another id."""
    if TransactionalId.of_row(lanes[0]).lane:
        return []
    return [lane for lane in lanes_of(row_ids, lanes[0]) if lane not in lanes]


def journaled_prefix(prefix: str) -> str:
    """The prefix of what processes lease that write into the journal of a prefix always: its gate stays open for them."""
    return f"{prefix}.journaled"


def drainer_id(prefix: str) -> str:
    """The transactional id that drains the journal of a prefix. One process uses it at a time; its claims fence the others."""
    return f"{prefix}{DRAINER_SUFFIX}"


def drained_prefix(transactional_id: str) -> str | None:
    """The prefix whose journal an id drains; None if it is another id."""
    prefix = transactional_id.removesuffix(DRAINER_SUFFIX)
    return None if prefix == transactional_id else prefix


def name_lane(error: DualWriteError, logical: str) -> None:
    """Make an error about a lane's row name the logical id, which the user knows, and mention the lane in its text.

    A row or a claim has only the id of the row, and an error about it names that id. The writer and `forget`, which are called
    with the logical id, call this for each error that leaves them. The attribute `lane` is set to the lane's id.
    """
    row_id = error.transactional_id
    if row_id is not None and row_id != logical and TransactionalId.of_row(row_id).logical == logical:
        error.transactional_id = logical
        error.what = f"{error.what.removesuffix('.')} (lane {row_id!r})."
        error.facts["lane"] = row_id


def validate_transactional_id(transactional_id: str, *, lanes: int = 1) -> str:
    """Return the id if it is valid: 1 to 255 characters, without `#`, `~` and control characters.

    Args:
        transactional_id: The id.
        lanes: The number of its lanes: the id of each lane must fit into the 255 characters.

    Raises:
        InvalidTransactionalIdError: The id is not valid.
    """
    if not isinstance(transactional_id, str) or not transactional_id:
        raise InvalidTransactionalIdError(
            f"A transactional id must be a string of 1 to {MAX_TRANSACTIONAL_ID_LENGTH} characters, not {transactional_id!r}.",
            next_step="choose a name that stays the same across restarts and that no other running process uses",
        )
    limit = MAX_TRANSACTIONAL_ID_LENGTH - len(TransactionalId("", lanes - 1).row)
    if len(transactional_id) > limit:
        raise InvalidTransactionalIdError(
            f"The transactional id has {len(transactional_id)} characters; {limit} is the limit"
            f"{f' with {lanes} lanes' if lanes > 1 else ''}: {transactional_id[:40]!r}…",
        )
    bad = sorted({c for c in transactional_id if c in RESERVED_CHARACTERS or not c.isprintable()})
    if bad:
        raise InvalidTransactionalIdError(
            f"The transactional id {transactional_id!r} contains {' '.join(map(repr, bad))}.",
            cause="'#' and '~' are reserved for the generations and lanes of an id; control characters are not allowed",
        )
    return transactional_id
