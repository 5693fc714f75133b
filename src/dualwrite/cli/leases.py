"""The leases of pools in `dualwrite status`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dualwrite.cli.tables import show_table
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.leases import Lease


def leases_of(store: TxnStateStore, prefix: str = "") -> list[Lease]:
    """The leases of the ids that start with `prefix`; empty if the store has no leases."""
    return [] if store.leases is None else store.leases.entries(prefix)


def show_leases(leases: Iterable[Lease]) -> None:
    """Print the leases as a table."""
    show_table(("leased id", "by", "lease"), [(each.transactional_id, each.owner, time_left(each)) for each in leases])


def lease_json(lease: Lease) -> dict[str, Any]:
    """A lease, as JSON values."""
    seconds = lease.seconds_left
    return {
        "transactional_id": lease.transactional_id,
        "owner": lease.owner,
        "seconds_left": None if seconds is None else round(seconds, 3),
        "is_expired": lease.has_ended,
    }


def time_left(lease: Lease) -> str:
    """How long the lease lasts."""
    if lease.seconds_left is None:
        return "until its session ends"
    if lease.has_ended:
        return f"expired {-lease.seconds_left:.0f} s ago"
    return f"{lease.seconds_left:.0f} s left"
