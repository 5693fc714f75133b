"""`dualwrite db move-cluster`, `new-store-id`, `keep-store-id`: what has moved, and what is a copy."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from dualwrite.cli.options import (
    Ids,
    Kafka,
    KafkaSettings,
    Prefix,
    Schema,
    Url,
    Yes,
    ask,
    chosen_ids,
    settings_for,
    show_table,
    store_for,
)
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.recovery.clusters import move_to_cluster
from dualwrite.recovery.copies import keep_store_id, new_store_id


def move_cluster(
    *,
    url: Url = None,
    schema: Schema = None,
    kafka: Kafka = None,
    kafka_config: KafkaSettings = None,
    ids: Ids = None,
    prefix: Prefix = "",
    give_up_prepared: Annotated[
        bool,
        typer.Option("--give-up-prepared", help="The old cluster is gone for good: give up what is prepared there."),
    ] = False,
    yes: Yes = False,
) -> None:
    """Have ids speak of the Kafka cluster given here: all ids, those of a prefix, or those named.

    Stop the writers, and run `dualwrite recover` with the old cluster's address first: what is prepared can be committed only
    there. With --give-up-prepared it is recorded as UNVERIFIED instead, and what is open on the old cluster stays open there.
    """
    settings = settings_for(url, kafka, kafka_config, schema)
    limits = settings.timeouts
    with (
        store_for(settings) as store,
        closing(WireTransactionCoordinator(KafkaConfig.of(settings.kafka), timeout=limits.kafka)) as coordinator,
    ):
        chosen = chosen_ids(store, ids, prefix)
        seen = coordinator.cluster_id()
        given_up = " What is prepared on their old cluster is given up." if give_up_prepared else ""
        ask(f"Have {len(chosen)} ids speak of the Kafka cluster {seen!r} from now on?{given_up}", yes=yes)
        moves = move_to_cluster(store, coordinator, chosen, give_up_prepared=give_up_prepared, timeout=limits.claim)
    if not moves:
        typer.echo(f"Every id speaks of cluster {seen} already.")
        return
    show_table(
        ("transactional id", "from cluster", "to cluster", "given up"),
        [
            (one.transactional_id, one.from_cluster_id or "unknown", one.to_cluster_id, one.given_up and one.given_up.state)
            for one in moves
        ],
    )


def new_id(*, url: Url = None, schema: Schema = None, yes: Yes = False) -> None:
    """Make a copied database a store of its own, with other ids at Kafka. Its original keeps what is prepared.

    For a restored backup, dump, template or file whose original is still in use. Stop the writers on the copy first; one that
    is still at work gets FencedError at its next step. Kafka is not asked.
    """
    settings = settings_for(url, schema=schema)
    with store_for(settings) as store:
        ask(f"Make {store.description} a store of its own, and leave what its rows say is prepared to the original?", yes=yes)
        identity, left = new_store_id(store, timeout=settings.timeouts.claim)
        typer.echo(f"{store.description} is the store {identity.store_id} from now on.")
    if left:
        typer.echo("Left to the original database, which settles it, and cleared here:")
        show_table(
            ("transactional id", "prepared", "lost or unverified"),
            [(one.transactional_id, one.prepared, ", ".join(str(entry.state) for entry in one.lost)) for one in left],
        )


def keep_id(*, url: Url = None, schema: Schema = None, yes: Yes = False) -> None:
    """Have a database that has moved go on with its ids at Kafka: it is the original, in another place.

    For one that was put back from a backup in place of the original, was upgraded to a new server, or is a new primary. Never
    for a copy whose original is still in use: the two would end each other's Kafka transactions.
    """
    settings = settings_for(url, schema=schema)
    with store_for(settings) as store:
        ask(f"Is {store.description} the only database in use with this id?", yes=yes)
        identity = keep_store_id(store)
        if identity is None:
            typer.echo(f"{store.description} has no id yet: its first writer makes it.")
        else:
            typer.echo(f"{store.description} goes on as the store {identity.store_id}.")
