"""Leases on numbered ids (`shop.1`, `shop.2`, …): which pool should use which id; and the contract of stores that keep them.

A lease only says who *should* use an id, so that processes need no fixed names. What keeps two of them from harming each other
is the claim's fencing token: a process whose lease has ended without its knowledge is fenced like any other.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count as numbers
from itertools import islice
from typing import Final

from dualwrite.deadline import CHANCE
from dualwrite.errors import StoreError

_ROUNDS: Final = 100
"""How often `lease` looks for free ids: in each round it gets one, unless others have been faster for all that it tried."""

_PAUSE: Final = 0.05

_TOLERANCE: Final = 1.0
"""Seconds that a lease may have left beyond its length: the clock was read, and times were rounded, at different moments."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Who should use an id.

    Args:
        transactional_id: The logical id.
        owner: Who has leased it, as text that people can read and that no other owner has: host, process id, a random part.
        seconds_left: Seconds until the lease ends, by the database's clock; if not above 0, it has ended, and anybody may
            lease the id. None if it ends with the owner's session (ZooKeeper).
        seconds: For how long its owner has leased the id; None as above.
    """

    transactional_id: str
    owner: str
    seconds_left: float | None
    seconds: float | None = None

    @property
    def is_impossible(self) -> bool:
        """Whether it has more left than its owner has leased: the database's clock has gone back."""
        if self.seconds_left is None or self.seconds is None:
            return False
        return self.seconds_left > self.seconds + _TOLERANCE

    @property
    def has_ended(self) -> bool:
        """Whether others should `acquire` the id: it is free, or acquiring it makes an impossible lease possible."""
        return self.seconds_left is not None and (self.seconds_left <= 0 or self.is_impossible)

    def has_ended_for(self, seconds: float) -> bool:
        """Whether the lease ended so long ago; of an impossible one, that is not known, and taken to be so."""
        return self.is_impossible or (self.seconds_left is not None and self.seconds_left < -seconds)


class LeaseStore(ABC):
    """Keeps the leases of a database. Safe to use from several threads.

    An id is free if it has no lease, or one that has ended. All times are by the database's clock, so that the clocks of the
    machines don't matter. A lease needs no row of the id, and changes none.

    The database's clock may go back, which makes leases too long. So a store that compares times keeps each lease's length. The
    first `acquire` that finds more left than that shortens the lease to its length: a living owner renews it before it ends.

    Every method raises StoreUnavailableError if the database can't be reached, and StateTableMissingError if it does not have
    our table. All may be repeated after an error: a second call has the same effect as one.
    """

    @abstractmethod
    def acquire(self, ids: Collection[str], owner: str, *, seconds: float) -> frozenset[str]:
        """Lease those of the ids that are free. If several owners try at once, each id is leased by one of them.

        Args:
            ids: Logical ids.
            owner: Who leases them, at most MAX_OWNER_LENGTH characters; no two pools have the same.
            seconds: How long, from now.

        Returns:
            The ids that this owner has leased now, including those that it had leased before; their leases are extended.
        """

    @abstractmethod
    def renew(self, ids: Collection[str], owner: str, *, seconds: float) -> frozenset[str]:
        """Extend the leases that this owner still has, including those that have ended if nobody else has leased the ids since.

        Returns:
            The ids that this owner has leased. Another owner has leased the others meanwhile, and may have released them.
        """

    @abstractmethod
    def release(self, ids: Collection[str], owner: str) -> None:
        """End the leases that this owner has on the ids; leases of other owners are not changed."""

    @abstractmethod
    def entries(self, prefix: str = "") -> list[Lease]:
        """The leases of the ids that begin with `prefix`, sorted by id: also those that have ended, if the store keeps them."""

    def lease(
        self, prefix: str, owner: str, count: int, *, seconds: float, without: Collection[str] = frozenset()
    ) -> list[str]:
        """Lease the free ids of a prefix with the lowest numbers.

        Args:
            prefix: The ids are `<prefix>.1`, `<prefix>.2`, and so on.
            owner: As for `acquire`.
            count: How many.
            seconds: As for `acquire`.
            without: Ids not to lease.

        Returns:
            The ids, by their numbers.

        Raises:
            StoreError: Others were faster each time; nothing is leased.
        """
        leased: list[str] = []
        try:
            for _ in range(_ROUNDS):
                left_out = {*leased, *without}
                left_out.update(each.transactional_id for each in self.entries(f"{prefix}.") if not each.has_ended)
                free = (name for name in (numbered(prefix, number) for number in numbers(1)) if name not in left_out)
                leased += self.acquire(list(islice(free, count - len(leased))), owner, seconds=seconds)
                if len(leased) == count:
                    return sorted(leased, key=lambda name: number_of(prefix, name) or 0)
                time.sleep(CHANCE.uniform(0, _PAUSE))
        except BaseException:
            with suppress(Exception):  # leases that can't be released end by themselves
                self.release(leased, owner)
            raise
        self.release(leased, owner)
        raise StoreError(
            f"No {count} free ids of the prefix {prefix!r} could be leased: other processes were faster in {_ROUNDS} attempts.",
            next_step="try again; `dualwrite status` shows who has leased them",
        )


def numbered(prefix: str, number: int) -> str:
    """The id of a prefix with a number."""
    return f"{prefix}.{number}"


def number_of(prefix: str, transactional_id: str) -> int | None:
    """The number of a logical id of the prefix; None if it is not one."""
    text = transactional_id.removeprefix(f"{prefix}.")
    if text == transactional_id or not (text.isascii() and text.isdecimal()) or text.startswith("0"):
        return None
    return int(text)


def numbered_ids(prefix: str, ids: Iterable[str]) -> list[str]:
    """Those of the logical ids that are the prefix with a number, in the order of their numbers."""
    found = {name: number_of(prefix, name) for name in ids}
    return sorted((name for name, number in found.items() if number is not None), key=lambda name: found[name] or 0)
