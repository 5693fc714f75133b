"""Pydantic models as JSON: serializer and deserializer for `Topic`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, get_args

from dualwrite.errors import ConfigurationError

if TYPE_CHECKING:
    from confluent_kafka.serialization import SerializationContext


class Model(Protocol):
    """The methods of a Pydantic model (version 2) that are used here."""

    def model_dump_json(self, *, by_alias: bool) -> str:
        """The model as JSON."""

    @classmethod
    def model_validate_json(cls, json_data: str | bytes) -> Self:
        """A model parsed from JSON."""


M = TypeVar("M", bound=Model)


def model_serializer(model: type[M]) -> Callable[[M, SerializationContext], str]:
    """A serializer that writes fields under the names under which `model_deserializer` reads them: their aliases, if any.

    Args:
        model: The class.

    Raises:
        ConfigurationError: A field of the class, or of a model in it, is written under a name under which it is not read: a
            field with a default would lose its value without an error.
    """
    by_alias = _config_of(model).get("validate_by_alias") is not False
    for each in _models_in(model, set()):
        for name, field in each.model_fields.items():
            written = (by_alias and field.serialization_alias) or name
            if not field.exclude and written not in _names_read(name, field, _config_of(each)):
                raise ConfigurationError(
                    f"{each.__qualname__}.{name} is written as {written!r}, and can't be read under this name.",
                    cause="its aliases for validation and for serialization differ",
                    next_step=f"set only alias=, which is both; or let validation accept {written!r}, too (AliasChoices, "
                    "validate_by_name); or give Topic a serializer and a deserializer of your own",
                )

    def serialize(content: M, context: SerializationContext) -> str:
        del context
        return content.model_dump_json(by_alias=by_alias)

    return serialize


def model_deserializer(model: type[M]) -> Callable[[bytes, SerializationContext], M]:
    """A deserializer for the JSON of one kind of Pydantic model.

    Args:
        model: The class.
    """

    def deserialize(content: bytes, context: SerializationContext) -> M:
        del context
        return model.model_validate_json(content)

    return deserialize


def _models_in(kind: Any, seen: set[Any]) -> Iterator[Any]:
    """The models in a type that are not in `seen`, with those in the types of their fields."""
    if isinstance(kind, type) and hasattr(kind, "model_fields") and kind not in seen:
        seen.add(kind)
        yield kind
        for field in kind.model_fields.values():
            yield from _models_in(field.annotation, seen)
    for part in get_args(kind):
        yield from _models_in(part, seen)


def _names_read(name: str, field: Any, config: Mapping[str, Any]) -> set[str]:
    """The names at the top level of an object under which a field is read."""
    by_name = config.get("validate_by_name") or config.get("populate_by_name")
    names = {name} if field.validation_alias is None or by_name else set()
    if config.get("validate_by_alias") is False:
        return names
    for alias in getattr(field.validation_alias, "choices", [field.validation_alias]):  # AliasChoices, or a single one
        match getattr(alias, "path", [alias]):  # AliasPath, or text
            case [str(only)]:
                names.add(only)
    return names


def _config_of(model: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = getattr(model, "model_config", {})
    return found
