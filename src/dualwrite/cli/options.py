"""What several commands share: the options for database and Kafka in groups, confirmation, and errors as documents.

Commands that examine a cluster's transactions also accept Apache's command line: `kafka-transactions.sh` has
`--bootstrap-server` before the command's name; here options may be on either side of it.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, Final, NoReturn, get_type_hints

import typer
from typer.core import TyperGroup

from dualwrite.admin import TransactionAdmin
from dualwrite.admin.decisions import Decisions
from dualwrite.cli.output import FOUND, json_errors, print_error_document, say, show_error, usage_error
from dualwrite.errors import ConfigurationError, DualWriteError, RepairRefusedError, TransactionChangedError, shell_word
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.opening import open_recoverer
from dualwrite.recovery.recoverer import ids_with_lanes
from dualwrite.settings import Settings
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.registry import URL_EXAMPLES, store_from_url
from dualwrite.texts import error_text, printable

JSON: Final = "--json"


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

ProbedId = Annotated[
    str | None,
    typer.Option(
        "--id",
        help="Probe Kafka with <id>#probe, so that ACLs on the prefix <id> apply.",
        show_default="DUALWRITE_TRANSACTIONAL_ID",
    ),
]

USAGE_ERROR: Final = 2

_PASSWORD: Final = re.compile(r"(?<=://)([^/?#]*):([^/?#]*)@")
_SECRET: Final = re.compile("password|secret|jaas|private", re.IGNORECASE)
_HIDDEN: Final = "***"


class Given:
    """What the user typed for database and Kafka; None if it comes from the environment, where the next command finds it too.

    A subclass is a dataclass whose fields are the options that its commands have. `grouped` makes a command take them.
    """

    url: str | None = None
    schema: str | None = None
    kafka: str | None = None
    kafka_config: list[str] | None = None

    def settings(self) -> Settings:
        """The settings of the environment, overridden by the options."""
        environment = Settings.from_environment()
        given = dict(environment.kafka)
        if self.kafka:
            given["bootstrap.servers"] = self.kafka
        given |= pairs(self.kafka_config, "--kafka-config")
        return environment.with_changes(database_url=self.url, kafka=given, schema=self.schema)

    def command(self, *words: str, with_database: bool = True) -> str:
        """`dualwrite` with these words and the options, without those of the database if it does not look into one."""
        return " ".join(("dualwrite", *map(shell_word, words), *self._options(with_database=with_database)))

    def _options(self, *, with_database: bool) -> Iterable[str]:
        """The options, without passwords."""
        url = None if self.url is None else _PASSWORD.sub(rf"\1:{_HIDDEN}@", self.url)
        database = (("--url", url), ("--schema", self.schema)) if with_database else ()
        for option, value in (*database, ("--kafka", self.kafka)):
            if value is not None:
                yield from (option, shell_word(value))
        for setting in self.kafka_config or ():
            name, _, _ = setting.partition("=")
            yield from ("--kafka-config", shell_word(f"{name}={_HIDDEN}" if _SECRET.search(name) else setting))


@dataclass(frozen=True, kw_only=True)
class Database(Given):
    """The options of a command that needs only the database."""

    url: Url = None
    schema: Schema = None


@dataclass(frozen=True, kw_only=True)
class Target(Database):
    """The options for database and Kafka."""

    kafka: Kafka = None
    kafka_config: KafkaSettings = None


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of each group in its signature: a parameter whose type is a dataclass is a group."""
    signature = inspect.signature(command, eval_str=True)
    types = {name: each.annotation for name, each in signature.parameters.items()}
    groups: dict[str, Any] = {name: kind for name, kind in types.items() if is_dataclass(kind)}
    options: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        options += _options_of(groups[name]) if name in groups else [parameter]

    @wraps(command)
    def flat(**given: Any) -> None:
        made = {name: group(**{each.name: given.pop(each.name) for each in fields(group)}) for name, group in groups.items()}
        command(**given, **made)

    flat.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]  # typer reads it
    flat.__annotations__ = {each.name: each.annotation for each in options}
    return flat


def _options_of(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if each.default is MISSING else each.default,
            annotation=hints[each.name],
        )
        for each in fields(group)
    ]


def pairs(texts: Iterable[str] | None, option: str) -> dict[str, str]:
    """The settings of an option of the form `key=value`."""
    found = {}
    for text in texts or ():
        name, separator, value = text.partition("=")
        if not separator or not name.strip():
            raise typer.BadParameter(f"{text!r} is not of the form key=value.", param_hint=option)
        found[name.strip()] = value.strip()
    return found


def database_url(settings: Settings) -> str:
    """The database's address; a usage error if none is given."""
    if settings.database_url is None:
        refuse("No database is given: use --url, or the environment variable DUALWRITE_DATABASE_URL.")
    return settings.database_url


