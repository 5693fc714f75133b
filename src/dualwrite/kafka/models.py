"""Pydantic models as JSON: serializer and deserializer for `Topic`. What would be read back as another value is refused."""

from __future__ import annotations

import itertools
import math
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    NamedTuple,
    Protocol,
    Self,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)
from uuid import UUID

from dualwrite.errors import ConfigurationError, SerializationError

if TYPE_CHECKING:
    from confluent_kafka.serialization import SerializationContext


OWN_SERIALIZERS: Final = "give Topic a serializer and a deserializer of your own"

_MISSING: Final = type("Missing", (), {"__slots__": (), "__repr__": lambda _: "nothing"})()
_TRUSTED: Final = frozenset({str, bytes, int, bool, float, Decimal, type(None), UUID, date, datetime, time, timedelta})
"""Two values of the same one of these types are the same if `==` says so. (If it does not, they may be, too: NaN.)"""


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


class Difference(NamedTuple):
    """Where a value differs from what is read back, such as `.lines[0].price`; what is missing is shown as "nothing"."""

    path: str
    sent: Any
    read: Any


class Comparison:
    """Compares values field by field, whatever the `==` of their classes leaves out or adds.

    Not compared: private attributes and fields with `exclude=True`, which are by their definition no part of the JSON. The same
    are also: NaN and NaN, moments that are the same instant, and numbers that are equal (1 and 1.0, but not 1 and True).

    It remembers the fields of each class that it has seen.
    """

    def __init__(self) -> None:
        self._names: dict[type, tuple[str, ...]] = {}

    def difference(self, sent: Any, read: Any) -> Difference | None:
        """The first difference, or None if the values are the same."""
        return self._first([("", sent, read)], "{}")

    def _first(self, pairs: Iterable[tuple[Any, Any, Any]], place: str) -> Difference | None:
        """The first difference in pairs of values, each with its name, key or number, which `place` makes part of the path."""
        for part, sent, read in pairs:
            kind = type(sent)
            if sent is read or (kind is type(read) and kind in _TRUSTED and sent == read):
                continue
            found = self._within(sent, read)
            if found is not None:
                return found._replace(path=place.format(part) + found.path)
        return None

    def _within(self, sent: Any, read: Any) -> Difference | None:
        kind = type(sent)
        names = self._names.get(kind)
        if names is None:
            names = self._names[kind] = _names_of(kind)
        if names:
            is_alike = _class_of(sent) is _class_of(read)
            pairs, place = _of_objects(sent, read, names), ".{}"
        elif isinstance(sent, list | tuple) and isinstance(read, list | tuple):
            is_alike = len(sent) == len(read) and isinstance(sent, list) is isinstance(read, list)
            pairs, place = zip(itertools.count(), sent, read), "[{}]"
        elif isinstance(sent, Mapping) and isinstance(read, Mapping):
            is_alike = True
            pairs, place = _of_mappings(sent, read), "[{!r}]"
        else:
            return None if _is_same(sent, read) else Difference("", sent, read)
        return self._first(pairs, place) if is_alike else Difference("", sent, read)


def _of_objects(sent: Any, read: Any, names: Iterable[str]) -> Iterable[tuple[Any, Any, Any]]:
    """The fields of two objects of the same class."""
    pairs = [(name, getattr(sent, name, _MISSING), getattr(read, name, _MISSING)) for name in names]
    extra, extra_read = getattr(sent, "__pydantic_extra__", None) or {}, getattr(read, "__pydantic_extra__", None) or {}
    return [*pairs, *_of_mappings(extra, extra_read)] if extra or extra_read else pairs


def _of_mappings(sent: Mapping[Any, Any], read: Mapping[Any, Any]) -> Iterable[tuple[Any, Any, Any]]:
    keys = sent if sent.keys() == read.keys() else {**sent, **read}
    return [(key, sent.get(key, _MISSING), read.get(key, _MISSING)) for key in keys]


def _names_of(kind: type) -> tuple[str, ...]:
    """The fields of a model or a dataclass that are part of its JSON; none for any other class."""
    known = fields_of(kind) if is_dataclass(kind) or hasattr(kind, "__pydantic_fields__") else {}
    excluded = {name for name, field in known.items() if field.exclude}
    names = [field.name for field in fields(kind)] if is_dataclass(kind) else list(known)
    return tuple(name for name in names if name not in excluded)


def _class_of(content: Any) -> Any:
    """The class; `Box[int](…)` and `Box(…)` are of the same generic one, as for Pydantic's own `==`."""
    kind = type(content)
    generic: Mapping[str, Any] = getattr(kind, "__pydantic_generic_metadata__", {})
    return generic.get("origin") or kind


def _is_same(sent: Any, read: Any) -> bool:
    if isinstance(sent, datetime) and isinstance(read, datetime):
        return _instant(sent) == _instant(read)
    if isinstance(sent, time) and isinstance(read, time):
        return (sent.replace(tzinfo=None), sent.utcoffset()) == (read.replace(tzinfo=None), read.utcoffset())
    if isinstance(sent, bool) is not isinstance(read, bool):
        return False
    try:
        if isinstance(sent, float | Decimal) and type(sent) is type(read) and sent != sent:  # noqa: PLR0124  (NaN)
            return bool(read != read)  # noqa: PLR0124
        return bool(sent == read)
    except Exception:  # noqa: BLE001  (a class that can't compare can't show that nothing was lost)
        return False


def _instant(moment: datetime) -> tuple[bool, timedelta]:
    """Whether a moment has a time zone, and the moment itself, in UTC if so.

    Between two zones, Python's `==` is False for each moment in an hour that a change of clocks skips or repeats.
    """
    offset = moment.utcoffset()
    since = moment.replace(tzinfo=None) - datetime.min  # noqa: DTZ901  (both without a time zone)
    return offset is not None, since if offset is None else since - offset


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
