"""Which shards of an outbox this relay works on: each is a leased number, and all relays of a name have equal shares.

A lease only says who should work on a shard. That no row is published twice, and that the rows of a key stay in their order,
does not depend on it: a batch's transaction locks its rows in their order, and commits under the claim of its transactional id.
So the number of shards may change while relays with another number are running.
"""

from __future__ import annotations

from itertools import count as numbers
from typing import Final

from dualwrite.pool.pool_ids import LeasedIds
from dualwrite.stores.leases import Lease, LeaseStore, number_of, numbered

_MEMBER: Final = "member"


class ShardLeases:
    """The shards of one relay, and its share of them.

    Args:
        leases: The database's leases.
        ids: This relay's leases.
        name: The relay's name: shard 0 has the id `<name>.1`, and so on.
        count: The number of shards.
    """

    def __init__(self, leases: LeaseStore, ids: LeasedIds, name: str, count: int) -> None:
        self._leases = leases
        self._ids = ids
        self._name = name
        self._shards = [numbered(name, number) for number in range(1, count + 1)]
        self._members = f"{name}.{_MEMBER}"

    def balance(self) -> tuple[list[str], int]:
        """Lease free shards, up to this relay's share, and become one of the members.

        Returns:
            The shards that are leased now, and how many of them are more than its share: these it should release.

        Raises:
            StoreError: The database's own errors, translated.
        """
        entries = [each for each in self._leases.entries(f"{self._name}.") if not each.has_ended]
        share = len(self._shards) if len(self._shards) == 1 else self._share(entries)
        taken = {each.transactional_id for each in entries}
        for shard in self._shards:
            if len(self._ours()) >= share:
                break
            if shard not in taken:
                self._ids.acquire_one(shard)
        ours = self._ours()
        return ours, max(0, len(ours) - share)

    def release(self, shard: str) -> None:
        """End the lease on a shard."""
        self._ids.release(shard)

    def _ours(self) -> list[str]:
        held = self._ids.held
        return [shard for shard in self._shards if shard in held]

    def _share(self, entries: list[Lease]) -> int:
        members = {each.transactional_id for each in entries if number_of(self._members, each.transactional_id) is not None}
        if not any(number_of(self._members, held) is not None for held in self._ids.held):
            free = (name for name in (numbered(self._members, number) for number in numbers(1)) if name not in members)
            name = next(free)
            if self._ids.acquire_one(name):
                members.add(name)
        return -(-len(self._shards) // max(1, len(members)))
