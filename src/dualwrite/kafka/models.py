"""Pydantic models as JSON: serializer and deserializer for `Topic`. A class whose JSON can't be read back is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    Protocol,
    Self,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from dualwrite.errors import ConfigurationError, SerializationError

if TYPE_CHECKING:
    from confluent_kafka.serialization import SerializationContext


OWN_SERIALIZERS: Final = "give Topic a serializer and a deserializer of your own"


def check_model(model: Any) -> None:
    """Check that what a model writes as JSON can be read back, as far as its classes show it.

    Classes with a `model_serializer` and fields with a serializer may write anything, which only a value shows.

    Raises:
        ConfigurationError: A field of the class, or of a class in it, is written under a name under which it is not read, is a
            secret, which is written as asterisks, or is required but not written; or a class forbids or keeps unknown fields,
            and writes computed ones.
    """
    by_alias = writes_aliases(model)
    for each in _kinds_in(model, set()):
        decorators = getattr(each, "__pydantic_decorators__", None)
        if getattr(decorators, "model_serializers", None):
            continue
        _check_computed_fields(each, decorators)
        _check_bytes(each)
        for name, field in fields_of(each).items():
            if field.exclude:
                _check_excluded(each, name, field, decorators)
                continue
            _check_name(each, name, field, by_alias=by_alias)
            if not _has_serializer(name, field, decorators):
                _check_secrets(each, name, field)


def writes_aliases(model: Any) -> bool:
    """Whether a model's fields are written under their aliases: unless they are not read under them."""
    return _config_of(model).get("validate_by_alias") is not False


def _check_name(kind: Any, name: str, field: Any, *, by_alias: bool) -> None:
    written = (by_alias and field.serialization_alias) or name
    if written not in _names_read(name, field, _config_of(kind)):
        raise ConfigurationError(
            f"{kind.__qualname__}.{name} is written as {written!r}, and can't be read under this name.",
            cause="its aliases for validation and for serialization differ",
            next_step=f"set only alias=, which is both; or let validation accept {written!r}, too (AliasChoices, "
            f"validate_by_name); or {OWN_SERIALIZERS}",
        )


def _check_bytes(kind: Any) -> None:
    written, read = (_config_of(kind).get(name, "utf8") for name in ("ser_json_bytes", "val_json_bytes"))
    if written != read:
        raise ConfigurationError(
            f"{kind.__qualname__} writes bytes as {written} and reads them as {read}.",
            next_step="set ser_json_bytes and val_json_bytes in its model_config to the same value, for example 'base64'",
        )


def _check_computed_fields(kind: Any, decorators: Any) -> None:
    extra = _config_of(kind).get("extra") or "ignore"
    computed = list(getattr(decorators, "computed_fields", ()))
    if extra != "ignore" and computed:
        raise ConfigurationError(
            f"{kind.__qualname__}.{computed[0]} is written, but is no field to read: extra={extra!r} "
            f"{'refuses' if extra == 'forbid' else 'would keep it as an additional field of'} what was written.",
            cause="computed fields are part of a model's JSON",
            next_step="make it a plain property, or a field; or set extra='ignore'; or " + OWN_SERIALIZERS,
        )


def _check_excluded(kind: Any, name: str, field: Any, decorators: Any) -> None:
    if decorators is not None and field.is_required() and not decorators.model_validators:
        raise ConfigurationError(
            f"{kind.__qualname__}.{name} is not written, but required: the messages could not be read.",
            cause="the field has exclude=True and no default",
            next_step="give it a default, or write it; or " + OWN_SERIALIZERS,
        )


def _check_secrets(kind: Any, name: str, field: Any) -> None:
    secret = _secret_in(field.annotation, _config_of(kind).get("json_encoders") or {})
    if secret is not None:
        raise ConfigurationError(
            f"{kind.__qualname__}.{name} is a {secret.__name__}, which is written as '**********': its value would be lost.",
            next_step="leave the secret out of the message (exclude=True and a default); or write it in clear text, readable "
            f"for all consumers: @field_serializer({name!r}, when_used='json') that returns its get_secret_value()",
        )


def _has_serializer(name: str, field: Any, decorators: Any) -> bool:
    of_class = (each.info.fields for each in getattr(decorators, "field_serializers", {}).values())
    return any(name in names or "*" in names for names in of_class) or _names_serializer(field.metadata)


def _names_serializer(metadata: Any) -> bool:
    from pydantic import PlainSerializer, WrapSerializer  # noqa: PLC0415  (there are models, so it is installed)

    return any(isinstance(each, PlainSerializer | WrapSerializer) for each in metadata)


def _secret_in(kind: Any, encoders: Mapping[Any, Any]) -> type | None:
    """A secret's class in the annotation of a field, unless something is given that writes it."""
    if get_origin(kind) is type or (get_origin(kind) is Annotated and _names_serializer(kind.__metadata__)):
        return None
    of_alias = getattr(kind, "__value__", None)
    for part in (*get_args(kind), *(() if of_alias is None else (of_alias,))):
        if found := _secret_in(part, encoders):
            return found
    from pydantic import Secret, SecretBytes, SecretStr  # noqa: PLC0415

    kind = get_origin(kind) or kind
    if isinstance(kind, type) and issubclass(kind, Secret | SecretStr | SecretBytes):
        return None if any(base in encoders for base in kind.__mro__) else kind
    return None


