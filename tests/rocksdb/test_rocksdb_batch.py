"""Read-your-own-writes: a batch against a dict, over several column families, in both modes."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rocksdb_scene import ID, STATE, make_database
from rocksdict import Rdict

from dualwrite.errors import UsageError
from dualwrite.stores.rocksdb import RocksDBStore, TransactionBatch
from dualwrite.stores.rocksdb.rocksdb_batch import Encoding, merged
from fixtures.pace import LIMIT
from fixtures.tables import table

FAMILIES = ("default", "customers", "orders")
BYTES = st.binary(max_size=3)
KEYS = st.one_of(
    BYTES,
    st.text(max_size=3),
    st.integers(),
    st.integers(-300, 300),
    st.floats(allow_nan=False),
    st.booleans(),
)
VALUES = st.one_of(KEYS, st.none(), st.lists(st.integers(), max_size=2))


def steps(keys: Any, values: Any) -> Any:
    family = st.sampled_from(FAMILIES)
    # keys from a small pool, so that they meet
    return st.lists(keys, min_size=1, max_size=6).flatmap(
        lambda pool: st.lists(
            st.tuples(
                st.sampled_from(["put", "delete", "commit", "roll back", "direct"]), family, st.sampled_from(pool), values
            ),
            max_size=25,
        )
    )


class Model:
    """The content of each family, by type and value of the key: in a dict 1, 1.0 and True are the same key."""

    def __init__(self) -> None:
        self.families: dict[str, dict[Any, tuple[Any, Any]]] = {name: {} for name in FAMILIES}

    def copy(self) -> Model:
        other = Model()
        other.families = {name: dict(rows) for name, rows in self.families.items()}
        return other

    @staticmethod
    def name(key: Any) -> Any:
        return (type(key), math.copysign(1, key), key) if isinstance(key, float) else (type(key), key)


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other


def check(batch: TransactionBatch, model: Model, rdict: Rdict) -> None:
    for name, rows in model.families.items():
        family = batch.column_family(name)
        shown = list(family.items())
        assert {Model.name(key): (key, value) for key, value in shown} == rows
        assert len(shown) == len(rows)
        assert list(family.items(backwards=True)) == shown[::-1]
        assert [*family] == [key for key, _ in shown]
        assert list(family.values()) == [value for _, value in shown]
        for place, (key, value) in enumerate(shown):
            assert same(family[key], value)
            assert same(batch.get(key, "default", name), value)
            assert key in family
            assert list(family.items(from_key=key)) == shown[place:]
            assert list(family.items(from_key=key, backwards=True)) == shown[place::-1]


class Scene:
    """One database for many examples, emptied between them."""

    def __init__(self, path: Path, *, raw: bool) -> None:
        self.rdict = make_database(path, raw=raw)
        self.families = {name: self.rdict.get_column_family(name) for name in FAMILIES}
        self.store = RocksDBStore(self.rdict)
        self.number = 0

    def empty(self) -> None:
        for family in self.families.values():
            for key in list(family.keys()):
                del family[key]
        self.claim = self.store.claim(ID, "tests", timeout=LIMIT)

    def batch(self) -> TransactionBatch:
        self.empty()
        return self.store.begin(self.claim).handle

    def run(self, script: list[tuple[str, str, Any, Any]]) -> None:
        self.empty()
        committed = Model()
        transaction = self.store.begin(self.claim)
        model = committed.copy()
        for step, family, key, value in script:
            batch = transaction.handle
            match step:
                case "put":
                    batch.put(key, value, cf=family)
                    model.families[family][Model.name(key)] = (key, value)
                case "delete":
                    batch.column_family(family).delete(key)
                    model.families[family].pop(Model.name(key), None)
                    assert key not in batch.column_family(family)
                case "direct":  # by another writer, or by the user outside of the transaction
                    self.families[family][key] = value
                    committed.families[family][Model.name(key)] = (key, value)
                    changed = {place for place, _ in batch.column_family(family)._entries.items()}
                    if batch.encoding.key(key)[1] not in changed:
                        model.families[family][Model.name(key)] = (key, value)
                case _:
                    check(batch, model, self.rdict)
                    if step == "commit":
                        self.number += 1
                        transaction.record(STATE, generation=0, transaction_number=self.number)
                        transaction.commit()
                        committed = model
                    transaction.rollback()
                    transaction = self.store.begin(self.claim)
                    model = committed.copy()
        check(transaction.handle, model, self.rdict)
        transaction.rollback()

    def close(self) -> None:
        self.store.close()
        for family in self.families.values():
            family.close()
        self.rdict.close()


@pytest.fixture(scope="module")
def raw_scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with closing(Scene(tmp_path_factory.mktemp("raw") / "db", raw=True)) as scene:
        yield scene


@pytest.fixture(scope="module")
def typed_scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with closing(Scene(tmp_path_factory.mktemp("typed") / "db", raw=False)) as scene:
        yield scene


_SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@_SETTINGS
@given(script=steps(BYTES, BYTES))
def test_a_raw_batch_behaves_like_a_dict(raw_scene: Scene, script: list[Any]) -> None:
    raw_scene.run(script)


@pytest.mark.slow
@_SETTINGS
@given(script=steps(KEYS, VALUES))
def test_a_typed_batch_behaves_like_a_dict(typed_scene: Scene, script: list[Any]) -> None:
    typed_scene.run(script)


@_SETTINGS
@given(keys=st.lists(st.one_of(KEYS, st.floats()), unique_by=lambda key: repr((type(key), key))))
def test_keys_are_ordered_as_in_the_database(typed_scene: Scene, keys: list[Any]) -> None:
    typed_scene.empty()
    family = typed_scene.families["default"]
    for key in keys:
        family[key] = 1
    encoding = Encoding(raw=False)
    places = [encoding.key(key)[1] for key in family.keys()]  # noqa: SIM118  (a Rdict can't be iterated over)
    assert places == sorted(places)


# --- input ----------------------------------------------------------------------------------------------------------------


class Colour(enum.IntEnum):
    RED = 1


class Name(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "another"


@pytest.fixture
def typed(typed_scene: Scene) -> TransactionBatch:
    return typed_scene.batch()


@pytest.fixture
def raw(raw_scene: Scene) -> TransactionBatch:
    return raw_scene.batch()


@table("given_", ["text", 1, 1.5, True, None, bytearray(b"x"), memoryview(b"x"), ["x"]])
def test_raw_mode_accepts_bytes_only(raw: TransactionBatch, given_: Any) -> None:
    for use in (
        lambda: raw.put(given_, b"1"),
        lambda: raw.put(b"1", given_),
        lambda: raw.get(given_),
        lambda: raw.delete(given_),
        lambda: given_ in raw,
        lambda: raw.items(from_key=given_) if given_ is not None else raw.get(given_),
    ):
        with pytest.raises(UsageError, match=f"must be bytes, not {type(given_).__name__}"):
            use()
    assert b"1" not in raw


@table("key", [None, (1, 2), ["a"], bytearray(b"x"), object()])
def test_keys_that_rocksdict_does_not_support(typed: TransactionBatch, key: Any) -> None:
    for use in (lambda: typed.put(key, 1), lambda: typed.get(key), lambda: typed.delete(key)):
        with pytest.raises(UsageError, match="can't be a"):
            use()


def test_put_refuses_values_that_cannot_be_stored(typed: TransactionBatch) -> None:
    with pytest.raises(UsageError, match="UTF-8"):
        typed.put("\ud800", 1)
    with pytest.raises(UsageError, match="UTF-8"):
        typed.put("a", "\ud800")
    with pytest.raises(AttributeError, match="pickle"):
        typed.put("a", lambda: 1)
    assert "a" not in typed


def test_a_value_is_encoded_when_it_is_put(typed: TransactionBatch) -> None:
    value = [1]
    typed["a"] = value
    value.append(2)
    assert typed["a"] == [1]
    typed["a"].append(3)
    assert typed["a"] == [1]


def test_subclasses_are_stored_as_plain_values(typed: TransactionBatch) -> None:
    typed[Colour.RED] = Colour.RED
    typed[Name("name")] = Name("value")
    assert [(type(key), key, type(value), value) for key, value in typed.items()] == [
        (str, "name", str, "value"),
        (int, 1, int, 1),
    ]
    assert typed.get(1) == 1
    assert True not in typed


def test_none_is_a_value(typed: TransactionBatch) -> None:
    typed["a"] = None
    assert "a" in typed
    assert typed["a"] is None
    assert typed.get("a", "default") is None
    with pytest.raises(KeyError):
        _ = typed["b"]


def test_the_dict_interface(raw: TransactionBatch) -> None:
    raw[b"a"] = b"1"
    assert b"a" in raw
    assert raw[b"a"] == b"1"
    del raw[b"a"]
    del raw[b"a"]
    assert b"a" not in raw
    assert raw.get(b"a", b"default") == b"default"
    orders = raw.column_family("orders")
    assert orders is raw.column_family("orders")
    assert orders.name == "orders"
    orders[b"after"] = b"2"
    assert dict(raw.items("orders")) == {b"after": b"2"}
    with pytest.raises(KeyError):
        _ = orders[b"before"]


def test_an_iteration_shows_changes_made_before_it_began(raw: TransactionBatch) -> None:
    raw[b"a"] = raw[b"b"] = b"1"
    items = raw.items()
    raw[b"c"] = b"1"
    del raw[b"b"]
    assert list(items) == [(b"a", b"1"), (b"b", b"1")]


def test_an_unknown_order_is_refused() -> None:
    encoding = Encoding(raw=True)
    with pytest.raises(UsageError, match="a custom order"):
        list(merged(iter([(b"b", b""), (b"a", b"")]), {}, encoding))
