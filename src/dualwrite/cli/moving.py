"""`dualwrite db move-cluster`, `new-store-id`, `keep-store-id`: for a moved Kafka cluster, and a copied or moved database."""

from __future__ import annotations

from typing import Annotated

import typer

from dualwrite.cli.options import Database, Ids, Prefix, Target, Yes, chosen_ids, confirm, coordinator_for, grouped, store_for
from dualwrite.cli.output import show_table
from dualwrite.recovery.clusters import keep_store_id, move_to_cluster, new_store_id
from dualwrite.stores.base import TxnStateStore
from dualwrite.texts import counted


@grouped
def move_cluster(
    *,
    target: Target,
    ids: Ids = None,
    prefix: Prefix = "",
    give_up_prepared: Annotated[
        bool,
        typer.Option("--give-up-prepared", help="The old cluster is gone for good: give up its prepared transactions."),
    ] = False,
    yes: Yes = False,
) -> None:
    """Move ids to the Kafka cluster given here: all ids, those with a prefix, or those named.

    First stop the writers, and run `dualwrite recover --republish` with the old cluster's address: prepared transactions can be
    committed, and lost ones published again, only there. With --give-up-prepared the prepared ones are recorded as UNVERIFIED
    instead, and stay open on the old cluster.
    """
    settings = target.settings()
    with store_for(settings) as store, coordinator_for(settings) as coordinator:
        chosen = chosen_ids(store, ids, prefix)
        seen = coordinator.cluster_id()
        given_up = " Transactions prepared on their old cluster are given up." if give_up_prepared else ""
        confirm(f"Move {counted(len(chosen), 'id')} to the Kafka cluster {seen!r}?{given_up}", yes=yes)
        moves = move_to_cluster(store, coordinator, chosen, give_up_prepared=give_up_prepared, timeout=settings.timeouts.claim)
    if not moves:
        typer.echo(f"Every id is already on cluster {seen}.")
        return
    show_table(
        ("transactional id", "from cluster", "to cluster", "given up"),
        [
            (
                one.transactional_id,
                one.from_cluster_id or "unknown",
                one.to_cluster_id,
                one.given_up and one.given_up.state,
            )
            for one in moves
        ],
    )


@grouped
def new_id(*, database: Database, yes: Yes = False) -> None:
    """Give a copied database a store id, and thus Kafka ids, of its own. Prepared transactions stay with the original.

    For a restored backup, dump, template or file whose original is still in use. Stop the writers on the copy first; one that
    is still running gets FencedError at its next step. Does not contact Kafka.
    """
    settings = database.settings()
    with store_for(settings) as store:
        question = f"Give {store.description} a new store id, and leave its prepared transactions to the original?"
        confirm(f"{_how_it_looks(store)} {question}", yes=yes)
        identity, left = new_store_id(store, timeout=settings.timeouts.claim)
        typer.echo(f"{store.description} now has the store id {identity.store_id}.")
    if left:
        typer.echo("Left to the original database, which resolves them, and cleared here:")
        show_table(
            ("transactional id", "prepared", "lost or unverified"),
            [(one.transactional_id, one.prepared, tuple(entry.state for entry in one.lost)) for one in left],
        )


@grouped
def keep_id(*, database: Database, yes: Yes = False) -> None:
    """Let a database that has moved keep its Kafka ids: it is the original, in another place.

    For a database that was restored from a backup in place of the original, was moved to a new server by an upgrade, or has
    become the primary. Never for a copy whose original is still in use: the two would end each other's Kafka transactions.
    """
    settings = database.settings()
    with store_for(settings) as store:
        confirm(f"Is {store.description} the only database in use with this store id?", yes=yes)
        identity = keep_store_id(store)
        if identity is None:
            typer.echo(f"{store.description} has no store id yet: its first writer creates one.")
        else:
            typer.echo(f"{store.description} keeps the store id {identity.store_id}.")


def _how_it_looks(store: TxnStateStore) -> str:
    """Whether the database looks like a copy, for the prompt."""
    identity, found = store.identity(), store.marks()
    if identity is None:
        return "This database has no store id yet."
    if not identity.marks or not found:
        return "Nothing shows whether this database is a copy."
    if found == identity.marks:
        return (
            "This database looks like the original, or is a snapshot of its whole server or disk: its identifying marks are "
            "those of the original. If it is the original, nobody will resolve its prepared transactions."
        )
    if identity.is_elsewhere(found):
        return "This database is a copy or has moved: its identifying marks differ from the original's."
    return "This database was moved, restored or copied: only some of its identifying marks are those of the original."
