"""`dualwrite console`: a page in the browser with what waits and for whom, and what an operator does about it.

Exit codes: 0 the user quit, 1 a `DualWriteError`, 2 usage error, or the port is in use.
"""

from __future__ import annotations

import socket
from contextlib import closing, suppress
from ipaddress import ip_address
from typing import Annotated, Final

import typer
import uvicorn
from starlette.types import Receive, Scope, Send

from dualwrite.cli.options import JsonGroup, ProbedId, Target, grouped, refuse
from dualwrite.cli.output import say
from dualwrite.console import Role, TokenAccess
from dualwrite.console import console as made_console

_LOOPBACK: Final = "127.0.0.1"
_PORT: Final = 8765

app = typer.Typer(cls=JsonGroup)


@app.callback(invoke_without_command=True)
@grouped
def console(
    *,
    target: Target,
    transactional_id: ProbedId = None,
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = _LOOPBACK,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="The port to listen on; 0 for a free one.")] = _PORT,
    read_only: Annotated[bool, typer.Option("--read-only", help="Show everything, but offer no actions.")] = False,
    dead_letter_topics: Annotated[
        list[str] | None,
        typer.Option("--dead-letter-topic", metavar="TOPIC", help="A dead-letter topic of processors; repeatable."),
    ] = None,
    topics: Annotated[list[str] | None, typer.Option("--topic", help="A topic that the doctor checks; repeatable.")] = None,
    root_path: Annotated[
        str, typer.Option("--root-path", metavar="PATH", help="The path at which a proxy serves the page.", show_default="none")
    ] = "",
    origins: Annotated[
        list[str] | None,
        typer.Option("--origin", metavar="ORIGIN", help="The origin of a proxy that changes the header Host; repeatable."),
    ] = None,
) -> None:
    """Serve a page that shows whether all is well, and what waits and for whom: ids, stuck partitions, journals, dead letters.

    It also shows consumer positions, jobs, rates, what waited over the last hour, and the doctor's report.

    It prints an address with a token; whoever opens it may recover ids, publish again, acknowledge, and replay dead letters,
    unless `--read-only` is given. Each action is logged. The page works while the database or Kafka does not answer, and says
    so. Other machines can reach it only with `--host`; there is no TLS, so put a proxy in front of it then.
    """
    access = TokenAccess(Role.VIEWER if read_only else Role.OPERATOR)
    made = made_console(
        settings=target.settings().with_changes(transactional_id=transactional_id),
        authorize=access,
        dead_letter_topics=dead_letter_topics or (),
        topics=topics or (),
        origins=origins or (),
    )
    root = f"/{root_path.strip('/')}".rstrip("/")

    async def placed(scope: Scope, receive: Receive, send: Send) -> None:
        await made({**scope, "root_path": root}, receive, send)

    with closing(made):
        try:
            listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            refuse(f"The console can't listen on {host}:{port}: {error.strerror or error}.")
        with listening:
            shown = f"[{host}]" if ":" in host else host
            say(f"The console: http://{shown}:{listening.getsockname()[1]}{root}/?token={access.token}")
            if not _is_loopback(host):
                say("Other machines can reach it, without encryption: put a proxy with TLS in front of it.", err=True)
            config = uvicorn.Config(placed, log_level="warning", access_log=False, lifespan="off")
            with suppress(KeyboardInterrupt):
                uvicorn.Server(config).run(sockets=[listening])


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
