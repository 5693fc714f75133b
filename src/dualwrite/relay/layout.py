"""How a row of an outbox table becomes a message: the table, its columns, and what each is in the message. No I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID

from dualwrite.errors import ConfigurationError, InvalidMessageError
from dualwrite.kafka.base import Message
from dualwrite.kafka.messages import MAX_PARTITION, MAX_TIMESTAMP, TIMESTAMP, as_bytes, check_number, check_topic, header_list

_COLUMN: Final = re.compile(r"\{([^{}]*)\}")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_MAX_KNOWN_TOPICS: Final = 10_000


@dataclass(frozen=True, slots=True)
class OutboxLayout:
    """The table and the columns of an outbox. A column that is None does not exist, and the message does not have that part.

    Args:
        table: The table, `name` or `schema.name`.
        id: The column that identifies a row. It must be unique, and should be the primary key.
        order_by: The column by which rows are published: with integer ids, the id by default; otherwise it must be given.
        topic: The topic: a text in which `{column}` is replaced by a column's value, such as `{topic}` or
            `outbox.event.{aggregatetype}`.
        key: The column with the message's key.
        value: The column with its value; NULL is a tombstone. JSON columns are sent as their text.
        empty_is_tombstone: Whether a value that is empty, or only white space, is a tombstone as well.
        headers: A column with headers: a JSON object, or a JSON list of pairs.
        header_columns: Further headers, each with the column of its value; without those whose column is NULL.
        partition: A column with the partition; NULL means the one that the key determines.
        timestamp: A column with the message's timestamp: a time, in UTC if it has no time zone, or milliseconds since 1970.
            NULL means the time of sending.
        not_before: A column with the time before which a row is not published; NULL means at once.
        created: A column with the time at which the row was inserted, for the age of the oldest row.
        published: If given, rows are not deleted: this column is set to the current time, and those in which it is NULL are
            published.
        where: A condition in SQL; only rows that fulfil it are published.

    Raises:
        ConfigurationError: A column's name is empty, or the topic has no column and is not valid.
    """

    table: str
    id: str = "id"
    order_by: str | None = None
    topic: str = "{topic}"
    key: str | None = "key"
    value: str = "value"
    headers: str | None = None
    header_columns: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    partition: str | None = None
    timestamp: str | None = None
    not_before: str | None = None
    created: str | None = None
    published: str | None = None
    where: str | None = None
    empty_is_tombstone: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.name != "header_columns" and getattr(self, each.name) == "":
                raise ConfigurationError(f"The {each.name} of an outbox's layout is empty.")
        if any(not column for column in (*self.header_columns.values(), *self.topic_columns)):
            raise ConfigurationError("A column of an outbox's layout has an empty name.")
        if not self.topic_columns:
            try:
                check_topic(self.topic)
            except InvalidMessageError as error:
                raise ConfigurationError(error.what) from error

    @property
    def topic_columns(self) -> tuple[str, ...]:
        """The columns in the topic."""
        return tuple(_COLUMN.findall(self.topic))

    @property
    def read_columns(self) -> tuple[str, ...]:
        """The columns that a message is made of, and the id and the order, each once."""
        single = (self.id, self.order_by, self.key, self.value, self.headers, self.partition, self.timestamp)
        named = (*(each for each in single if each is not None), *self.topic_columns, *self.header_columns.values())
        return tuple(dict.fromkeys(named))

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that the table must have."""
        others = (self.not_before, self.created, self.published)
        return tuple(dict.fromkeys((*self.read_columns, *(each for each in others if each is not None))))

    def message(self, row: Mapping[str, Any]) -> Message:
        """The message of a row, by its columns.

        Raises:
            InvalidMessageError: The row is no valid message: for example, the column of the topic is NULL.
        """
        return RowMapper(self)([row[column] for column in self.read_columns])


