"""Pydantic models as JSON: serializer and deserializer for `Topic`. What would be read back as another value is refused."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from dualwrite.errors import SerializationError
from dualwrite.kafka.model_types import OWN_SERIALIZERS, check_model, fields_of, writes_aliases
from dualwrite.kafka.round_trip import Comparison, Difference

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
    """A serializer that reads back what it has written, as `model_deserializer` does, and compares it with the object.

    Fields are written under the names under which they are read: their aliases, if any. What Pydantic's JSON loses depends on
    the value: NaN, the fields of a subclass, a value that was assigned without validation. So each object is read back. That
    takes about twice the time of writing it.

    Args:
        model: The class.

    Raises:
        ConfigurationError: As `check_model`: the class shows that its objects can't be read back.
    """
    by_alias = writes_aliases(model)
    model.model_rebuild(raise_errors=False)
    is_checked: bool = getattr(model, "__pydantic_complete__", True)
    if is_checked:
        check_model(model)
    comparison = Comparison()

    def serialize(content: M, context: SerializationContext) -> str:
        nonlocal is_checked
        del context
        if not is_checked:  # a class that it names had not been defined yet
            check_model(model)
            is_checked = True
        if not hasattr(content, "model_dump_json"):
            raise SerializationError(
                f"it is {type(content).__qualname__}, not {model.__qualname__}.",
                next_step=f"pass an object of the class {model.__qualname__}",
            )
        try:
            written = content.model_dump_json(by_alias=by_alias)
        except ValueError as error:  # Pydantic's PydanticSerializationError
            raise _unwritable(content, error) from error
        try:
            read = model.model_validate_json(written)
        except ValueError as error:  # Pydantic's ValidationError
            raise _unreadable(content, error) from error
        difference = comparison.difference(content, read)
        if difference is not None:
            raise _changed(content, difference)
        return written

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


def text_key(key: Any, context: SerializationContext) -> str:
    """A serializer that accepts only text, since `key.decode()` reads every key as text."""
    del context
    if isinstance(key, str):
        return key
    raise SerializationError(
        f"it is {type(key).__qualname__}, and would be read back as text.",
        next_step=f"pass a str, such as str(key); or {OWN_SERIALIZERS}",
    )


def _unwritable(content: Any, error: ValueError) -> SerializationError:
    name, value = _failing_field(content)
    if isinstance(value, bytes):
        next_step = "set ser_json_bytes='base64' and val_json_bytes='base64' in its model_config"
    else:
        next_step = f"give the field a value or a type that Pydantic can write as JSON; or {OWN_SERIALIZERS}"
    return SerializationError(
        f"{type(content).__qualname__}{name} can't be written as JSON: {error}.",
        next_step=next_step,
    )


def _failing_field(content: Any) -> tuple[str, Any]:
    """The first field of a model that can't be written by itself, also of a model in it or in its list or dict; its value."""
    for name in fields_of(type(content)) if hasattr(content, "model_dump_json") else ():
        try:
            content.model_dump_json(include={name})
        except Exception:  # noqa: BLE001  (whatever fails here has failed before)
            value = getattr(content, name, None)
            inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
            for place, part in [("", value), *((f"[{key!r}]", part) for key, part in inner)]:
                path, found = _failing_field(part)
                if path:
                    return f".{name}{place}{path}", found
            return f".{name}", value
    return "", content


def _unreadable(content: Any, error: ValueError) -> SerializationError:
    found: list[Any] = getattr(error, "errors", list)()
    place, reason = (found[0]["loc"], found[0]["msg"]) if found else ((), str(error))
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return SerializationError(
        f"{type(content).__qualname__}{name} can't be read back from its own JSON: {reason}.",
        next_step=_next_step(_value_at(content, place), None),
    )


def _changed(content: Any, difference: Difference) -> SerializationError:
    path, sent, read = difference
    return SerializationError(
        f"{type(content).__qualname__}{path} would change: it is {_shown(sent)}, and would be read back as {_shown(read)}.",
        next_step=_next_step(sent, read),
    )


def _shown(content: Any) -> str:
    """A value for a message; of an object only its class, since it may be long, and its field that differs is named."""
    if not hasattr(content, "__dict__") or isinstance(content, Enum):
        return reprlib.repr(content)
    return f"an object of {type(content).__module__}.{type(content).__qualname__}"


def _next_step(sent: Any, read: Any) -> str:
    if isinstance(sent, float | Decimal) and not math.isfinite(sent):
        return "leave out what is no number (None), or set ser_json_inf_nan='strings' in the class's model_config"
    if type(read) in type(sent).__mro__[1:-1]:
        kind = type(sent).__qualname__
        return f"declare the field, or the topic's model, as {kind}, or as a union of all classes that it can be"
    return f"declare a type whose values Pydantic reads from JSON as they were (Any and object are not); or {OWN_SERIALIZERS}"


def _value_at(content: Any, place: Sequence[Any]) -> Any:
    """The value at the place that a ValidationError names; None if it is not found there, for example under an alias."""
    for part in place:
        try:
            content = getattr(content, part) if isinstance(part, str) and hasattr(content, part) else content[part]
        except (LookupError, TypeError):
            return None
    return content
