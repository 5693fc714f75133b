"""`dualwrite forget`: remove transactional ids that are no longer used, with their lanes; their fencing tokens are kept."""

from __future__ import annotations

from typing import Annotated

import typer

from dualwrite.cli.options import Database, Yes, confirm, grouped, store_for
from dualwrite.cli.output import say
from dualwrite.recovery import recoverer

app = typer.Typer()


@app.callback(invoke_without_command=True)
@grouped
def forget(
    *,
    ids: Annotated[list[str], typer.Option("--id", help="A transactional id, with all its lanes; repeatable.")],
    database: Database,
    yes: Yes = False,
) -> None:
    """Remove transactional ids that are no longer used. Refuses ids with a transaction to recover or to acknowledge."""
    confirm(f"Forget {', '.join(ids)}? A writer that still uses one of them gets FencedError.", yes=yes)
    with store_for(database.settings()) as store:
        for transactional_id in dict.fromkeys(ids):
            dropped = recoverer.forget(store, transactional_id)
            if len(dropped) == 1:
                say(f"{transactional_id} is forgotten; its fencing token is kept.")
            else:
                say(f"{transactional_id} is forgotten with its {len(dropped)} lanes; their fencing tokens are kept.")
