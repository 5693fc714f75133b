"""The options of `dualwrite relay`: which outbox, how its columns are mapped, and the relay that they describe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, Final

import typer

from dualwrite.cli.options import Target, pairs, store_for
from dualwrite.outbox.dead_letters import DeadLetters
from dualwrite.outbox.drain import sql_store
from dualwrite.outbox.layout import LAYOUTS, OutboxLayout
from dualwrite.relay import Relay, RelayOptions

_COLUMNS: Final = ("key", "headers", "partition", "timestamp", "not_before", "created", "published", "order_by", "where")
"""Parts of a layout that an empty text removes."""

Name = Annotated[
    str | None, typer.Option("--name", help="The name of the relays that share the outbox.", show_default="relay.TABLE")
]
Table = Annotated[str | None, typer.Option("--table", help="The outbox table; SCHEMA.NAME if needed.", show_default="outbox")]


def _column(option: str, text: str) -> Any:
    return typer.Option(option, metavar="COLUMN", help=text, show_default="as in the layout")


@dataclass(frozen=True, kw_only=True)
class Outbox(Target):
    """The options that say which outbox is meant, and what its columns are in a message."""

    name: Name = None
    layout: Annotated[str, typer.Option("--layout", help=f"The layout to begin with: {', '.join(LAYOUTS)}.")] = "generic"
    table: Table = None
    id: Annotated[str | None, _column("--id-column", "Identifies a row.")] = None
    order_by: Annotated[str | None, _column("--order-by", "Rows are published in its order; by default the id's.")] = None
    topic: Annotated[
        str | None,
        typer.Option("--topic", help="The topic; {column} in it is a column's value.", show_default="as in the layout"),
    ] = None
    key: Annotated[str | None, _column("--key", "The message's key.")] = None
    value: Annotated[str | None, _column("--value", "The message's value.")] = None
    empty_is_tombstone: Annotated[
        bool, typer.Option("--empty-is-tombstone", help="An empty value is a tombstone, as NULL is.")
    ] = False
    headers: Annotated[str | None, _column("--headers", "Headers as a JSON object.")] = None
    header: Annotated[
        list[str] | None,
        typer.Option(
            "--header",
            metavar="NAME=COLUMN",
            help="A header with a column's value, beside those of the layout; repeatable. Without a column: no such header.",
        ),
    ] = None
    partition: Annotated[str | None, _column("--partition", "The partition.")] = None
    timestamp: Annotated[str | None, _column("--timestamp", "The message's timestamp.")] = None
    not_before: Annotated[str | None, _column("--not-before", "The time before which a row is not published.")] = None
    created: Annotated[str | None, _column("--created", "When the row was inserted, for the age of the oldest.")] = None
    published: Annotated[
        str | None, _column("--published", "Set this column to the current time, instead of deleting the row.")
    ] = None
    where: Annotated[str | None, typer.Option("--where", metavar="SQL", help="Only rows that fulfil this condition.")] = None

    def chosen(self) -> OutboxLayout:
        """The layout, changed by the options. An empty column means that there is none."""
        if self.layout not in LAYOUTS:
            raise typer.BadParameter(f"{self.layout!r} is not one of {', '.join(LAYOUTS)}.", param_hint="--layout")
        changes: dict[str, Any] = {}
        for name in ("table", "id", "topic", "value", *_COLUMNS):
            given = getattr(self, name)
            if given is not None:
                changes[name] = None if not given and name in _COLUMNS else given
        if self.header is not None:
            headers = {**LAYOUTS[self.layout].header_columns, **pairs(self.header, "--header")}
            changes["header_columns"] = MappingProxyType({name: column for name, column in headers.items() if column})
        return replace(LAYOUTS[self.layout], empty_is_tombstone=self.empty_is_tombstone, **changes)

    @contextmanager
    def dead_letters(self) -> Iterator[DeadLetters]:
        """The dead letters, without a look at the outbox: a journal has none."""
        with store_for(self.settings()) as store:
            letters = DeadLetters(sql_store(store), self.name or f"relay.{self.chosen().table}")
            letters.check()
            yield letters

    def relay(self, **options: Any) -> Relay:
        """The relay, with further options of `RelayOptions`; the caller closes it."""
        settings = self.settings()
        chosen = RelayOptions(layout=self.chosen(), **options)
        return Relay(settings=settings, name=self.name, options=chosen)
