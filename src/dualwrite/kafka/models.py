"""Pydantic models as JSON: serializer and deserializer for `Topic`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, get_args, get_origin, get_type_hints

from dualwrite.errors import ConfigurationError

if TYPE_CHECKING:
    from confluent_kafka.serialization import SerializationContext


class Model(Protocol):
    """The methods of a Pydantic model (version 2) that are used here."""

    def model_dump_json(self, *, by_alias: bool) -> str:
        """The model as JSON."""

    @classmethod
    def model_rebuild(cls, *, raise_errors: bool) -> bool | None:
        """Look again for the classes that the model names."""

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
    model.model_rebuild(raise_errors=False)
    is_checked: bool = getattr(model, "__pydantic_complete__", True)
    if is_checked:
        _check(model, by_alias=by_alias)

    def serialize(content: M, context: SerializationContext) -> str:
        nonlocal is_checked
        del context
        if not is_checked:  # a class that it names had not been defined yet
            _check(model, by_alias=by_alias)
            is_checked = True
        return content.model_dump_json(by_alias=by_alias)

    return serialize


def _check(model: Any, *, by_alias: bool) -> None:
    for each in _kinds_in(model, set()):
        for name, field in _fields_of(each).items():
            written = (by_alias and field.serialization_alias) or name
            if not field.exclude and written not in _names_read(name, field, _config_of(each)):
                raise ConfigurationError(
                    f"{each.__qualname__}.{name} is written as {written!r}, and can't be read under this name.",
                    cause="its aliases for validation and for serialization differ",
                    next_step=f"set only alias=, which is both; or let validation accept {written!r}, too (AliasChoices, "
                    "validate_by_name); or give Topic a serializer and a deserializer of your own",
                )


def model_deserializer(model: type[M]) -> Callable[[bytes, SerializationContext], M]:
    """A deserializer for the JSON of one kind of Pydantic model.

    Args:
        model: The class.
    """

    def deserialize(content: bytes, context: SerializationContext) -> M:
        del context
        return model.model_validate_json(content)

    return deserialize


def _kinds_in(kind: Any, seen: set[Any]) -> Iterator[Any]:
    """The classes with fields in a type that are not in `seen`, with those in the types of their fields that are written."""
    if get_origin(kind) is type:
        return
    aliased = getattr(kind, "__value__", None)  # `type Names = …`
    if aliased is not None:
        yield from _kinds_in(aliased, seen)
    if isinstance(kind, type) and kind not in seen:
        seen.add(kind)
        fields = _fields_of(kind)
        if fields:
            yield kind
        for field in fields.values():
            if not field.exclude:
                yield from _kinds_in(field.annotation, seen)
    for part in get_args(kind):
        yield from _kinds_in(part, seen)


def _fields_of(kind: Any) -> Mapping[str, Any]:
    """The fields of a model, of a dataclass, a TypedDict or a NamedTuple, as Pydantic's FieldInfo."""
    for own in ("__pydantic_fields__", "model_fields"):
        if isinstance(found := getattr(kind, own, None), Mapping):
            return found
    if not (is_dataclass(kind) or hasattr(kind, "__total__") or hasattr(kind, "_field_defaults")):
        return {}
    from pydantic.fields import FieldInfo  # noqa: PLC0415  (there are models, so it is installed)

    try:
        hints = get_type_hints(kind, include_extras=True)
    except NameError:  # a class that is not defined here: what it has can't be seen
        return {}
    return {name: FieldInfo.from_annotation(hint) for name, hint in hints.items()}


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