class RowMapper:
    """Makes messages of rows with the columns `read_columns` of a layout, in this order. Made for many rows."""

    def __init__(self, layout: OutboxLayout) -> None:
        place = {column: index for index, column in enumerate(layout.read_columns)}
        self._layout = layout
        self._topic = layout.topic
        self._topic_places = {column: place[column] for column in layout.topic_columns}
        self._only = place[layout.topic[1:-1]] if _COLUMN.fullmatch(layout.topic) else None
        self._value = place[layout.value]
        self._empty_is_tombstone = layout.empty_is_tombstone
        self._key, self._headers, self._partition, self._timestamp = (
            None if column is None else place[column]
            for column in (layout.key, layout.headers, layout.partition, layout.timestamp)
        )
        self._header_columns = [(name, place[column]) for name, column in layout.header_columns.items()]
        self._known: set[Any] = set()  # topics that are legal

    def __call__(self, row: Sequence[Any]) -> Message:
        """The message of a row.

        Raises:
            InvalidMessageError: It is not valid.
        """
        topic = self._topic_of(row) if self._only is None else row[self._only]
        if type(topic) is not str or topic not in self._known:
            topic = self._checked(topic)
        value = row[self._value]
        if self._empty_is_tombstone and isinstance(value, str | bytes) and not value.strip():
            value = None
        key = None if self._key is None else row[self._key]
        partition = None if self._partition is None else row[self._partition]
        timestamp = None if self._timestamp is None else row[self._timestamp]
        return Message(
            topic,
            value if type(value) is bytes else as_bytes("value", content(value)),
            key if type(key) is bytes else as_bytes("key", content(key)),
            self._headers_of(row) if self._headers is not None or self._header_columns else None,
            None if partition is None else check_number("partition", partition, MAX_PARTITION),
            None if timestamp is None else check_number(TIMESTAMP, _milliseconds(timestamp), MAX_TIMESTAMP),
        )

    def _checked(self, topic: Any) -> str:
        if topic is None:
            raise InvalidMessageError(f"The column {self._topic[1:-1]!r}, which the topic is made of, is NULL.")
        checked = check_topic(_text(topic))
        if checked == topic and len(self._known) < _MAX_KNOWN_TOPICS:
            self._known.add(checked)
        return checked

    def _topic_of(self, row: Sequence[Any]) -> str:
        def text(found: re.Match[str]) -> str:
            value = row[self._topic_places[found[1]]]
            if value is None:
                raise InvalidMessageError(f"The column {found[1]!r}, which the topic is made of, is NULL.")
            return _text(value)

        return _COLUMN.sub(text, self._topic)

    def _headers_of(self, row: Sequence[Any]) -> list[tuple[str, bytes | None]] | None:
        found: list[tuple[str, Any]] = []
        if self._headers is not None and row[self._headers] is not None:
            found += _headers_in(self._layout.headers, row[self._headers])
        found += [(name, content(row[place])) for name, place in self._header_columns if row[place] is not None]
        return header_list(found) if found else None


GENERIC: Final = OutboxLayout(
    "outbox",
    headers="headers",
    partition="partition_number",
    not_before="not_before",
    created="created_at",
)
"""The layout that `dualwrite relay create-table` makes."""

DEBEZIUM: Final = OutboxLayout(
    "outbox",
    topic="outbox.event.{aggregatetype}",
    key="aggregateid",
    value="payload",
    header_columns=MappingProxyType({"id": "id"}),
)
"""The table of Debezium's outbox event router, with the router's defaults."""

LAYOUTS: Final = MappingProxyType({"generic": GENERIC, "debezium": DEBEZIUM})
"""The built-in layouts by their names."""


def content(value: Any) -> bytes | str | None:
    """A column's value as the bytes or the text of a message.

    Raises:
        InvalidMessageError: A value of this type has no obvious text.
    """
    if value is None or isinstance(value, bytes | str):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float | Decimal | UUID):
        return str(value)
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, dict | list):
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    raise InvalidMessageError(f"A value of type {type(value).__name__} can't be sent.", next_step="convert the column in SQL")


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _headers_in(column: str | None, value: Any) -> Iterator[tuple[str, bytes | str | None]]:
    try:
        found = json.loads(value) if isinstance(value, str | bytes | bytearray) else value
        pairs = found.items() if isinstance(found, dict) else [(name, each) for name, each in found or ()]
    except (TypeError, ValueError) as error:
        raise InvalidMessageError(f"The column {column!r} has no JSON object or list of pairs: {str(value)[:60]!r}.") from error
    for name, each in pairs:
        yield name, content(each)


def _milliseconds(value: Any) -> Any:
    if isinstance(value, str):  # SQLite has no type for times
        try:
            value = datetime.fromisoformat(value)
        except ValueError as error:
            raise InvalidMessageError(f"The timestamp {value[:60]!r} is no time in ISO 8601.") from error
    if isinstance(value, datetime):
        return ((value if value.tzinfo is not None else value.replace(tzinfo=UTC)) - _EPOCH) // _MILLISECOND
    return int(value) if isinstance(value, Decimal) else value
