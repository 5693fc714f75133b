"""Pydantic models as JSON: serializer and deserializer for `Topic`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

if TYPE_CHECKING:
    from confluent_kafka.serialization import SerializationContext


class Model(Protocol):
    """The methods of a Pydantic model (version 2) that are used here."""

    def model_dump_json(self) -> str:
        """The model as JSON."""

    @classmethod
    def model_validate_json(cls, json_data: str | bytes) -> Self:
        """A model parsed from JSON."""


M = TypeVar("M", bound=Model)


def serialize_model(model: Any, context: SerializationContext) -> str:
    """A serializer for any Pydantic model."""
    del context
    text: str = model.model_dump_json()
    return text


def model_deserializer(model: type[M]) -> Callable[[bytes, SerializationContext], M]:
    """A deserializer for the JSON of one kind of Pydantic model.

    Args:
        model: The class.
    """

    def deserialize(content: bytes, context: SerializationContext) -> M:
        del context
        return model.model_validate_json(content)

    return deserialize
