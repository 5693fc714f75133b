"""`dualwrite db`: create, migrate and inspect dualwrite's tables; a moved Kafka cluster, a copied or moved database."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from dualwrite.cli.options import Database, Ids, Prefix, Target, Yes, chosen_ids, confirm, coordinator_for, grouped, store_for
from dualwrite.cli.output import show_table
from dualwrite.errors import ConfigurationError
from dualwrite.recovery.clusters import ids_to_move, keep_store_id, move_to_cluster, new_store_id
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.registry import keeps_a_table
from dualwrite.stores.sql.rights import BASIC, OUTBOX
from dualwrite.texts import counted

app = typer.Typer(no_args_is_help=True, help="Create, migrate and inspect dualwrite's tables.")

Url = Annotated[
    str,
    typer.Option(
        "--url",
        envvar="DUALWRITE_DATABASE_URL",
        show_envvar=True,
        help="The database: postgresql+psycopg://user@host/database, mysql+pymysql://user@host/database or "
        "sqlite:////path/to/file.db. RocksDB and ZooKeeper need no migrations.",
    ),
]
Schema = Annotated[
    str | None,
    typer.Option(
        "--schema",
        envvar="DUALWRITE_SCHEMA",
        show_envvar=True,
        help="The schema (MariaDB, MySQL: the database) of the tables; it must exist.",
    ),
]
Revision = Annotated[str, typer.Option("--revision", help="A revision; `head` is the newest.")]


# --- a moved cluster, a copied or moved database ---------------------------------------------------------------------------


@app.command("move-cluster")
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
    """Move ids to the Kafka cluster given here: all ids, those with a prefix, or those named, with all ids of their names.

    First stop the writers, and run `dualwrite recover --republish` with the old cluster's address: prepared transactions can be
    committed, and lost ones published again, only there. With --give-up-prepared the prepared ones are recorded as UNVERIFIED
    instead, and stay open on the old cluster.
    """
    settings = target.settings()
    with store_for(settings) as store, coordinator_for(settings) as coordinator:
        seen = coordinator.cluster_id()
        chosen = ids_to_move(store, chosen_ids(store, ids, prefix), seen)
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


@app.command("new-store-id")
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


@app.command("keep-store-id")
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
    if (doubt := identity.doubt(store.description, found)) is None:
        return (
            "This database looks like the original, or is a snapshot of its whole server or disk: its identifying marks are "
            "those of the original. If it is the original, nobody will resolve its prepared transactions."
        )
    if isinstance(doubt, str):
        return "This database was moved, restored or copied: only some of its identifying marks are those of the original."
    return "This database is a copy or has moved: its identifying marks differ from the original's."


# --- the tables -----------------------------------------------------------------------------------------------------------


@app.command()
def upgrade(url: Url, revision: Revision = "head", schema: Schema = None) -> None:
    """Create the tables, or upgrade them to a newer revision. Does nothing if they are already at this revision."""
    from dualwrite import migration  # noqa: PLC0415  (alembic is slow to import; --help must not wait for it)

    if not keeps_a_table(url):
        typer.echo(_nothing_to_migrate(url))
        return
    before = migration.current(url, schema=schema)
    migration.upgrade(url, revision, schema=schema)
    after = migration.current(url, schema=schema)
    typer.echo(f"Already at revision {after}." if before == after else f"Upgraded from {before or 'nothing'} to {after}.")


@app.command()
def downgrade(
    url: Url,
    revision: Annotated[str, typer.Option("--revision", help="A revision, or `base` to drop the tables.")],
    schema: Schema = None,
    *,
    yes: Yes = False,
) -> None:
    """Downgrade the tables to an older revision. `base` drops them, with every fencing token and every unresolved state."""
    from dualwrite import migration  # noqa: PLC0415  (as above)

    _refuse_without_table(url)
    before = migration.current(url, schema=schema)
    undone = migration.undone_by(url, revision, schema=schema)
    if not undone:
        typer.echo(f"Already at revision {before or 'base'}.")
        return
    if not yes:
        steps = "\n".join(f"  {name}: {dropped}" for name, dropped in undone.items())
        typer.echo(f"This undoes these revisions and drops their data:\n{steps}", err=True)
    confirm("Continue?", yes=yes)
    migration.downgrade(url, revision, schema=schema)
    typer.echo(
        f"Downgraded from {before or 'nothing'} to {migration.current(url, schema=schema) or 'nothing: they are dropped'}."
    )


@app.command()
def current(url: Url, schema: Schema = None) -> None:
    """Show the revision of the tables, and the newest revision of this release."""
    from dualwrite import migration  # noqa: PLC0415  (as above)

    if not keeps_a_table(url):
        typer.echo(_nothing_to_migrate(url))
        return
    typer.echo(f"{migration.current(url, schema=schema) or 'none'} (newest: {migration.newest()})")


@app.command()
def sql(url: Url, revision: Revision = "head", schema: Schema = None) -> None:
    """Print the SQL that creates the tables in an empty database. Does not connect; the URL only gives the database type."""
    from dualwrite import migration  # noqa: PLC0415  (as above)

    _refuse_without_table(url)
    typer.echo(migration.sql(url, revision, schema=schema))


@dataclass(frozen=True, kw_only=True)
class Uses:
    """What the role does besides writing; each is a use in `dualwrite.stores.sql.rights`."""

    journal: Annotated[bool, typer.Option("--journal", help="Writers or pools with a journal.")] = False
    processor: Annotated[bool, typer.Option("--processor", help="Processors with positions in the database.")] = False
    relay: Annotated[bool, typer.Option("--relay", help="Relays of the outbox --table, and replaying dead letters.")] = False
    jobs: Annotated[bool, typer.Option("--jobs", help="Jobs (Spark).")] = False
    recover: Annotated[bool, typer.Option("--recover", help="dualwrite.recover(); of jobs too: with --jobs.")] = False
    forget: Annotated[bool, typer.Option("--forget", help="Forgetting positions of groups, and jobs.")] = False
    operator: Annotated[bool, typer.Option("--operator", help="Only to look: status, stuck, doctor, lists.")] = False


@app.command()
@grouped
def grants(
    *,
    url: Url,
    role: Annotated[str, typer.Option("--role", help="The role, or USER@HOST on MariaDB and MySQL.")],
    uses: Uses,
    table: Annotated[str, typer.Option("--table", help="A relay's outbox; SCHEMA.NAME if needed.")] = OUTBOX,
    schema: Schema = None,
) -> None:
    """Print the GRANT statements that a role needs to open writers and pools, and for what else it does. Does not connect.

    With `--operator` alone the role may only look at everything.
    """
    from dualwrite import migration  # noqa: PLC0415  (as above)

    chosen = [name for name, is_chosen in vars(uses).items() if is_chosen]
    basic = () if chosen == ["operator"] else BASIC
    of_outbox = ["deletes"] if uses.relay else []
    found = (
        migration.grants(url, role, [*basic, *chosen, *of_outbox], schema=schema, outbox=table) if keeps_a_table(url) else []
    )
    for statement in found:
        typer.echo(f"{statement};")
    if not found:
        typer.echo(f"{url.partition('://')[0]}:// has no such privileges: nothing to grant.", err=True)


def _refuse_without_table(url: str) -> None:
    if not keeps_a_table(url):
        raise ConfigurationError(_nothing_to_migrate(url), next_step="use this command only with a SQL database")


def _nothing_to_migrate(url: str) -> str:
    return f"Nothing to migrate for {url.partition('://')[0]}://: its store creates what it needs."
