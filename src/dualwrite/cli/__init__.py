"""The command `dualwrite`: finds the command's module, runs it, and turns errors into messages and exit codes.

To add a command, write `dualwrite/cli/<name>.py` with a `typer.Typer` called `app`, and name it in `COMMANDS`. A command
without subcommands is the callback of its app, with `invoke_without_command=True`. Only the module of the command that is
run is imported, so that a missing extra of one command does not break the others.

Exit codes: 0 success, 1 a `DualWriteError`, 2 usage error, 130 interrupted.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dualwrite.errors import DualWriteError, MissingDependencyError
from dualwrite.kafka.native import is_compiled
from dualwrite.texts import error_text

if TYPE_CHECKING:
    import typer

COMMANDS = {
    "dev": "Run a local Kafka cluster, without Docker or an installed Java.",
    "db": "Create, migrate and inspect dualwrite's tables.",
    "recover": "Resolve the in-doubt transactions of crashed writers.",
    "status": "Show the transactional ids, and their state at Kafka.",
    "transactions": "List, describe, examine and end the transactions of a Kafka cluster.",
    "stuck": "Show which open transactions hold consumers back, and where.",
    "metrics": "Serve metrics of the database and of Kafka for Prometheus.",
    "console": "Serve a page that shows what waits and for whom, and what to do about it.",
    "journal": "Show, publish and export what was written while Kafka was down.",
    "relay": "Publish the rows of an outbox table, each once.",
    "dead-letters": "List, show and replay the messages that processors could not process.",
    "offsets": "Show and move the positions of consumer groups in the database.",
    "doctor": "Report which guarantee a cluster and a database give, what weakens it, and how to improve it.",
    "forget": "Remove transactional ids that are no longer used.",
    "demo": "Write real flights atomically to a database and Kafka, with workers that are killed.",
}
"""Name of the command (and of its module here) to its one-line help."""

_EXTRAS = {"dev": "dev", "demo": "demo", "metrics": "cli,prometheus", "console": "console"}
"""The extra of pyproject.toml that a command needs, if it is not `cli`."""

_COMPLETION_VARIABLE = "_DUALWRITE_COMPLETE"

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. This is the console script's entry point.

    Args:
        argv: Arguments after the program's name; None means those of the process.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        _app(arguments)(args=arguments, prog_name="dualwrite")
    except SystemExit as end:  # how typer exits; a usage error has code 2
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except DualWriteError as error:
        print(error_text(error), file=sys.stderr)  # noqa: T201  (a command's error goes to its terminal)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except RuntimeError as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # while importing: Python 3.11 wraps what __set_name__ raises
            return _INTERRUPTED
        raise
    return 0


def _app(arguments: Sequence[str]) -> typer.Typer:
    try:
        import typer  # noqa: PLC0415  (optional: the library works without the command line)
    except ImportError as error:
        raise _missing("The command line", "cli", error) from error

    app = typer.Typer(
        help="Write to a database and to Kafka atomically.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",  # docstrings are folded to the width of the terminal
    )

    def show_version(requested: bool) -> None:
        if requested:
            form = " (native producer: compiled)" if is_compiled() else ""
            typer.echo(f"dualwrite {importlib.metadata.version('dualwrite')}{form}")
            raise typer.Exit

    @app.callback()
    def root(
        *,
        version: bool = typer.Option(False, "--version", help="Show the version.", callback=show_version, is_eager=True),
    ) -> None:
        """Write to a database and to Kafka atomically."""

    if "--help" in arguments:
        from dualwrite.cli.output import fold_long_words  # noqa: PLC0415  (optional, as typer is)

        fold_long_words()
    called = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, text in COMMANDS.items():
        wanted = name == called or _COMPLETION_VARIABLE in os.environ
        command = _load(name) if wanted else typer.Typer()
        if name == called and command.registered_callback is not None:
            app.add_typer(command, name=name, subcommand_metavar="")  # its help is its function's docstring, which is longer
        else:
            app.add_typer(command, name=name, help=text)
    return app


def _load(name: str) -> typer.Typer:
    try:
        module = importlib.import_module(f"dualwrite.cli.{name.replace('-', '_')}")
    except ImportError as error:
        raise _missing(f"The command `dualwrite {name}`", _EXTRAS.get(name, "cli"), error) from error
    app: typer.Typer = module.app
    return app


def _missing(what: str, extra: str, error: ImportError) -> MissingDependencyError:
    return MissingDependencyError(
        f"{what} needs a package that is not installed.", cause=str(error), next_step=f'pip install "dualwrite[{extra}]"'
    )
