"""The two messages of every transaction, Produce and EndTxn, encoded and decoded here.

With kafka-python's versions of them, a transaction needs 0.2 ms more CPU time (measured). The fields are those of Kafka's
message schemas (clients/src/main/resources/common/message). All other messages are kafka-python's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct
from typing import ClassVar, Final, NamedTuple, Protocol

_INT32: Final = Struct(">i")
_ACKS_AND_TIMEOUT: Final = Struct(">hi")
_PARTITION: Final = Struct(">ihqqq")  # index, error code, base offset, log append time, log start offset
_PRODUCER_AND_VERDICT: Final = Struct(">qh?")
_THROTTLE_AND_ERROR: Final = Struct(">ih")
_NEXT_PRODUCER: Final = Struct(">qh")
_NO_TAGS: Final = b"\0"
_MORE: Final = 0x80  # another byte of the number follows


class HotRequest(Protocol):
    """A request that encodes itself and decodes its response; with flexible versions only (request header 2)."""

    API_KEY: ClassVar[int]

    def parts(self) -> Sequence[bytes]:
        """The request without its header, to be joined."""

    def response(self, fields: Fields) -> object:
        """The response in the fields after its header."""


class Fields:
    """Reads the fields of a message one after another.

    Args:
        data: The message.
        place: Where its first field begins.
    """

    __slots__ = ("_data", "_place")

    def __init__(self, data: bytes | bytearray | memoryview, place: int = 0) -> None:
        self._data = data
        self._place = place

    def numbers(self, kind: Struct) -> tuple[int, ...]:
        """The next fields, as numbers of fixed lengths."""
        found = kind.unpack_from(self._data, self._place)
        self._place += kind.size
        return found

    def varint(self) -> int:
        """An unsigned number of variable length."""
        number = shift = 0
        while True:
            byte = self._data[self._place]
            self._place += 1
            number |= (byte & 0x7F) << shift
            if byte < _MORE:
                return number
            shift += 7

    def length(self) -> int:
        """The length of a compact array or string; -1 for null."""
        return self.varint() - 1

    def text(self) -> str | None:
        """A compact string."""
        length = self.length()
        if length < 0:
            return None
        begin, self._place = self._place, self._place + length
        if self._place > len(self._data):
            raise IndexError("the text is longer than the message")
        return str(self._data[begin : self._place], "utf-8")

    def skip_tags(self) -> None:
        """Skip the tagged fields; none of them is used."""
        for _ in range(self.varint()):
            self.varint()
            size = self.varint()
            self._place += size


# --- Produce ------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class PartitionResponse:
    """Kafka's response for one batch; the names are the schema's."""

    index: int
    error_code: int
    base_offset: int
    error_message: str | None


class TopicResponse(NamedTuple):
    """Kafka's responses for the batches of one topic."""

    name: str | None
    partition_responses: Sequence[PartitionResponse]


class ProduceResponse(NamedTuple):
    """The response to Produce."""

    responses: Sequence[TopicResponse]


@dataclass(slots=True)
class Produce:
    """Produce, version 12: the first version that adds its partitions to the transaction (KIP-890).

    Args:
        transactional_id: The Kafka transactional id.
        acks: -1 for all replicas in sync.
        timeout_ms: How long the broker waits for the replicas.
        topics: For each topic, partitions and their record batches.
    """

    transactional_id: str
    acks: int
    timeout_ms: int
    topics: Mapping[str, Sequence[tuple[int, bytes]]]

    API_KEY: ClassVar[int] = 0
    API_VERSION: ClassVar[int] = 12

    def parts(self) -> Sequence[bytes]:
        """See HotRequest."""
        parts = [_text(self.transactional_id), _ACKS_AND_TIMEOUT.pack(self.acks, self.timeout_ms), _length(len(self.topics))]
        for topic, partitions in self.topics.items():
            parts += (_text(topic), _length(len(partitions)))
            for index, records in partitions:
                parts += (_INT32.pack(index), _length(len(records)), records, _NO_TAGS)
            parts.append(_NO_TAGS)
        parts.append(_NO_TAGS)
        return parts

    def response(self, fields: Fields) -> ProduceResponse:
        """See HotRequest."""
        topics = []
        for _ in range(fields.length()):
            name, partitions = fields.text(), []
            for _ in range(fields.length()):
                partitions.append(_partition_response(fields))  # noqa: PERF401  (a comprehension is another call)
            fields.skip_tags()
            topics.append(TopicResponse(name, partitions))
        return ProduceResponse(topics)


def _partition_response(fields: Fields) -> PartitionResponse:
    index, error_code, base_offset, _, _ = fields.numbers(_PARTITION)
    for _ in range(fields.length()):  # record_errors
        fields.numbers(_INT32)
        fields.text()
        fields.skip_tags()
    message = fields.text()
    fields.skip_tags()
    return PartitionResponse(index, error_code, base_offset, message)


# --- EndTxn -------------------------------------------------------------------------------------------------------------------


class EndTxnResponse(NamedTuple):
    """The response to EndTxn; producer id and epoch are -1 before version 5."""

    error_code: int
    producer_id: int
    producer_epoch: int


@dataclass(slots=True)
class EndTxn:
    """EndTxn, versions 3 to 5.

    Args:
        API_VERSION: The version.
        transactional_id: The Kafka transactional id.
        producer_id: The transaction's producer id.
        producer_epoch: Its epoch.
        committed: True to commit, False to abort.
    """

    API_VERSION: int
    transactional_id: str
    producer_id: int
    producer_epoch: int
    committed: bool

    API_KEY: ClassVar[int] = 26
    BY_EPOCH: ClassVar[int] = 5
    """The first version that is idempotent, and whose response has the next producer id and epoch (KIP-890)."""

    def parts(self) -> Sequence[bytes]:
        """See HotRequest."""
        numbers = _PRODUCER_AND_VERDICT.pack(self.producer_id, self.producer_epoch, self.committed)
        return (_text(self.transactional_id), numbers, _NO_TAGS)

    def response(self, fields: Fields) -> EndTxnResponse:
        """See HotRequest."""
        _, error_code = fields.numbers(_THROTTLE_AND_ERROR)
        if self.API_VERSION < self.BY_EPOCH:
            return EndTxnResponse(error_code, -1, -1)
        return EndTxnResponse(error_code, *fields.numbers(_NEXT_PRODUCER))


# --- encoding -----------------------------------------------------------------------------------------------------------------


def varint(number: int) -> bytes:
    """An unsigned number of variable length."""
    encoded = bytearray()
    while number >= _MORE:
        encoded.append(number & 0x7F | _MORE)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


@lru_cache(maxsize=1000)
def _length(length: int) -> bytes:
    """The length of a compact array, string or bytes."""
    return varint(length + 1)


@lru_cache(maxsize=1000)
def _text(text: str) -> bytes:
    encoded = text.encode()
    return _length(len(encoded)) + encoded
