"""Validation of messages: types and ranges of topic, key, value, headers, partition and timestamp, before anything is sent.

What users gave is `Any` until it is checked: compiled code raises TypeError for a wrong type.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, Final

from dualwrite.errors import InvalidMessageError
from dualwrite.kafka.base import GivenMessage, Headers, Message
from dualwrite.state import MAX_TOPIC_LENGTH

MAX_PARTITION: Final = 2**31 - 1
MAX_TIMESTAMP: Final = 2**63 - 1
TIMESTAMP: Final = "timestamp (ms since 1970)"

_MISSING: Final[Any] = object()
_TOPIC: Final = re.compile(r"[a-zA-Z0-9._-]+", re.ASCII)


def checked(message: GivenMessage) -> Message:
    """The message with bytes, once its parts have been checked.

    Raises:
        InvalidMessageError: A part has a wrong type or is out of range.
    """
    if type(message) is Message:
        return message
    topic, value, key, headers, partition, timestamp = message
    return Message(
        check_topic(topic),
        as_bytes("value", value),
        as_bytes("key", key),
        header_list(headers),
        None if partition is None else check_number("partition", partition, MAX_PARTITION),
        None if timestamp is None else check_number(TIMESTAMP, timestamp, MAX_TIMESTAMP),
    )


def check_topic(topic: Any) -> str:
    """Return the topic if it is a legal topic name: 1 to 249 of a-z, A-Z, 0-9, '.', '_', '-'; not '.' or '..'.

    Raises:
        InvalidMessageError: It is not a str, or not a legal name.
    """
    if not isinstance(topic, str):
        raise InvalidMessageError(f"A topic must be a str, not {type(topic).__name__}: {topic!r}.")
    if not _TOPIC.fullmatch(topic) or len(topic) > MAX_TOPIC_LENGTH or topic in (".", ".."):
        raise InvalidMessageError(
            f"Invalid topic name {topic[:60]!r}: 1 to {MAX_TOPIC_LENGTH} of a-z, A-Z, 0-9, '.', '_' and '-' are allowed."
        )
    return topic


def as_bytes(what: str, content: Any) -> bytes | None:
    """Return bytes and None unchanged, text encoded as UTF-8.

    Raises:
        InvalidMessageError: It is of another type.
    """
    if content is None or isinstance(content, bytes):
        return content
    if isinstance(content, str):
        try:
            return content.encode()
        except UnicodeEncodeError as error:  # a lone surrogate, for example from a file name that is not UTF-8
            raise InvalidMessageError(
                f"A message's {what} can't be encoded as UTF-8: {error}.", next_step="pass bytes"
            ) from error
    if isinstance(content, bytearray | memoryview):
        return bytes(content)
    raise InvalidMessageError(
        f"A message's {what} must be bytes, str or None, not {type(content).__name__}.",
        next_step="serialise it first, for example with str(…) or json.dumps(…); or send it to a Topic, which does that",
    )


def header_list(headers: Headers | None) -> list[tuple[str, bytes | None]] | None:
    """Headers as pairs, in order.

    Raises:
        InvalidMessageError: They are not a mapping or pairs, or a name is not a str.
    """
    if headers is None:
        return None
    pairs: Any = headers.items() if type(headers) is dict or isinstance(headers, Mapping) else headers
    try:
        listed: list[tuple[Any, Any]] = [(name, content) for name, content in pairs]
    except (TypeError, ValueError) as error:
        raise InvalidMessageError("A message's headers must be a mapping, or a list of (name, value) pairs.") from error
    checked: list[tuple[str, bytes | None]] = []
    for name, content in listed:
        if not isinstance(name, str):
            raise InvalidMessageError(f"A header's name must be a str, not {type(name).__name__}.")
        if not name.isascii():
            as_bytes("header name", name)
        checked.append((name, content if type(content) is bytes else as_bytes(f"header {name!r}", content)))
    return checked


class Columns:
    """The messages of a `send_many`, by columns: producers may take them as they are. Iterating makes the single messages.

    Args:
        topic: The topic of all messages.
        values: Their values, which may be an Arrow array of type binary; a null value is a tombstone.
        keys: Their keys, likewise; None for messages without keys.
        partition: The partition of all messages.
        timestamp: The time of all messages.

    Raises:
        InvalidMessageError: As for `check_many`; or the numbers of keys and values differ, which is raised at once if both have
            a length, else when the end is reached.
    """

    def __init__(
        self,
        topic: Any,
        values: Iterable[Any],
        *,
        keys: Iterable[Any] | None = None,
        partition: Any = None,
        timestamp: Any = None,
    ) -> None:
        check_many(values, keys)
        if isinstance(keys, Sized) and isinstance(values, Sized) and len(keys) != len(values):
            raise _not_as_many_keys(f"{len(keys)} keys for {len(values)} values")
        self.topic = topic
        self.values: Any = values  # iterable, or an Arrow array
        self.keys: Any = keys
        self.partition = partition
        self.timestamp = timestamp

    @property
    def are_lists(self) -> bool:
        """Whether no code of the user runs while the messages are made."""
        return type(self.values) is list and type(self.keys) is list

    def __iter__(self) -> Iterator[GivenMessage]:
        same, values, keys = itertools.repeat, _listed(self.values), _listed(self.keys)
        if keys is None:
            keys = same(None)
        elif not (isinstance(keys, Sized) and isinstance(values, Sized)):
            topic, partition, timestamp = self.topic, self.partition, self.timestamp
            return ((topic, value, key, None, partition, timestamp) for key, value in _until_one_ends(keys, values))
        return zip(same(self.topic), values, keys, same(None), same(self.partition), same(self.timestamp), strict=False)


def _listed(column: Any) -> Any:
    return column.to_pylist() if hasattr(column, "to_pylist") else column


def check_many(values: Any, keys: Any = None) -> None:
    """Check that the values and keys of a `send_many` are several, not a single text, whose characters would be sent.

    Raises:
        InvalidMessageError: They are text or bytes, or a mapping, of which only the names would be sent.
    """
    for what, given in (("values", values), ("keys", keys)):
        if isinstance(given, str | bytes | bytearray | memoryview | Mapping):
            raise InvalidMessageError(
                f"The {what} of send_many must be a list or another iterable, not {type(given).__name__}.",
                cause="each part of it would be sent as a message" if what == "values" else "each part of it would be a key",
                next_step=f"pass a list of {what}, or send a single message with send",
            )


def _until_one_ends(keys: Iterable[Any], values: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    for number, (key, value) in enumerate(itertools.zip_longest(keys, values, fillvalue=_MISSING)):
        if key is _MISSING or value is _MISSING:
            fewer, more = ("keys", "values") if key is _MISSING else ("values", "keys")
            raise _not_as_many_keys(f"{number} {fewer} and more {more}")
        yield key, value


def _not_as_many_keys(found: str) -> InvalidMessageError:
    return InvalidMessageError(
        f"Each value needs a key, but there are {found}.",
        next_step="pass one key for each value (None for a message without a key)",
    )


def check_number(what: str, number: Any, highest: int) -> int:
    """Return the number if it is an int from 0 to `highest`.

    Raises:
        InvalidMessageError: It is not an int, or out of range.
    """
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= highest:
        raise InvalidMessageError(f"A message's {what} must be an int from 0 to {highest}, not {number!r}.")
    return number
