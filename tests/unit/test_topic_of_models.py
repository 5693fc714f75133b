"""Topic.of_models: what JSON carries is read back equal; what it shows that it can't carry is refused, with the next step."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import math
import pickle
import uuid
from fractions import Fraction
from typing import Annotated, Any, Generic, Literal, NotRequired, TypeVar
from zoneinfo import ZoneInfo

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    computed_field,
)
from typing_extensions import TypedDict

from dualwrite import Topic
from dualwrite.errors import ConfigurationError, SerializationError
from fixtures.tables import table

T = TypeVar("T")
NAN, INFINITY = float("nan"), float("inf")
BERLIN = ZoneInfo("Europe/Berlin")


class Unknown:
    """A class that JSON knows nothing of."""

    def __repr__(self) -> str:
        return "UNKNOWN"  # the same in each process: it names a case


UNKNOWN = Unknown()


class Item(BaseModel):
    name: str = "x"


class Chair(Item):
    legs: int = 4


class Login(BaseModel):
    user: str = ""
    tokens: dict[str, list[SecretStr | None]] = {}


class Priced(BaseModel):
    price: float | None = None


class Line(BaseModel):
    model_config = ConfigDict(extra="forbid")
    number: int = 2

    @computed_field
    def total(self) -> int:
        return self.number * 3


class Kept(Line):
    model_config = ConfigDict(extra="allow")


@pydantic.dataclasses.dataclass(config=ConfigDict(extra="forbid"))
class DataLine:
    number: int = 2

    @computed_field
    def total(self) -> int:
        return self.number * 3


class Unwritten(BaseModel):
    note: str = Field(exclude=True)


def of(kind: Any, default: Any = None, **config: Any) -> type[BaseModel]:
    """A model `Order` with one field `item`."""
    made: type[BaseModel] = pydantic.create_model("Order", __config__=ConfigDict(**config), item=(kind, default))
    return made


def sent(topic: Topic[Any, Any], value: Any, key: Any = None) -> Any:
    """What a consumer of the topic gets; the record itself is only kept in memory."""
    kept: list[Any] = []

    class Sends:
        def send(self, _topic: str, value: Any, **_: Any) -> None:
            kept.append(value)

    topic.send(Sends(), value, key=key)  # type: ignore[arg-type]
    return topic.deserialized("value", kept[0].encode())


@table(
    ("model", "field"),
    [
        (Login, r"Login\.tokens is a SecretStr"),
        (of(pydantic.SecretBytes | None), r"Order\.item is a SecretBytes"),
        (of(pydantic.Secret[dt.date] | None), r"Order\.item is a Secret"),
        (of(list[Login] | int), r"Login\.tokens is a SecretStr"),
        (pydantic.RootModel[SecretStr], r"RootModel\[SecretStr\]\.root is a SecretStr"),
        (Line, r"(?s)Line\.total .*extra='forbid' refuses"),
        (of(dict[str, Line | None]), r"(?s)Line\.total .*extra='forbid' refuses"),
        (of(DataLine), r"(?s)DataLine\.total .*extra='forbid' refuses"),
        (Kept, r"(?s)Kept\.total .*extra='allow' would keep"),
        (of(bytes, ser_json_bytes="base64"), r"Order writes bytes as base64 and reads them as utf8"),
        (Unwritten, r"Unwritten\.note is not written, but required"),
    ],
)
def test_a_class_that_shows_that_it_can_not_be_read_back_is_refused(model: type[BaseModel], field: str) -> None:
    with pytest.raises(ConfigurationError, match=field) as raised:
        Topic.of_models("orders", model)
    assert raised.value.next_step


class Shown(BaseModel):
    token: SecretStr
    other: Annotated[SecretStr, PlainSerializer(lambda secret: secret.get_secret_value(), when_used="json")]

    @pydantic.field_serializer("token", when_used="json")
    def shown(self, token: SecretStr) -> str:
        return token.get_secret_value()


class Whole(BaseModel):
    model_config = ConfigDict(extra="forbid")
    number: int = Field(serialization_alias="n")

    @computed_field
    def total(self) -> int:
        return self.number * 3

    @pydantic.model_serializer
    def written(self) -> dict[str, Any]:
        return {"number": self.number}


class Blob(BaseModel):
    data: bytes = b""


class Color(enum.Enum):
    RED = 1


class Keys(TypedDict):
    a: NotRequired[Item]


@dataclasses.dataclass(eq=False)
class Plain:
    price: float
    items: list[Item]
    note: Annotated[str, Field(exclude=True)] = ""


class Strange(BaseModel):
    """Equal to nothing; its own == says nothing about what is read back."""

    price: float

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


class Box(BaseModel, Generic[T]):
    content: T


class Internal(BaseModel):
    number: int
    note: str = Field("", exclude=True)
    _cached: list[int] = pydantic.PrivateAttr(default_factory=list)

    @computed_field
    def total(self) -> int:
        return self.number * 3


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, dt.date]


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"


def internal() -> Internal:
    made = Internal(number=2, note="ours")
    made._cached.append(1)
    return made


EXACT: list[tuple[Any, Any]] = [
    (Shown, Shown(token=SecretStr("s3"), other=SecretStr("s4"))),
    (Whole, Whole(number=2)),
    (Internal, internal()),
    (Open, Open(day=dt.date(2026, 1, 2))),
    (Strange, Strange(price=1.5)),
    (Box[int], Box[int](content=1)),
    (Box[int], Box(content=1)),
    (pydantic.RootModel[list[Item]], pydantic.RootModel[list[Item]]([Item()])),
]
EXACT_FIELDS: list[tuple[Any, Any, dict[str, Any]]] = [
    (float, NAN, {"ser_json_inf_nan": "strings"}),
    (float, -INFINITY, {"ser_json_inf_nan": "constants"}),
    (bytes, b"\xff\0", {"ser_json_bytes": "base64", "val_json_bytes": "base64"}),
    (Item | Chair, Chair(), {}),
    (Annotated[Cat | Dog, Field(discriminator="kind")], Dog(), {}),
    (decimal.Decimal, decimal.Decimal("0.10"), {}),
    (dt.datetime, dt.datetime(2026, 3, 29, 2, 30, tzinfo=BERLIN), {}),  # an hour that is skipped there
    (dt.datetime, dt.datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=1), {}),  # and one that is repeated
    (dt.datetime, dt.datetime(2026, 7, 1, 12), {}),  # noqa: DTZ001  (local time is allowed, too)
    (dt.time, dt.time(2, 30, tzinfo=dt.UTC), {}),
    (dt.timedelta, dt.timedelta(days=-3, microseconds=1), {}),
    (set[int], {1, 2}, {}),
    (tuple[int, ...], (1, 2), {}),
    (dict[int, Color], {1: Color.RED}, {}),
    (Keys, {"a": Item()}, {}),
    (Plain, Plain(1, [Item()], "ours"), {}),
    (Any, {"a": [1, 2.5, None, "b"]}, {}),
    (int, 2**200, {}),
    (pydantic.SerializeAsAny[Item], Item(), {}),
]
EXACT += [((made := of(kind, **config)), made.model_construct(item=item)) for kind, item, config in EXACT_FIELDS]


@table(("model", "value"), EXACT, ids=lambda given: repr(given)[:40])
def test_what_json_carries_is_sent(model: Any, value: Any) -> None:
    sent(Topic.of_models("orders", model), value)


@pytest.mark.filterwarnings("ignore:`json_encoders` is deprecated")
def test_a_secret_with_an_encoder_is_sent() -> None:
    model = of(SecretStr, json_encoders={SecretStr: lambda secret: secret.get_secret_value()})
    assert sent(Topic.of_models("orders", model), model(item="s3")) == model(item="s3")


REFUSED: list[tuple[Any, Any, dict[str, Any], str]] = [
    (float | None, NAN, {}, r"(?s)Order\.item is no finite number.*as null.*ser_json_inf_nan"),
    (float, INFINITY, {}, r"Order\.item is no finite number"),
    (list[Priced], [Priced(), Priced(price=-INFINITY)], {}, r"Order\.item\[1\]\.price is no finite number"),
    (dict[str, Plain], {"a": Plain(NAN, [])}, {}, r"Order\.item\['a'\]\.price is no finite number"),
    (bytes, b"\xff\0", {}, r"(?s)Order\.item can't be written .*utf-8.*val_json_bytes"),
    (list[Blob], [Blob(), Blob(data=b"\xff")], {}, r"(?s)Order\.item\[1\]\.data can't be written .*utf-8.*val_json_bytes"),
    (Any, [UNKNOWN], {}, r"Order\.item can't be written as JSON"),
    (str, 5, {}, r"Order\.item can't be written as JSON"),
    (int | None, "5", {}, r"Order\.item can't be written as JSON"),
]


@table(("kind", "item", "config", "text"), REFUSED, ids=lambda given: repr(given)[:40])
def test_what_was_never_validated_or_has_no_json_is_refused(kind: Any, item: Any, config: dict[str, Any], text: str) -> None:
    model = of(kind, **config)
    with pytest.raises(SerializationError, match=text) as raised:
        sent(Topic.of_models("orders", model), model.model_construct(item=item))
    assert (raised.value.topic, raised.value.field) == ("orders", "value")
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


@pytest.mark.parametrize(
    ("model", "value", "text"),
    [
        (Item, Chair(), "it is Chair, not Item: it would be read back without the fields of its class"),
        (Item, Priced(), "it is Priced, not Item"),
        (Item, {"name": "x"}, "it is dict, not Item"),
    ],
)
def test_other_objects_are_refused(model: Any, value: Any, text: str) -> None:
    with pytest.raises(SerializationError, match=text):
        sent(Topic.of_models("orders", model), value)


def test_keys_are_text() -> None:
    topic: Topic[Any, Any] = Topic.of_models("orders", Item)
    sent(topic, Item(), key="17")
    for key in (b"17", 17):
        with pytest.raises(SerializationError, match=r"(?s)key .* can't be serialized: it is (bytes|int), .*str\(key\)"):
            sent(topic, Item(), key=key)


# --- any model, any value -----------------------------------------------------------------------------------------------------

ZONES = st.sampled_from([None, dt.UTC, dt.timezone(dt.timedelta(hours=-5, minutes=-30))])
SAFE: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (str, st.text()),
    (int, st.integers()),
    (bool, st.booleans()),
    (float, st.floats(allow_nan=False, allow_infinity=False)),
    (decimal.Decimal, st.decimals(allow_nan=False, allow_infinity=False)),
    (dt.datetime, st.datetimes(timezones=ZONES)),
    (dt.timedelta, st.timedeltas(min_value=dt.timedelta(days=-9999), max_value=dt.timedelta(days=9999))),
    (uuid.UUID, st.uuids()),
    (Color, st.sampled_from(Color)),
    (Item, st.builds(Item, name=st.text())),
    (Priced, st.builds(Priced, price=st.none() | st.floats(allow_nan=False, allow_infinity=False))),
    (Cat | Dog, st.builds(Cat) | st.builds(Dog)),
]
"""Types, and values of them that JSON carries: they must be sent."""


def kept_in(part: tuple[Any, Any]) -> st.SearchStrategy[tuple[Any, Any]]:
    """A type and its values as they are, and in containers."""
    kind, values = part
    named: Any = pydantic.create_model("Inner", inner=(kind, ...))
    return st.sampled_from(
        [
            (kind, values),
            (list[kind], st.lists(values, max_size=3)),
            (dict[str, kind], st.dictionaries(st.text(max_size=3), values, max_size=3)),
            (tuple[kind, int], st.tuples(values, st.integers())),
            (named, st.builds(named.model_construct, inner=values)),
        ]
    )


SAFE_MODELS = st.lists(st.sampled_from(SAFE).flatmap(kept_in), min_size=1, max_size=3)


def made(data: st.DataObject, parts: list[tuple[Any, Any]]) -> BaseModel:
    kinds: dict[str, Any] = {f"part{number}": (kind, ...) for number, (kind, _) in enumerate(parts)}
    model: type[BaseModel] = pydantic.create_model("Made", **kinds)
    return model.model_construct(**{f"part{number}": data.draw(values) for number, (_, values) in enumerate(parts)})


def text_of(value: Any) -> Any:
    """A text for everything that a value consists of; independent of the classes' `==`, and equal for NaN and NaN."""
    if isinstance(value, BaseModel):
        return type(value).__qualname__, text_of(dict(value))
    if isinstance(value, dict):
        return {repr(key): text_of(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [text_of(part) for part in value]
    if isinstance(value, dt.datetime):
        return "moment", repr(value.replace(tzinfo=None, fold=0)), value.utcoffset()  # == ignores fold, too
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return repr(Fraction(value))  # 1 and 1.0 are equal
    return repr(value)


@given(st.data(), SAFE_MODELS)
def test_any_model_of_values_that_json_carries_is_read_back_as_it_was(data: st.DataObject, parts: Any) -> None:
    value = made(data, parts)
    assert text_of(sent(Topic.of_models("orders", type(value)), value)) == text_of(value)
