"""What a handler gets: a message with its deserialized key and value. The original is kept, for retries and dead letters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypedDict, TypeVar

from dualwrite.errors import MissingDependencyError
from dualwrite.kafka.topic import K_co, Topic, V_co
from dualwrite.processor.options import ProcessorOptions

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

M = TypeVar("M")
X = TypeVar("X")
R = TypeVar("R")

_WITHOUT_TIME: Final = 0
"""confluent-kafka's TIMESTAMP_NOT_AVAILABLE."""


class Received(Protocol[V_co, K_co]):
    """A message in a handler: what it has of confluent-kafka's Message, with the types of its topic.

    `Received[Order, str]` is a message of a `Topic[Order, str]`, and `Received[bytes, bytes]` one of a topic that was given by
    name. It is a type for annotations; the objects are confluent-kafka's, or have its methods.
    """

    def key(self) -> K_co | None:
        """The key as the topic's deserializer returned it, or bytes if the topic has none for keys; None without a key."""

    def value(self) -> V_co | None:
        """The value as the topic's deserializer returned it, or bytes if the topic has none for values; None: a tombstone."""

    def topic(self) -> str:
        """The topic's name."""

    def partition(self) -> int:
        """The partition."""

    def offset(self) -> int:
        """The offset in the partition."""

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        """The headers; None without headers."""

    def timestamp(self) -> tuple[int, int]:
        """The kind of timestamp, as confluent-kafka numbers them, and milliseconds since 1970."""

    def __len__(self) -> int:
        """The size of the original value in bytes."""


class Handlers(TypedDict, Generic[M, X, R], total=False):
    """The arguments of a processor for messages of type M in transactions of type X; its handlers return R."""

    handle: Callable[[M, X], R] | None
    handle_batch: Callable[[list[M], X], R] | None
    options: ProcessorOptions | None


class DecodedMessage:
    """Has the methods of confluent-kafka's Message; `key()` and `value()` return what the deserializers returned."""

    __slots__ = ("_key", "_message", "_value")

    def __init__(self, message: Any, key: Any, value: Any) -> None:
        self._message = message
        self._key = key
        self._value = value

    def key(self) -> Any:
        """The deserialized key."""
        return self._key

    def value(self) -> Any:
        """The deserialized value."""
        return self._value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)

    def __len__(self) -> int:
        return len(self._message)


def decoded(messages: Sequence[Any], topics: Mapping[str, Topic[Any, Any]]) -> list[Any]:
    """The messages, deserialized if their topic has a deserializer.

    Raises:
        DeserializationError: A key or a value could not be deserialized.
    """
    return [_decoded(message, topics.get(message.topic())) for message in messages]


def _decoded(message: Any, topic: Topic[Any, Any] | None) -> Any:
    if topic is None:
        return message
    headers = message.headers()
    key = topic.deserialized("key", message.key(), headers)
    return DecodedMessage(message, key, topic.deserialized("value", message.value(), headers))


def to_arrow(messages: Sequence[Any]) -> pa.Table:
    """The messages as a table, with one row for each message, in the same order.

    | column | type |
    | --- | --- |
    | topic, partition, offset | string, int32, int64 |
    | timestamp | timestamp (ms, UTC); null if the message has none |
    | key, value | binary; for deserialized messages, the type that Arrow infers: a struct for dictionaries, a string for text |
    | headers | list of structs (name: string, value: binary) |

    Args:
        messages: The messages that `handle_batch` was called with.

    Raises:
        MissingDependencyError: pyarrow is not installed.
        pyarrow.ArrowInvalid: The deserialized keys or values are of different types.
    """
    try:
        import pyarrow as pa  # noqa: PLC0415  (optional)
    except ImportError as error:
        raise MissingDependencyError("to_arrow needs pyarrow.", next_step="pip install pyarrow") from error
    header = pa.struct([pa.field("name", pa.string()), pa.field("value", pa.binary())])
    times = [message.timestamp() for message in messages]
    return pa.table(
        {
            "topic": pa.array([message.topic() for message in messages], pa.string()),
            "partition": pa.array([message.partition() for message in messages], pa.int32()),
            "offset": pa.array([message.offset() for message in messages], pa.int64()),
            "timestamp": pa.array([None if kind == _WITHOUT_TIME else ms for kind, ms in times], pa.timestamp("ms", tz="UTC")),
            "key": _column([message.key() for message in messages]),
            "value": _column([message.value() for message in messages]),
            "headers": pa.array([_headers(message) for message in messages], pa.list_(header)),
        }
    )


def to_pandas(messages: Sequence[Any]) -> pd.DataFrame:
    """The messages as a DataFrame, with the columns of `to_arrow`.

    Args:
        messages: The messages that `handle_batch` was called with.

    Raises:
        MissingDependencyError: pyarrow or pandas is not installed.
        pyarrow.ArrowInvalid: See `to_arrow`.
    """
    table = to_arrow(messages)
    try:
        return table.to_pandas()
    except ImportError as error:
        raise MissingDependencyError("to_pandas needs pandas.", next_step="pip install pandas") from error


def _column(contents: Sequence[Any]) -> pa.Array:
    import pyarrow as pa  # noqa: PLC0415  (optional)

    if all(content is None or isinstance(content, bytes) for content in contents):
        return pa.array(contents, pa.binary())
    return pa.array(contents)


def _headers(message: Any) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in message.headers() or ()]
