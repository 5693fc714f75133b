"""What the classes of a Pydantic model show: fields whose value is not written, or can't be read as it is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints

from dualwrite.errors import ConfigurationError

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
