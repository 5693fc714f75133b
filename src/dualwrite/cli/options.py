"""What several commands share: the options for database and Kafka, and confirmation."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperGroup

from dualwrite.admin.decisions import Decided
from dualwrite.admin.decisions import Decisions as StoredDecisions
from dualwrite.api import open_recoverer
from dualwrite.cli.output import error_json, json_errors, print_error_document, usage_error
from dualwrite.cli.texts import printable
from dualwrite.errors import DualWriteError, shell_word
from dualwrite.recovery.recoverer import ids_with_lanes
from dualwrite.settings import Settings
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.registry import URL_EXAMPLES, store_from_url


def not_empty(context: typer.Context, parameter: typer.CallbackParam, value: str) -> str:
    """Refuse an empty prefix on the command line, perhaps an unset variable of a shell: it would mean everything."""
    source = context.get_parameter_source(str(parameter.name))
    if not value and source is not None and source.name == "COMMANDLINE":
        raise typer.BadParameter("must not be empty; leave the option out for all.")
    return value


Url = Annotated[
    str | None,
    typer.Option("--url", help=f"The database: {URL_EXAMPLES}", show_default="DUALWRITE_DATABASE_URL"),
]
Kafka = Annotated[
    str | None,
    typer.Option("--kafka", metavar="HOST:PORT", help="Bootstrap servers.", show_default="DUALWRITE_KAFKA_BOOTSTRAP_SERVERS"),
]
KafkaSettings = Annotated[
    list[str] | None,
    typer.Option("--kafka-config", metavar="KEY=VALUE", help="A Kafka setting, named as in librdkafka; repeatable."),
]
Schema = Annotated[
    str | None,
    typer.Option("--schema", help="The database schema of dualwrite's tables.", show_default="DUALWRITE_SCHEMA"),
]
Ids = Annotated[list[str] | None, typer.Option("--id", help="A transactional id, with all its lanes; repeatable.")]
Prefix = Annotated[str, typer.Option("--prefix", help="All ids that start with this prefix.", callback=not_empty)]
Yes = Annotated[bool, typer.Option("--yes", help="Don't ask for confirmation.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Wide = Annotated[bool, typer.Option("--wide", help="Show all columns.")]
Longer = Annotated[
    float, typer.Option("--longer-than", metavar="SECONDS", min=0, help="Only transactions that have been open for longer.")
]

LONGER: Final = 10.0
"""The default of `--longer-than`: younger transactions are probably somebody's work."""

USAGE_ERROR: Final = 2


def settings_for(
    url: str | None,
    kafka: str | None = None,
    kafka_settings: Iterable[str] | None = None,
    schema: str | None = None,
) -> Settings:
    """The settings of the environment, overridden by the command line."""
    environment = Settings.from_environment()
    given = dict(environment.kafka)
    if kafka:
        given["bootstrap.servers"] = kafka
    for text in kafka_settings or ():
        name, separator, value = text.partition("=")
        if not separator or not name.strip():
            raise typer.BadParameter(f"{text!r} is not of the form key=value.", param_hint="--kafka-config")
        given[name.strip()] = value.strip()
    return environment.with_changes(database_url=url, kafka=given, schema=schema)


def store_for(settings: Settings) -> TxnStateStore:
    """The store of the database; the caller closes it."""
    if settings.database_url is None:
        refuse("No database is given: use --url, or the environment variable DUALWRITE_DATABASE_URL.")
    return store_from_url(settings.database_url, schema=settings.schema)


def chosen_ids(store: TxnStateStore, ids: list[str] | None, prefix: str) -> list[str]:
    """The requested ids, each once and with its lanes; if none is named, all that start with the prefix."""
    if ids and prefix:
        raise typer.BadParameter("give either ids or a prefix, not both.", param_hint="--prefix")
    return ids_with_lanes(store, ids or None, prefix=prefix)


def say(text: str, *, err: bool = False) -> None:
    """Print a line, also if names in it have characters that are not printable."""
    typer.echo(printable(text), err=err)


def confirm(question: str, *, yes: bool) -> None:
    """Continue only if the user confirms. Without a terminal this is a usage error: it must not count as a yes.

    The question is printed on one line, whatever names are in it.
    """
    if yes:
        return
    question = printable(question)
    if not sys.stdin.isatty():
        refuse(f"{question} Confirming needs a terminal; without one, add --yes.")
    typer.confirm(question, abort=True, err=True)


def counted(number: int, noun: str) -> str:
    """The number with its noun, such as `1 id` or `2 ids`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def refuse(reason: str) -> NoReturn:
    """Exit with a usage error."""
    say(f"Error: {reason}", err=True)
    print_error_document(usage_error(reason))
    raise typer.Exit(USAGE_ERROR)


JSON: Final = "--json"
_USAGE: Final[type[typer.BadParameter]] = next(  # the base class of usage errors, which typer does not export
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError"
)


class JsonGroup(TyperGroup):
    """With `--json`, an error that ends a command is also printed as a document."""

    _as_json = False

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the group's arguments, or all of a command without subcommands."""
        self._as_json = JSON in args
        with json_errors(enabled=self._as_json):
            try:
                return super().make_context(info_name, args, parent, **extra)
            except _USAGE as error:
                print_error_document(usage_error(error.format_message()))
                raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with json_errors(enabled=self._as_json):
            try:
                return super().invoke(ctx)
            except _USAGE as error:
                print_error_document(usage_error(error.format_message()))
                raise
            except typer.Abort:
                print_error_document({"kind": "Aborted", "code": None, "message": "The user did not confirm."})
                raise
            except DualWriteError as error:
                print_error_document(error_json(error))
                raise


_PASSWORD: Final = re.compile(r"(?<=://)([^/?#]*):([^/?#]*)@")
_SECRET: Final = re.compile("password|secret|jaas|private", re.IGNORECASE)
_HIDDEN: Final = "***"


@dataclass(frozen=True)
class GivenOptions:
    """What the user typed; None or empty if it comes from the environment, from which the next command gets it, too."""

    url: str | None = None
    schema: str | None = None
    kafka: str | None = None
    kafka_config: tuple[str, ...] = ()

    def command(self, *words: str) -> str:
        """`dualwrite` with these words and the options. Passwords are hidden."""
        return " ".join(("dualwrite", *map(shell_word, words), *self._options()))

    def _options(self) -> Iterable[str]:
        url = None if self.url is None else _PASSWORD.sub(rf"\1:{_HIDDEN}@", self.url)
        for option, value in (("--url", url), ("--schema", self.schema), ("--kafka", self.kafka)):
            if value is not None:
                yield from (option, shell_word(value))
        for setting in self.kafka_config:
            name, _, _ = setting.partition("=")
            yield from ("--kafka-config", shell_word(f"{name}={_HIDDEN}" if _SECRET.search(name) else setting))

    @property
    def of_kafka(self) -> GivenOptions:
        """Those of Kafka alone, for a command that does not look into a database."""
        return replace(self, url=None, schema=None)


__all__ = ["Decided", "Decisions"]


class Decisions(StoredDecisions):
    """Looks up ids in the database that the settings name. Use it in a `with` statement, which closes the connections.

    Args:
        settings: The database and Kafka.
    """

    def __init__(self, settings: Settings) -> None:
        store = store_for(settings)
        super().__init__(store, open_recoverer(store, settings=settings))
