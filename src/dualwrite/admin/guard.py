"""Decides whether an operator may end a transaction: never against what a database has decided. No I/O.

An id in dualwrite's form needs its database. A given database is always queried, and its decision always applies. The option
`without_database` is for cases in which no database can decide: it does not know the id or the generation, or is unreachable.
"""

from __future__ import annotations

from typing import Final

from dualwrite.admin.aborting import Examined
from dualwrite.admin.decisions import OTHER_DATABASE, Decided, has_committed
from dualwrite.errors import DualWriteError, RepairRefusedError
from dualwrite.kafka.admin.facts import DescribedTransaction
from dualwrite.recovery.decision import Decision
from dualwrite.shell import shell_word
from dualwrite.state import TransactionStatus
from dualwrite.stores.base import StateRow
from dualwrite.transactional_id import TransactionalId

_WAIVE: Final = "add --without-database"


def is_made_by_dualwrite(transactional_id: str) -> bool:
    """Whether an id, as Kafka sees it, has the form of a dualwrite writer's id."""
    return TransactionalId.of_kafka(transactional_id) is not None


def is_open(one: DescribedTransaction) -> bool:
    """Whether the id has an open transaction that its coordinator has not begun to end."""
    return one.description is not None and one.description.status is TransactionStatus.ONGOING


def refusal_to_terminate(
    one: DescribedTransaction, found: Decided | None, *, without_database: bool = False
) -> DualWriteError | None:
    """The error if an open transaction must not be aborted; None if it may be aborted.

    If `found` has a plan, it may be aborted only by `Decisions.carry_out`, which claims the row; otherwise by
    `TransactionAdmin.force_terminate`.

    Args:
        one: The coordinator's description.
        found: What the database knows; None if no database was given.
        without_database: Whether it may be aborted although no database knows it.
    """
    if found is not None and found.plan is not None:
        return _refusal_of_plan(one, found)
    if found is not None and found.error is not None and not (without_database and found.is_out_of_reach):
        return found.error
    if found is not None and found.row is not None and not is_open(one):
        return one.problem  # if there is none, there is nothing to do
    if (row := _row_with(one, found)) is not None:  # without a plan: the database was lost since the row was read
        return refusal_of_committed(row)
    return None if without_database else _undecided(one.transactional_id, found)


def refusal_to_complete(one: DescribedTransaction, found: Decided) -> DualWriteError | None:
    """The error if an id can't be recovered as its database decided; None if it can, or if it has no open transaction.

    Args:
        one: The coordinator's description.
        found: What the database knows.
    """
    if found.error is not None:
        return found.error
    if found.row is not None and (found.plan is not None or not is_open(one)):
        return None if found.plan is not None else one.problem
    if found.row is not None:
        return _unknown_generation(one.transactional_id, found, _forced(one.transactional_id))
    if found.why == OTHER_DATABASE:
        return _other_database(one.transactional_id, _forced(one.transactional_id))
    return RepairRefusedError(
        "The database has no such id, so it decided nothing about it.",
        transactional_id=one.transactional_id,
        next_step="`dualwrite status` lists the ids of the database, `dualwrite transactions list` those of the cluster"
        if one.is_unknown
        else f"give the id's own database; or {_forced(one.transactional_id)}",
    )


def refusal_to_abort(
    examined: Examined, found: Decided | None, committed: StateRow | None, *, without_database: bool = False
) -> DualWriteError | None:
    """The error if a database forbids aborting a hanging transaction in its partition; None if not. See `Examined.refusal` too.

    Args:
        examined: The transaction.
        found: What the database knows about its transactional id; None if no database was given, or the id is not known.
        committed: The row that names the transaction (`Decisions.committed`); None if there is no such row.
        without_database: Whether it may be aborted although no database knows it.
    """
    if committed is not None:
        return _committed(committed, f"the transaction at {examined.opened.topic}-{examined.opened.partition}")
    if found is not None and found.error is not None and not (without_database and found.is_out_of_reach):
        return found.error
    name = examined.name_at_kafka
    is_known = found is not None and found.row is not None and (found.generation or 0) <= found.row.generation
    return None if name is None or without_database or is_known else _undecided(name, found)


def refusal_of_committed(row: StateRow | None) -> RepairRefusedError | None:
    """The error if a row names the transaction as prepared, lost or unverified; None if there is no such row."""
    return None if row is None else _committed(row, "the transaction")


def _row_with(one: DescribedTransaction, found: Decided | None) -> StateRow | None:
    """The id's row, if it was read and names the described transaction."""
    row, described = None if found is None else found.row, one.description
    is_named = row is not None and described is not None and has_committed(row, described.producer_id, described.epoch)
    return row if is_named else None


def _refusal_of_plan(one: DescribedTransaction, found: Decided) -> RepairRefusedError | None:
    assert found.plan is not None
    if found.plan.state is None or found.plan.decision in (Decision.ABORT, Decision.ALREADY_COMMITTED):
        return None  # the row's own transaction is not open: the open one is a different transaction
    name = shell_word(found.plan.transactional_id)
    return RepairRefusedError(
        f"The transaction is not aborted: {found.why}.",
        transactional_id=one.transactional_id,
        next_step=f"run `dualwrite recover --id {name}`, or `dualwrite transactions complete {name}`",
    )


def _committed(row: StateRow, what: str) -> RepairRefusedError:
    return RepairRefusedError(
        f"The database has committed {what}.",
        transactional_id=row.transactional_id,
        cause="its row names the transaction, as prepared, lost or unverified",
        next_step=f"resolve it with `dualwrite recover --id {shell_word(row.transactional_id)}`; "
        "if you still have to abort it, read its records first",
    )


def _undecided(transactional_id: str, found: Decided | None) -> RepairRefusedError | None:
    """The error if a database must decide about the id, and has not decided; None if no database has to."""
    if found is not None and found.row is not None:
        return _unknown_generation(transactional_id, found, _WAIVE)
    if found is not None and found.why == OTHER_DATABASE:
        return _other_database(transactional_id, _WAIVE)
    if not is_made_by_dualwrite(transactional_id):
        return None
    state = "its database was not given" if found is None else "the given database does not know it"
    return RepairRefusedError(
        f"This id belongs to a dualwrite writer, and {state}.",
        transactional_id=transactional_id,
        next_step=f"give its database with --url; if that is gone for good, {_WAIVE}",
    )


def _unknown_generation(transactional_id: str, found: Decided, waived: str) -> RepairRefusedError:
    assert found.row is not None
    knows = "does not know" if (found.generation or 0) > found.row.generation else "has resolved"
    return RepairRefusedError(
        f"The id has an open transaction, and the database {knows} generation {found.generation} of it "
        f"(newest: {found.row.generation}), so it is not known whether the transaction was committed.",
        transactional_id=transactional_id,
        cause="the database was restored from a backup, or is a copy or a lagging replica; or another program uses the id",
        next_step=f"give the database that the writers use with --url; if this is it, and no writer uses the id, {waived}",
    )


def _other_database(transactional_id: str, waived: str) -> RepairRefusedError:
    return RepairRefusedError(
        "This id belongs to another database, which decides about it.",
        transactional_id=transactional_id,
        next_step=f"give the other database with --url; if that is gone for good, {waived}",
    )


def _forced(transactional_id: str) -> str:
    flag = " --without-database" if is_made_by_dualwrite(transactional_id) else ""
    return f"abort it with `dualwrite transactions force-terminate {shell_word(transactional_id)}{flag}`"