def _kinds_in(kind: Any, seen: set[Any]) -> Iterator[Any]:
    """The classes with fields in a type that are not in `seen`, with those in the types of their fields that are written."""
    if get_origin(kind) is type:
        return
    aliased = getattr(kind, "__value__", None)  # `type Names = …`
    if aliased is not None:
        yield from _kinds_in(aliased, seen)
    if isinstance(kind, type) and kind not in seen:
        seen.add(kind)
        fields = fields_of(kind)
        if fields:
            yield kind
        for field in fields.values():
            if not field.exclude:
                yield from _kinds_in(field.annotation, seen)
    for part in get_args(kind):
        yield from _kinds_in(part, seen)


def fields_of(kind: Any) -> Mapping[str, Any]:
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
    """A class's configuration for Pydantic."""
    for name in ("model_config", "__pydantic_config__"):  # the second: of dataclasses and TypedDicts
        if isinstance(found := getattr(model, name, None), Mapping):
            return found
    return {}


def _not_finite(content: Any, is_lost: bool) -> str | None:
    """Where a value has a float that Pydantic has written as `null`, such as `.lines[0].price`; None if there is none.

    `is_lost`: whether the class that the value is in writes NaN and infinities as `null`, which is Pydantic's default.
    """
    if isinstance(content, float):
        return "" if is_lost and not math.isfinite(content) else None
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(content, Mapping):
        parts = ((f"[{key!r}]", part) for key, part in content.items())
    elif isinstance(content, list | tuple | set | frozenset):
        parts = ((f"[{number}]", part) for number, part in enumerate(content))
    elif fields := fields_of(type(content)):
        is_lost = _config_of(type(content)).get("ser_json_inf_nan", "null") == "null"
        parts = ((f".{name}", getattr(content, name, None)) for name, field in fields.items() if not field.exclude)
    for place, part in parts:
        found = _not_finite(part, is_lost)
        if found is not None:
            return place + found
    return None


class Model(Protocol):
    """The methods of a Pydantic model (version 2) that are used here."""

    def model_dump_json(self, *, by_alias: bool, warnings: Literal["error"]) -> str:
        """The model as JSON; `warnings="error"` refuses values that don't have the declared types."""

    @classmethod
    def model_rebuild(cls, *, raise_errors: bool) -> bool | None:
        """Look again for the classes that the model names."""

    @classmethod
    def model_validate_json(cls, json_data: str | bytes) -> Self:
        """A model parsed from JSON."""


M = TypeVar("M", bound=Model)


def model_serializer(model: type[M]) -> Callable[[M, SerializationContext], str]:
    """A serializer that writes what `model_deserializer` reads, as far as the class shows it.

    Fields are written under the names under which they are read: their aliases, if any. Refused are values that don't have the
    declared type, and NaN and infinities where they would become `null`. Other values that Pydantic's JSON changes are not
    noticed: the fields of a subclass that the declared type does not have, a tuple in a field of type Any.

    Raises:
        ConfigurationError: As `check_model`: the class shows that its objects can't be read back.
    """
    by_alias = writes_aliases(model)
    model.model_rebuild(raise_errors=False)
    is_checked: bool = getattr(model, "__pydantic_complete__", True)
    if is_checked:
        check_model(model)

    def serialize(content: M, context: SerializationContext) -> str:
        nonlocal is_checked
        del context
        if not is_checked:  # a class that it names had not been defined yet
            check_model(model)
            is_checked = True
        kind = type(content)
        if kind is not model and not (hasattr(kind, "model_dump_json") and fields_of(kind).keys() == fields_of(model).keys()):
            raise SerializationError(
                f"it is {kind.__qualname__}, not {model.__qualname__}: it would be read back without the fields of its class.",
                next_step=f"pass an object of the class {model.__qualname__}, or make the topic of models with a union of both",
            )
        try:
            written = content.model_dump_json(by_alias=by_alias, warnings="error")
        except ValueError as error:  # Pydantic's PydanticSerializationError
            raise _unwritable(content, error) from error
        if "null" in written and (place := _not_finite(content, is_lost=True)) is not None:
            raise SerializationError(
                f"{type(content).__qualname__}{place} is no finite number, and would be written as null.",
                next_step="leave out what is no number (None), or set ser_json_inf_nan='strings' in the class's model_config",
            )
        return written

    return serialize


def model_deserializer(model: type[M]) -> Callable[[bytes, SerializationContext], M]:
    """A deserializer for the JSON of one kind of Pydantic model."""

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
            content.model_dump_json(include={name}, warnings="error")
        except Exception:  # noqa: BLE001  (whatever fails here has failed before)
            value = getattr(content, name, None)
            inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
            for place, part in [("", value), *((f"[{key!r}]", part) for key, part in inner)]:
                path, found = _failing_field(part)
                if path:
                    return f".{name}{place}{path}", found
            return f".{name}", value
    return "", content
