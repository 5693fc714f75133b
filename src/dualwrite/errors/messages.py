"""Messages that Kafka does not accept, and keys or values that could not be serialized or deserialized."""

from __future__ import annotations

from dualwrite.errors.base import DualWriteError


class InvalidMessageError(DualWriteError, TypeError):
    """A topic, key, value, header, partition or timestamp has a type or value that Kafka does not accept; nothing was sent."""


class SerializationError(InvalidMessageError):
    """A serializer could not make bytes of a key or a value; nothing was sent. Its `__cause__` says why.

    Attributes: `topic`, `field` ("key" or "value").
    """

    topic: str
    field: str


class DeserializationError(DualWriteError):
    """A deserializer could not read a key or a value. Its `__cause__` says why. Attributes: `topic`, `field`."""

    topic: str
    field: str


class SchemaRegistryUnavailableError(DualWriteError):
    """A serializer or deserializer could not reach its schema registry. Attributes: `topic`, `field`."""

    topic: str
    field: str

    retriable = True
