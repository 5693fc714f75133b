"""`Topic`: a topic with serializers, which encode keys and values, and deserializers, which decode them."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Protocol

from dualwrite.errors import DeserializationError, DualWriteError, SchemaRegistryUnavailableError, SerializationError, causes_of
from dualwrite.kafka.base import Headers
from dualwrite.kafka.messages import check_many, check_topic, header_list
from dualwrite.kafka.models import M, model_deserializer, model_serializer, text_key

if TYPE_CHECKING:
    from confluent_kafka.serialization import SerializationContext
    from typing_extensions import TypeVar  # with defaults: in typing from Python 3.13 on

    V = TypeVar("V", default=Any)
    K = TypeVar("K", default=Any)
    V_co = TypeVar("V_co", covariant=True, default=Any)
    K_co = TypeVar("K_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    V = TypeVar("V")
    K = TypeVar("K")
    V_co = TypeVar("V_co", covariant=True)
    K_co = TypeVar("K_co", covariant=True)

_UNREACHABLE: Final = frozenset({errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH})
_TOO_MANY_REQUESTS: Final = 429
_SERVER_ERROR: Final = 500

Field = Literal["key", "value"]
Pairs = list[tuple[str, bytes | None]]

_INSTEAD_OF_NONE: Final[dict[Field, str]] = {
    "value": "return bytes or str for every object; to send a tombstone, send None itself",
    "key": "return bytes or str for every object; to send no key, pass key=None",
}


class Sends(Protocol):
    """An object that sends messages: a Transaction, a unit of a group, an AsyncTransaction."""

    def send(
        self,
        topic: str,
        value: bytes | str | None,
        *,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
        timestamp: int | None = None,
    ) -> None:
        """See Transaction."""


class ReadableTopic(Generic[V_co, K_co]):
    """A Topic for its readers: the messages of a `Topic[Order, str]` and a `Topic[Payment, str]` have orders or payments."""


class Topic(ReadableTopic[V, K], Generic[V, K]):
    """A topic whose keys and values are objects: `orders.send(tx, Order(…), key="17")`.

    Serializers and deserializers have the signature of confluent-kafka's, so its Avro, JSON Schema and Protobuf ones can be
    used: they get the object or the bytes, and a `SerializationContext` (topic, field, headers). A serializer may add headers
    to the context's list. None is not serialized: a value of None is a tombstone, and a key of None means no key. Without a
    serializer the object must be bytes, text or None, and without a deserializer the reader gets bytes.

    Serializers run when `send` is called, before anything is prepared: an error fails only the block or the unit in which it
    was raised.

    Args:
        name: The topic.
        value_serializer: Turns a value into bytes or text.
        key_serializer: Turns a key into bytes or text.
        value_deserializer: Turns bytes into a value, for DualProcessor.
        key_deserializer: Turns bytes into a key, for DualProcessor.

    Raises:
        InvalidMessageError: The name is not a legal topic name.
    """

    def __init__(
        self,
        name: str,
        *,
        value_serializer: Callable[[V, SerializationContext], bytes | str | None] | None = None,
        key_serializer: Callable[[K, SerializationContext], bytes | str | None] | None = None,
        value_deserializer: Callable[[bytes, SerializationContext], V | None] | None = None,
        key_deserializer: Callable[[bytes, SerializationContext], K | None] | None = None,
    ) -> None:
        self.name: Final = check_topic(name)
        self._serializers: dict[Field, Callable[..., Any] | None] = {"key": key_serializer, "value": value_serializer}
        self._deserializers: dict[Field, Callable[..., Any] | None] = {"key": key_deserializer, "value": value_deserializer}

    @classmethod
    def of_models(cls, name: str, model: type[M]) -> Topic[M, str]:
        """A topic of Pydantic models as JSON, with text as keys. Fields with an alias are written and read under their alias.

        `send` raises SerializationError for NaN and infinity where they would become null, for values that don't have their
        field's type, and for objects of another class. Private attributes and fields with `exclude=True` are no part of it.

        Args:
            name: The topic.
            model: The models' class.

        Raises:
            ConfigurationError: The class shows that what is written can't be read: a field's `serialization_alias` and
                `validation_alias` differ, it is a secret, or required and excluded; or the class has computed fields and
                `extra="forbid"` or `"allow"`, or writes bytes in another form than it reads.
        """
        return Topic(
            name,
            value_serializer=model_serializer(model),
            key_serializer=text_key,
            value_deserializer=model_deserializer(model),
            key_deserializer=lambda content, _: content.decode(),
        )

    def __repr__(self) -> str:
        return f"Topic({self.name!r})"

    def send(
        self,
        tx: Sends,
        value: V | None,
        *,
        key: K | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
        timestamp: int | None = None,
    ) -> None:
        """Serialize key and value, and send them with `tx.send`.

        Raises:
            SerializationError: A serializer raised an error, which is the `__cause__`, or returned something other than bytes
                or text: None, too, which would be a tombstone. Nothing was sent.
            SchemaRegistryUnavailableError: The serializer could not reach its schema registry. Nothing was sent.
            DualWriteError: What `tx.send` raises.
        """
        pairs: Pairs = header_list(headers) or []
        key_bytes = self._serialized("key", key, pairs)
        value_bytes = self._serialized("value", value, pairs)
        tx.send(self.name, value_bytes, key=key_bytes, headers=pairs or None, partition=partition, timestamp=timestamp)

    def send_many(self, tx: Sends, values: Iterable[V | None]) -> None:
        """Send values without keys; see `send`. After an error some of them may have been sent.

        Raises: as for `send`, and InvalidMessageError if the values are a single text or mapping.
        """
        check_many(values)
        for value in values:
            self.send(tx, value)

    def deserialized(self, field: Field, content: bytes | None, headers: Iterable[tuple[str, Any]] | None = None) -> Any:
        """The object for a key or a value that was read; bytes if there is no deserializer for it, None for None.

        Args:
            field: "key" or "value".
            content: What was read.
            headers: The message's headers.

        Raises:
            DeserializationError: The deserializer raised an error, which is the `__cause__`.
            SchemaRegistryUnavailableError: It could not reach its schema registry.
        """
        deserializer = self._deserializers[field]
        if content is None or deserializer is None:
            return content
        before = sys.exception()
        try:
            return deserializer(content, _context(self.name, field, list(headers or ())))
        except Exception as error:
            what = f"The {field} of a message in topic {self.name!r} can't be deserialized"
            raise self._error(DeserializationError, what, field, error, before) from error

    @property
    def deserializes(self) -> bool:
        """Whether there is a deserializer."""
        return any(self._deserializers.values())

    def _serialized(self, field: Field, content: Any, headers: Pairs) -> Any:
        serializer = self._serializers[field]
        if content is None or serializer is None:
            return content
        before = sys.exception()
        try:
            made = serializer(content, _context(self.name, field, headers))
        except Exception as error:
            what = f"The {field} for topic {self.name!r} can't be serialized"
            raise self._error(SerializationError, what, field, error, before) from error
        if isinstance(made, bytes | str):
            return made
        raise SerializationError(
            f"The {field} for topic {self.name!r} can't be serialized: the serializer returned "
            f"{'None' if made is None else type(made).__qualname__}, not bytes or str.",
            next_step=_INSTEAD_OF_NONE[field] if made is None else "return bytes or str",
            topic=self.name,
            field=field,
        )

    def _error(
        self, kind: type[DualWriteError], what: str, field: Field, reason: Exception, before: BaseException | None
    ) -> DualWriteError:
        text = f"{what}: {type(reason).__qualname__}: {reason}"
        if not any(map(_is_unavailability, (reason, *causes_of(reason, before=before)))):
            if isinstance(reason, SerializationError):  # of our own serializers
                return kind(f"{what}: {reason.what}", next_step=reason.next_step, topic=self.name, field=field)
            return kind(text, topic=self.name, field=field)
        return SchemaRegistryUnavailableError(
            text, cause="the schema registry can't be reached", next_step="retry", topic=self.name, field=field
        )


def _is_unavailability(error: BaseException) -> bool:
    """Whether a server was unavailable: the network failed, or the server's own status code says so."""
    status = getattr(error, "http_status_code", 0)  # of confluent-kafka's SchemaRegistryError
    return _is_of_the_network(error) or status >= _SERVER_ERROR or status == _TOO_MANY_REQUESTS


def _is_of_the_network(error: BaseException) -> bool:
    """Whether the network failed. Not every OSError means that: a schema file may be missing, for example."""
    if isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
        return True
    return isinstance(error, OSError) and error.errno in _UNREACHABLE


def _context(topic: str, field: Field, headers: list[tuple[str, Any]]) -> SerializationContext:
    from confluent_kafka.serialization import MessageField, SerializationContext  # noqa: PLC0415  (loads librdkafka)

    return SerializationContext(topic, MessageField(field), headers)