def store_for(settings: Settings) -> TxnStateStore:
    """The store of the database; the caller closes it."""
    return store_from_url(database_url(settings), schema=settings.schema)


def coordinator_for(settings: Settings) -> closing[WireTransactionCoordinator]:
    """The cluster's coordinators, in a `with` statement that closes the connections."""
    return closing(WireTransactionCoordinator(KafkaConfig.of(settings.kafka), timeout=settings.timeouts.kafka))


def decisions_for(settings: Settings) -> Decisions:
    """What the database decided about ids; use it in a `with` statement."""
    store = store_for(settings)
    return Decisions(store, open_recoverer(store, settings=settings))


def chosen_ids(store: TxnStateStore, ids: list[str] | None, prefix: str) -> list[str]:
    """The requested ids, each once and with its lanes; if none is named, all that start with the prefix."""
    if ids and prefix:
        raise typer.BadParameter("give either ids or a prefix, not both.", param_hint="--prefix")
    return ids_with_lanes(store, ids or None, prefix=prefix)


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


def refuse(reason: str) -> NoReturn:
    """Exit with a usage error."""
    say(f"Error: {reason}", err=True)
    print_error_document(usage_error(reason))
    raise typer.Exit(USAGE_ERROR)


class JsonGroup(TyperGroup):
    """With `--json`, an error that ends a command is also printed as a document."""

    _as_json = False

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the group's arguments, or all of a command without subcommands."""
        self._as_json = JSON in args
        with json_errors(enabled=self._as_json):
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with json_errors(enabled=self._as_json):
            return super().invoke(ctx)


# --- the commands that examine a cluster's transactions -----------------------------------------------------------------------

TIMEOUT_SECONDS: Final = 30.0
"""Seconds to wait for Kafka."""

BootstrapServers = Annotated[
    str | None,
    typer.Option(
        "--kafka",
        "--bootstrap-server",
        metavar="HOST:PORT",
        help="Bootstrap servers.",
        show_default="DUALWRITE_KAFKA_BOOTSTRAP_SERVERS",
    ),
]
Topic = Annotated[str, typer.Option("--topic", help="The topic.")]
Partition = Annotated[int, typer.Option("--partition", min=0, help="The partition.")]
Partitions = Annotated[list[int] | None, typer.Option("--partition", min=0, help="A partition of the topic; repeatable.")]
Broker = Annotated[
    int | None, typer.Option("--broker", "--broker-id", help="Query this broker about its replicas, instead of the leaders.")
]
WithoutDatabase = Annotated[
    bool,
    typer.Option(
        "--without-database",
        help="Abort it although no database knows it; if a database has committed it, consumers miss its messages.",
    ),
]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait for Kafka.")]


@dataclass(frozen=True, kw_only=True)
class Cluster(Given):
    """The options of a command that queries only Kafka."""

    kafka: BootstrapServers = None
    kafka_config: KafkaSettings = None
    timeout: Timeout = TIMEOUT_SECONDS

    @contextmanager
    def admin(self) -> Iterator[TransactionAdmin]:
        """The admin client. An error ends the command: with exit code 1 if a repair was refused, otherwise with 2."""
        try:
            with TransactionAdmin(settings=self.settings(), timeout=self.timeout) as admin:
                yield admin
        except DualWriteError as error:
            show_error(error)
            refused = isinstance(error, RepairRefusedError | TransactionChangedError)
            raise typer.Exit(FOUND if refused else USAGE_ERROR) from error


@dataclass(frozen=True, kw_only=True)
class ClusterAndDatabase(Cluster, Database):
    """The options of a command that also looks into a database, if one is given."""


class ToolGroup(JsonGroup):
    """An invalid setting gives exit code 2, and Apache's order of the arguments is accepted."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the group's arguments, or all of a command without subcommands."""
        options = [option for each in self.commands.values() for option in each.params]
        flags = {name for option in options if getattr(option, "is_flag", False) for name in option.opts}
        arguments = in_our_order(args, self.commands, flags) if self.commands else args
        return super().make_context(info_name, arguments, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except DualWriteError as error:
            typer.echo(error_text(error), err=True)
            raise typer.Exit(USAGE_ERROR if isinstance(error, ConfigurationError) else FOUND) from error


def in_our_order(args: list[str], commands: Collection[str], flags: Collection[str] = (JSON,)) -> list[str]:
    """The arguments after the group's name, with the command's name first; `flags` are the options without a value."""
    at = 0
    while at < len(args) and args[at].startswith("-"):
        if args[at] in ("--help", "--"):
            return args
        at += 1 if "=" in args[at] or args[at] in flags else 2
    if at >= len(args) or args[at] not in commands:
        return args
    return [args[at], *args[:at], *args[at + 1 :]]
