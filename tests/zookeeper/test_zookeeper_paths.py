"""The names of the nodes of ids."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kazoo.protocol.paths import normpath

from dualwrite.errors import InvalidTransactionalIdError
from dualwrite.stores.key_values import ROWS
from dualwrite.stores.zookeeper.paths import id_of, is_ours, node_name, path_of
from fixtures.tables import table

ids = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@table(
    ("transactional_id", "name"),
    [
        ("orders", "orders"),
        ("orders~1", "orders~1"),
        ("a/b", "a%2Fb"),
        ("100%", "100%25"),
        (".", "%2E"),
        ("..", "%2E%2E"),
        ("...", "..."),
        (".hidden", ".hidden"),
        ("Bücher und 本", "Bücher und 本"),
        ("a\nb", "a%0Ab"),
        ("😀", "%F0%9F%98%80"),
        ("\ue000", "%EE%80%80"),
        ("a%2Fb", "a%252Fb"),
    ],
)
def test_node_names_of_ids(transactional_id: str, name: str) -> None:
    assert node_name(transactional_id) == name
    assert id_of(name) == transactional_id


@settings(deadline=None)
@given(ids)
def test_every_id_survives_a_round_trip(transactional_id: str) -> None:
    name = node_name(transactional_id)
    assert id_of(name) == transactional_id
    assert "/" not in name
    assert normpath(path_of((ROWS, transactional_id))) == path_of((ROWS, transactional_id))
    assert is_ours(path_of((ROWS, transactional_id)))


@table("name", ["a%zz", "a%2fb", "%61", "%", "%FF", "", "a/b"])
def test_names_that_belong_to_no_id(name: str) -> None:
    assert id_of(name) is None


@pytest.mark.parametrize("transactional_id", ["", "a\ud800"])
def test_invalid_ids(transactional_id: str) -> None:
    with pytest.raises(InvalidTransactionalIdError):
        node_name(transactional_id)


def test_paths_of_dualwrite_are_recognized() -> None:
    assert is_ours("/kafka_transaction_state")
    assert is_ours("/kafka_transaction_state/a")
    assert not is_ours("/kafka_transaction_states")
    assert not is_ours("/")
