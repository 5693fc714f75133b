"""The fields of Kafka's messages as bytes: what the generated classes of `messages_generated` are read from and written with.

`compact` forms are those of flexible versions (KIP-482): lengths are unsigned numbers of variable length, plus one, 0 for null.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from struct import Struct, error
from typing import Any, ClassVar, Final, Generic, NoReturn, TypeVar
from uuid import UUID

_MORE: Final = 0x80  # another byte of the number follows
_MAX_SHIFT: Final = 28  # the shift of the fifth byte, the last of 32 bits
_NOT_SHOWN: Final = "auth_bytes"  # the field of the messages of a login
_INT16: Final = Struct(">h")
_INT32: Final = Struct(">i")

NO_ID: Final = UUID(int=0)
NO_TAGS: Final = b"\0"
NULL: Final = b"\0"  # in place of a compact length

Response_co = TypeVar("Response_co", covariant=True)


class KafkaProtocolError(Exception):
    """A message from a broker that does not have the form of Kafka's protocol."""


class Fields:
    """Reads the fields of a message one after another.

    Args:
        data: The message.
        place: Where its first field begins.

    Each method raises KafkaProtocolError if the message ends before the field does, or the field can't be one of its type. So
    nothing is allocated for a length or a count that exceeds the message.
    """

    __slots__ = ("_data", "_place")

    def __init__(self, data: bytes, place: int = 0) -> None:
        self._data = data
        self._place = place

    def numbers(self, kind: Struct) -> tuple[Any, ...]:
        """The next fields, all of fixed lengths."""
        try:
            found = kind.unpack_from(self._data, self._place)
        except error:
            raise self._too_short(kind.size) from None
        self._place += kind.size
        return found

    def row(self, kind: str, count: int) -> Sequence[Any]:
        """The elements of an array of numbers, of one kind of `struct`."""
        return self.numbers(_row(kind, count))

    def varint(self) -> int:
        """An unsigned number of variable length, of at most 32 bits."""
        number = shift = 0
        try:
            while True:
                byte = self._data[self._place]
                self._place += 1
                if byte < _MORE:
                    return number | byte << shift
                number |= (byte & 0x7F) << shift
                shift += 7
                if shift > _MAX_SHIFT:
                    raise KafkaProtocolError(f"the number before byte {self._place} has more than 32 bits")
        except IndexError:
            raise self._too_short(1) from None

    def compact_count(self) -> int:
        """The number of elements of an array."""
        count = self.varint() - 1
        return count if 0 <= count <= len(self._data) - self._place else self._refused(count)

    def compact_nullable_count(self) -> int:
        """The number of elements of an array, or -1 for null."""
        count = self.varint() - 1
        return count if count <= len(self._data) - self._place else self._refused(count)

    def compact_text(self) -> str:
        """A string."""
        return self._text(self.varint() - 1)

    def compact_nullable_text(self) -> str | None:
        """A string, or null."""
        length = self.varint() - 1
        return None if length < 0 else self._text(length)

    def compact_bytes(self) -> bytes:
        """Bytes."""
        return self._part(self.varint() - 1)

    def compact_nullable_bytes(self) -> bytes | None:
        """Bytes, or null."""
        length = self.varint() - 1
        return None if length < 0 else self._part(length)

    def plain_count(self) -> int:
        """As `compact_count`, in versions that are not flexible."""
        count = int(self.numbers(_INT32)[0])
        return count if 0 <= count <= len(self._data) - self._place else self._refused(count)

    def plain_text(self) -> str:
        """As `compact_text`, in versions that are not flexible."""
        return self._text(self.numbers(_INT16)[0])

    def plain_nullable_bytes(self) -> bytes | None:
        """As `compact_nullable_bytes`, in versions that are not flexible."""
        length = self.numbers(_INT32)[0]
        return None if length < 0 else self._part(length)

    def peek_int16(self) -> int:
        """The number that is next, which stays the next one."""
        found = self.numbers(_INT16)[0]
        self._place -= _INT16.size
        return int(found)

    def tag(self) -> tuple[int, int]:
        """The number of a tagged field, and the place where it will end."""
        number, size = self.varint(), self.varint()
        end = self._place + size
        if end > len(self._data):
            raise self._too_short(size)
        return number, end

    def skip_to(self, end: int) -> None:
        """Skip a tagged field that is not known."""
        self._place = end

    def end_tag(self, end: int) -> None:
        """Check that a tagged field has the length that its tag says."""
        if self._place != end:
            raise KafkaProtocolError(f"a tagged field ends at byte {self._place} and not at byte {end}")

    def skip_tags(self) -> None:
        """Skip the tagged fields of a structure of which none is used."""
        if self._place < len(self._data) and not self._data[self._place]:  # as in nearly all structures
            self._place += 1
            return
        for _ in range(self.varint()):
            self._place = self.tag()[1]

    def end(self) -> None:
        """Check that the message has no more fields."""
        if self._place != len(self._data):
            raise KafkaProtocolError(f"it has {len(self._data)} bytes, of which its fields are the first {self._place}")

    def _refused(self, count: int) -> NoReturn:
        """A count of elements, each of which has a byte at least."""
        raise KafkaProtocolError(f"the array before byte {self._place} is null") if count < 0 else self._too_short(count)

    def _text(self, length: int) -> str:
        try:
            return self._part(length).decode()
        except UnicodeDecodeError as problem:
            raise KafkaProtocolError(f"the string before byte {self._place} is not UTF-8: {problem}") from None

    def _part(self, length: int) -> bytes:
        begin, end = self._place, self._place + length
        if length < 0:
            raise KafkaProtocolError(f"the field before byte {begin} is null")
        if end > len(self._data):
            raise self._too_short(length)
        self._place = end
        return self._data[begin:end]

    def _too_short(self, needed: int) -> KafkaProtocolError:
        return KafkaProtocolError(f"its {len(self._data)} bytes end within a field of {needed} bytes at byte {self._place}")


