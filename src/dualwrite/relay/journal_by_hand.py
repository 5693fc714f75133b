"""Publishes a journal, or its dead letters, from a process without a pool of the prefix."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Final

from dualwrite.api import connect
from dualwrite.errors import DualWriteError
from dualwrite.outbox.dead_letters import DeadLetters
from dualwrite.outbox.drain import replay, sql_store
from dualwrite.outbox.journal_drain import DrainLease, JournalDrain, JournalSource, drainer_id
from dualwrite.recovery.recoverer import describe_owner
from dualwrite.settings import Settings
from dualwrite.stores.base import TxnStateStore

_LEASE: Final = 60.0


def drain_journal(store: TxnStateStore, settings: Settings, prefix: str) -> int:
    """Publish a journal now, and close its gate.

    Args:
        store: The database.
        settings: Kafka's settings, and the writer's.
        prefix: The prefix, which has a journal there.

    Returns:
        How many messages it had.

    Raises:
        DualWriteError: Another process publishes it; or as for `JournalDrain.step`.
    """
    of_sql = sql_store(store)
    before = of_sql.journal.gates(prefix, counts=True)[0].entries
    owner = _owner()
    of_drainer = settings.with_changes(transactional_id=drainer_id(prefix), lanes=1)
    with (
        _held(DrainLease(of_sql.leases, prefix, owner), prefix) as lease,
        connect(store, settings=of_drainer) as writer,
    ):
        work = JournalDrain(writer, prefix, owner)
        while work.step() or of_sql.journal.gates(prefix, counts=True)[0].entries:  # a closed gate may have some, too
            _check_lease(lease, prefix)
    return before or 0


def replay_letters(store: TxnStateStore, settings: Settings, prefix: str, letters: Collection[int]) -> int:
    """Publish messages of a journal that Kafka has refused before, each once, and remove them from the dead letters.

    Args:
        store: The database.
        settings: Kafka's settings, and the writer's.
        prefix: The prefix.
        letters: Their numbers.

    Returns:
        How many were published.

    Raises:
        DualWriteError: As for `Relay.replay`.
    """
    of_sql, relay, owner = sql_store(store), drainer_id(prefix), _owner()
    (name,) = of_sql.leases.lease(relay, owner, 1, seconds=_LEASE)
    try:
        with connect(store, settings=settings.with_changes(transactional_id=name, lanes=1)) as writer:
            return replay(writer, DeadLetters(of_sql, relay), letters, JournalSource.message)
    finally:
        of_sql.leases.release([name], owner)


@contextmanager
def _held(lease: DrainLease, prefix: str) -> Iterator[DrainLease]:
    """Take the lease, and release it at the end of the block."""
    _check_lease(lease, prefix)
    try:
        yield lease
    finally:
        lease.release()


def _check_lease(lease: DrainLease, prefix: str) -> None:
    if lease.is_ours():
        return
    other = lease.held_by()
    who, ends = ("another process", "") if other is None else (other.owner, f", within {other.seconds_left or 0:.0f} s")
    raise DualWriteError(
        f"The journal of {prefix!r} is being published by {who}.",
        transactional_id=drainer_id(prefix),
        next_step="nothing is to be done while that process runs; if it has died, run this again when its lease has "
        f"ended{ends}",
    )


def _owner() -> str:
    return f"{describe_owner('journal')} {uuid.uuid4().hex[:8]}"
