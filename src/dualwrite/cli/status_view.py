"""The tables of `dualwrite status`."""

from __future__ import annotations

from typing import Any, Final

from dualwrite.cli.jobs import show_jobs
from dualwrite.cli.leases import show_leases, time_left
from dualwrite.cli.options import counted, say
from dualwrite.cli.positions import show_groups
from dualwrite.cli.status_data import StatusData, logical
from dualwrite.cli.tables import show_table
from dualwrite.cli.times import description_words, state_words, time_text
from dualwrite.state import TransactionStatus
from dualwrite.stores.base import StateRow
from dualwrite.transactional_id import LANE_MARK, TransactionalId

_FEW: Final = ("transactional id", "transaction", "used by")
_ALL: Final = (*_FEW, "fencing token", "generation", "resolved", "state", "updated", "Kafka")
_WORDS: Final = {
    TransactionStatus.PREPARE_COMMIT: "being committed",
    TransactionStatus.PREPARE_ABORT: "being aborted",
    TransactionStatus.PREPARE_EPOCH_FENCE: "being aborted",
}


def show_status(found: StatusData, *, wide: bool, everything: bool) -> None:
    """Print the tables.

    Args:
        found: What was read.
        wide: Whether to show all columns and lanes.
        everything: Whether to show also the ids that are resolved and that nobody uses.
    """
    ids = found.by_id
    shown = {name: rows for name, rows in ids.items() if everything or not _is_idle(found, name, rows)}
    rows = [_row(found, row, is_first=row is lanes[0], wide=wide) for lanes in shown.values() for row in lanes]
    if rows := [row for row in rows if row is not None]:
        show_table(_ALL if wide else _FEW, rows)
    if hidden := len(ids) - len(shown):
        say(f"{counted(hidden, 'resolved id')} that nobody uses: see --all.")
    if found.of_other_databases:
        say(f"Open at Kafka with the same ids, from other databases: {', '.join(found.of_other_databases)}.")
    if leases := [lease for name, lease in found.leases.items() if wide or (name not in shown and not lease.has_ended)]:
        show_leases(leases)
    if found.jobs:
        show_jobs(found.jobs)
    if found.positions:
        show_groups(found.positions)


def _is_idle(found: StatusData, name: str, rows: list[StateRow]) -> bool:
    unresolved = any(row.unresolved_generations or row.lost or row in found.elsewhere for row in rows)
    return not unresolved and found.live_lease(name) is None


def _row(found: StatusData, row: StateRow, *, is_first: bool, wide: bool) -> tuple[Any, ...] | None:
    """The cells; None for a lane on which nothing is open, unless all lanes are shown."""
    transactions = _transactions(found, row)
    if not (is_first or wide or transactions):
        return None
    name = row.transactional_id if is_first else f"  {LANE_MARK}{TransactionalId.of_row(row.transactional_id).lane}"
    few = (name, transactions or ("none open" if row.transactional_id in found.seen else None), _user(found, row, is_first))
    if not wide:
        return few
    seen = found.seen.get(row.transactional_id, {})
    kafka = tuple(f"{row.kafka_id(at)}: {description_words(one)}" for at, one in seen.items())
    state, updated = state_words(row.prepared_state), time_text(row.updated_at)
    return (*few, row.fence, row.generation, row.resolved_generation, state, updated, kafka or None)


def _transactions(found: StatusData, row: StateRow) -> tuple[str, ...]:
    """What is open or lost on a lane."""
    lines = [f"{len(row.lost)} lost or unverified"] if row.lost else []
    if row in found.elsewhere:
        lines.append(f"on Kafka cluster {row.cluster_id}")
    for one in found.seen.get(row.transactional_id, {}).values():
        if one is not None and one.status is TransactionStatus.ONGOING:
            lines.append(f"open since {time_text(one.start_time_ms)}")
        elif one is not None and one.status.is_ending:
            lines.append(_WORDS[one.status])
    return tuple(lines)


def _user(found: StatusData, row: StateRow, is_first: bool) -> str | None:
    lease = found.leases.get(logical(row))
    if lease is not None and is_first:
        return f"{lease.owner} ({time_left(lease)})"
    return row.owner if lease is None and row.unresolved_generations else None