# --- writing ------------------------------------------------------------------------------------------------------------------


def varint(number: int) -> bytes:
    """An unsigned number of variable length."""
    encoded = bytearray()
    while number >= _MORE:
        encoded.append(number & 0x7F | _MORE)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


@lru_cache(maxsize=1000)
def compact_length(length: int) -> bytes:
    """The length of an array, string or bytes."""
    return varint(length + 1)


@lru_cache(maxsize=1000)
def compact_text(text: str | None) -> bytes:
    """A string, or null; kept, since most are names of topics and ids that are sent again."""
    return NULL if text is None else _encoded(text)


def compact_texts(texts: Sequence[str] | None) -> bytes:
    """An array of strings, or null."""
    return NULL if texts is None else compact_length(len(texts)) + b"".join(map(_encoded, texts))


def _encoded(text: str) -> bytes:
    encoded = text.encode()
    return compact_length(len(encoded)) + encoded


def compact_row(kind: str, numbers: Sequence[int] | None) -> bytes:
    """An array of numbers, of one kind of `struct`, or null."""
    return NULL if numbers is None else compact_length(len(numbers)) + _row(kind, len(numbers)).pack(*numbers)


def plain_text(text: str) -> bytes:
    """A string in a version that is not flexible."""
    encoded = text.encode()
    return _INT16.pack(len(encoded)) + encoded


def not_in_version(request: str, field: str, version: int) -> ValueError:
    """A field has a value that the request's version can't carry; the request would do something else without it."""
    return ValueError(f"{request} v{version} has no field {field}")


@lru_cache(maxsize=100)
def _row(kind: str, count: int) -> Struct:
    return Struct(f">{count}{kind}")


# --- messages -----------------------------------------------------------------------------------------------------------------


class Structure:
    """A structure of Kafka's protocol: a dataclass with slots, whose fields must not be changed."""

    __slots__: tuple[str, ...] = ()

    def __repr__(self) -> str:
        shown = (f"{name}={'***' if name == _NOT_SHOWN else repr(getattr(self, name))}" for name in self.__slots__)
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(slots=True, eq=False, repr=False)
class Request(Structure, Generic[Response_co]):
    """A request of one of the versions from OLDEST to NEWEST.

    Args:
        version: The version to send; None for the newest that both sides know.
    """

    version: int | None = field(default=None, kw_only=True)

    API_KEY: ClassVar[int]
    OLDEST: ClassVar[int]
    NEWEST: ClassVar[int]
    FLEXIBLE: ClassVar[bool]
    """Whether its versions are flexible (KIP-482): its header and its response's have tagged fields."""

    def write(self, parts: list[bytes], version: int) -> None:
        """Append the encoded fields, in one of the versions, to the parts of a message.

        Raises:
            ValueError: A field has a value that the version can't carry.
        """
        raise NotImplementedError

    def response(self, fields: Fields, version: int) -> Response_co:
        """Read the response to the request in this version.

        Raises:
            KafkaProtocolError: It is not such a response.
        """
        raise NotImplementedError
