"""`dualwrite db`: create, migrate and inspect the table `kafka_transaction_state`."""

from __future__ import annotations

from typing import Annotated

import typer

from dualwrite.cli.moving import keep_id, move_cluster, new_id
from dualwrite.cli.options import Yes, confirm
from dualwrite.errors import ConfigurationError
from dualwrite.stores.registry import keeps_a_table

app = typer.Typer(no_args_is_help=True, help="Create, migrate and inspect the table kafka_transaction_state.")
app.command("move-cluster")(move_cluster)
app.command("new-store-id")(new_id)
app.command("keep-store-id")(keep_id)

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


@app.command()
def upgrade(url: Url, revision: Revision = "head", schema: Schema = None) -> None:
    """Create the table, or upgrade it to a newer revision. Does nothing if the table is already at this revision."""
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
    revision: Annotated[str, typer.Option("--revision", help="A revision, or `base` to drop the table.")],
    schema: Schema = None,
    *,
    yes: Yes = False,
) -> None:
    """Downgrade the table to an older revision. `base` drops it, with every fencing token and every unresolved state."""
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
        f"Downgraded from {before or 'nothing'} to {migration.current(url, schema=schema) or 'nothing: the table is dropped'}."
    )


@app.command()
def current(url: Url, schema: Schema = None) -> None:
    """Show the revision of the table, and the newest revision of this release."""
    from dualwrite import migration  # noqa: PLC0415  (as above)

    if not keeps_a_table(url):
        typer.echo(_nothing_to_migrate(url))
        return
    typer.echo(f"{migration.current(url, schema=schema) or 'none'} (newest: {migration.newest()})")


@app.command()
def sql(url: Url, revision: Revision = "head", schema: Schema = None) -> None:
    """Print the SQL that creates the table in an empty database. Does not connect; the URL only gives the database type."""
    from dualwrite import migration  # noqa: PLC0415  (as above)

    _refuse_without_table(url)
    typer.echo(migration.sql(url, revision, schema=schema))


def _refuse_without_table(url: str) -> None:
    if not keeps_a_table(url):
        raise ConfigurationError(_nothing_to_migrate(url), next_step="use this command only with a SQL database")


def _nothing_to_migrate(url: str) -> str:
    return f"Nothing to migrate for {url.partition('://')[0]}://: its store creates what it needs."
