"""Whether an operator may end a transaction: never against what a database has decided. Pure functions.

An id in dualwrite's form needs its database. One that was given is always asked, and its answer always applies; the option
`without_database` is for what it can't say: it does not know the id or the generation, or it is out of reach.
"""

from __future__ import annotations

from typing import Final

from dualwrite.admin.aborting import Examined
from dualwrite.admin.decisions import OTHER_DATABASE, Decided
from dualwrite.errors import DualWriteError, RepairRefusedError
from dualwrite.kafka.admin.facts import DescribedTransaction
from dualwrite.recovery.decision import Decision
from dualwrite.shell import shell_word
from dualwrite.state import TransactionStatus
from dualwrite.stores.base import StateRow
from dualwrite.transactional_id import TransactionalId

_WAIVE: Final = "add --without-database"


def is_made_by_dualwrite(transactional_id: str) -> bool:
    """Whether an id, as Kafka sees it, has the form of a dualwrite writer's.

    The first generation of a release before revision 0005 had the user's id alone, which can't be distinguished from other ids.
    """
    named = TransactionalId.of_kafka(transactional_id)
    return named is not None and bool(named.store_id or named.generation)


def is_open(one: DescribedTransaction) -> bool:
    """Whether the coordinator has a transaction open on the id that it has not begun to end."""
    return one.description is not None and one.description.status is TransactionStatus.ONGOING


def refusal_to_terminate(
    one: DescribedTransaction, found: Decided | None, *, without_database: bool = False
) -> DualWriteError | None:
    """Why an open transaction is not aborted; None if it may be.

    With a plan in `found` it may be aborted by `Decisions.carry_out` only, which claims the row; without one by
    `TransactionAdmin.force_terminate`.

    Args:
        one: What its coordinator says.
        found: What the database says; None if none was given.
        without_database: Whether it is aborted although no database knows it.
    """
    if found is not None and found.plan is not None:
        return _refusal_of_plan(one, found)
    if found is not None and found.error is not None and not (without_database and found.is_out_of_reach):
        return found.error
    if found is not None and found.row is not None and not is_open(one):
        return one.problem  # nothing to do, if it is known
    return None if without_database else _undecided(one.transactional_id, found)


def refusal_to_complete(one: DescribedTransaction, found: Decided) -> DualWriteError | None:
    """Why an id is not recovered as its database decided; None if it may be, or nothing is open on it.

    Args:
        one: What its coordinator says.
        found: What the database says.
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
        else f"give the database that decides about it; or {_forced(one.transactional_id)}",
    )


def refusal_to_abort(
    examined: Examined, found: Decided | None, committed: StateRow | None, *, without_database: bool = False
) -> DualWriteError | None:
    """Why a hanging transaction is not aborted in its partition, as far as a database decides; see `Examined.refusal` too.

    Args:
        examined: The transaction.
        found: What the database says about its transactional id; None if none was given, or the id is not known.
        committed: The row that names the transaction (`Decisions.committed`); None if there is none.
        without_database: Whether it is aborted although no database knows it.
    """
    if committed is not None:
        return _committed(committed, f"the transaction at {examined.opened.topic}-{examined.opened.partition}")
    if found is not None and found.error is not None and not (without_database and found.is_out_of_reach):
        return found.error
    name = examined.name_at_kafka
    is_known = found is not None and found.row is not None and (found.generation or 0) <= found.row.generation
    return None if name is None or without_database or is_known else _undecided(name, found)


def refusal_of_committed(row: StateRow | None) -> RepairRefusedError | None:
    """Why a transaction is not aborted that a row names, as prepared, lost or unverified; None if there is no such row."""
    return None if row is None else _committed(row, "the transaction")


def _refusal_of_plan(one: DescribedTransaction, found: Decided) -> RepairRefusedError | None:
    assert found.plan is not None
    if found.plan.state is None or found.plan.decision in (Decision.ABORT, Decision.ALREADY_COMMITTED):
        return None  # of the transaction of the row nothing is open: what is open is another one
    name = shell_word(found.plan.transactional_id)
    return RepairRefusedError(
        f"It is not aborted: {found.why}.",
        transactional_id=one.transactional_id,
        next_step=f"run `dualwrite recover --id {name}`, or `dualwrite transactions complete {name}`",
    )


def _committed(row: StateRow, what: str) -> RepairRefusedError:
    return RepairRefusedError(
        f"The database has committed {what}.",
        transactional_id=row.transactional_id,
        cause="its row names the transaction, as prepared, lost or unverified",
        next_step=f"resolve it with `dualwrite recover --id {shell_word(row.transactional_id)}`; "
        "read its records before you abort them",
    )


def _undecided(transactional_id: str, found: Decided | None) -> RepairRefusedError | None:
    """Why nothing is done without the word of a database, if one must decide."""
    if found is not None and found.row is not None:
        return _unknown_generation(transactional_id, found, _WAIVE)
    if found is not None and found.why == OTHER_DATABASE:
        return _other_database(transactional_id, _WAIVE)
    if not is_made_by_dualwrite(transactional_id):
        return None
    asked = "its database has not been asked" if found is None else "the database that was asked does not know it"
    return RepairRefusedError(
        f"A dualwrite writer has made this id, and {asked}.",
        transactional_id=transactional_id,
        next_step=f"give the database with --url; if that is gone for good, {_WAIVE}",
    )


def _unknown_generation(transactional_id: str, found: Decided, waived: str) -> RepairRefusedError:
    assert found.row is not None
    knows = "does not know" if (found.generation or 0) > found.row.generation else "has resolved"
    return RepairRefusedError(
        f"A transaction is open on the id, and the database {knows} generation {found.generation} of it "
        f"(newest: {found.row.generation}), so it can't say whether that was committed.",
        transactional_id=transactional_id,
        cause="the database was restored from a backup, or is a copy or a replica that lags; or another program uses the id",
        next_step=f"ask the database in use with --url; if this is that one and no writer uses the id, {waived}",
    )


def _other_database(transactional_id: str, waived: str) -> RepairRefusedError:
    return RepairRefusedError(
        "The id of this name belongs to another database, which decides about it.",
        transactional_id=transactional_id,
        next_step=f"give the other database with --url; if that is gone for good, {waived}",
    )


def _forced(transactional_id: str) -> str:
    flag = " --without-database" if is_made_by_dualwrite(transactional_id) else ""
    return f"abort it with `dualwrite transactions force-terminate {shell_word(transactional_id)}{flag}`"
