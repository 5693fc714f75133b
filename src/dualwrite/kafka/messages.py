"""What may be sent: types and ranges of topic, key, value, headers, partition and timestamp, checked before anything leaves."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, Final

from dualwrite.delivery import MAX_TOPIC_LENGTH
from dualwrite.errors import InvalidMessageError
from dualwrite.kafka.base import Headers

_MISSING: Final[Any] = object()
_TOPIC: Final = re.compile(r"[a-zA-Z0-9._-]+", re.ASCII)


def check_topic(topic: Any) -> str:
    """Return the topic if Kafka allows the name: 1 to 249 of a-z, A-Z, 0-9, '.', '_', '-'; not '.' or '..'.

    Raises:
        InvalidMessageError: It does not.
    """
    if not isinstance(topic, str):
        raise InvalidMessageError(f"A topic is a str, not {type(topic).__name__}: {topic!r}.")
    if not _TOPIC.fullmatch(topic) or len(topic) > MAX_TOPIC_LENGTH or topic in (".", ".."):
        raise InvalidMessageError(
            f"{topic[:60]!r} is no name for a topic: 1 to {MAX_TOPIC_LENGTH} of a-z, A-Z, 0-9, '.', '_' and '-'."
        )
    return topic


def as_bytes(what: str, content: Any) -> bytes | None:
    """Bytes as they are, text in UTF-8, None as None.

    Raises:
        InvalidMessageError: Anything else.
    """
    if content is None or isinstance(content, bytes):
        return content
    if isinstance(content, str):
        return _encoded(what, content)
    if isinstance(content, bytearray | memoryview):
        return bytes(content)
    raise InvalidMessageError(
        f"A message's {what} is bytes, str or None, not {type(content).__name__}.",
        next_step="serialise it first, for instance json.dumps(…)",
    )


def header_list(headers: Headers | None) -> list[tuple[str, bytes | None]] | None:
    """Headers as pairs, in order.

    Raises:
        InvalidMessageError: Not a mapping or pairs, or a name that is not a str.
    """
    if headers is None:
        return None
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    try:
        listed = [(name, content) for name, content in pairs]
    except (TypeError, ValueError) as error:
        raise InvalidMessageError("A message's headers are a mapping, or a list of (name, value) pairs.") from error
    for name, _ in listed:
        if not isinstance(name, str):
            raise InvalidMessageError(f"A header's name is a str, not {type(name).__name__}.")
        _encoded("header name", name)
    return [(name, as_bytes(f"header {name!r}", content)) for name, content in listed]


def keyed(
    keys: Iterable[bytes | str | None], values: Iterable[bytes | str | None]
) -> Iterator[tuple[bytes | str | None, bytes | str | None]]:
    """Pairs of key and value.

    Raises:
        InvalidMessageError: There are not as many keys as values: found at once where both have a length, else at the end.
    """
    if not (isinstance(keys, Sized) and isinstance(values, Sized)):
        return _until_one_ends(keys, values)
    if len(keys) != len(values):
        raise not_as_many_keys(f"{len(keys)} keys for {len(values)} values")
    return zip(keys, values, strict=True)


def _until_one_ends(
    keys: Iterable[bytes | str | None], values: Iterable[bytes | str | None]
) -> Iterator[tuple[bytes | str | None, bytes | str | None]]:
    for number, (key, value) in enumerate(itertools.zip_longest(keys, values, fillvalue=_MISSING)):
        if key is _MISSING or value is _MISSING:
            fewer, more = ("keys", "values") if key is _MISSING else ("values", "keys")
            raise not_as_many_keys(f"{number} {fewer} and more {more}")
        yield key, value


def not_as_many_keys(found: str) -> InvalidMessageError:
    """The error of `send_many` and `send_columns` where keys and values are not of one number."""
    return InvalidMessageError(
        f"Each value needs one key, and there are {found}.",
        next_step="give a key for each value (None for a message without one)",
    )


def check_number(what: str, number: Any, highest: int) -> int:
    """Return the number if it is an int from 0 to `highest`.

    Raises:
        InvalidMessageError: It is not.
    """
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= highest:
        raise InvalidMessageError(f"A message's {what} is an int from 0 to {highest}, not {number!r}.")
    return number


def _encoded(what: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:  # a lone surrogate, as from a file name that was no UTF-8
        raise InvalidMessageError(f"A message's {what} has no form in UTF-8: {error}.", next_step="give bytes") from error
