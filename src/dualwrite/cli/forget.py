"""`dualwrite forget`: drop transactional ids that are no longer used; their fences stay."""

from __future__ import annotations

from typing import Annotated

import typer

from dualwrite.cli.options import Url, Yes, ask, settings_for, store_for

app = typer.Typer()


@app.callback(invoke_without_command=True)
def forget(
    *,
    ids: Annotated[list[str], typer.Option("--id", help="A transactional id; repeatable.")],
    url: Url = None,
    yes: Yes = False,
) -> None:
    """Drop transactional ids that are no longer used. Refused while something of one is to be recovered or acknowledged."""
    ask(f"Forget {', '.join(ids)}? A writer that still uses one of them gets FencedError.", yes=yes)
    with store_for(settings_for(url)) as store:
        for transactional_id in dict.fromkeys(ids):
            store.forget(transactional_id)
            typer.echo(f"{transactional_id} is forgotten; its fence stays.")
