"""Ways to break a store's positions, each a change of those in SQL: the conformance suite must detect every one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import pytest
from sqlalchemy import Connection, bindparam, delete, func, literal, select, update

from dualwrite.errors import ClaimTimeoutError, DualWriteError, PositionMovedError, StoreUnavailableError
from dualwrite.stores.positions import Move, check_expected
from dualwrite.stores.sql import sql_keeping as sql
from dualwrite.stores.sql.sql_keeping import SqlPositions
from dualwrite.stores.sql.tables import position_table as t
from dualwrite.testing.stores import PositionConformance, StoreScene

Break = Callable[[pytest.MonkeyPatch], None]

_EXPECTED: Final = t.c.next_offset == bindparam("expected")
_EXPECTED_ID: Final = t.c.topic_id == bindparam("expected_id")
_ANY: Final = bindparam("expected").is_not(None)
_ANY_ID: Final = bindparam("expected_id").is_not(None)
_VALUES: Final = {"next_offset": bindparam("next"), "topic_id": bindparam("next_id"), "updated_at": bindparam("now")}
_move = sql._move
_forget = SqlPositions.forget
_reset = SqlPositions.reset


def statement(name: str, changed: Any) -> Break:
    return lambda monkeypatch: monkeypatch.setattr(sql, name, changed)


def moving(changed: Callable[[Connection, str, Move], None]) -> Break:
    return lambda monkeypatch: monkeypatch.setattr(sql, "_move", changed)


def method(name: str, changed: Callable[..., Any]) -> Break:
    return lambda monkeypatch: monkeypatch.setattr(SqlPositions, name, changed)


def stored(connection: Connection, group_id: str, one: Move) -> Any:
    where = {"group": group_id, "of_topic": one.after.topic, "of_partition": one.after.partition}
    row = connection.execute(sql._READ_ONE, where).first()
    return None if row is None else sql._position(row)


def read_then_written(connection: Connection, group_id: str, one: Move) -> None:
    """A lost update: compared in the client, and written whatever is there by then."""
    found = stored(connection, group_id, one)
    check_expected(group_id, one, found)
    time.sleep(0.05)
    where = (t.c.group_id == group_id, t.c.topic == one.after.topic, t.c.partition_number == one.after.partition)
    connection.execute(update(t).where(*where).values(next_offset=one.after.offset))


def all_of_the_group_written(connection: Connection, group_id: str, one: Move) -> None:
    """A lost update: what was read of the group's other partitions is written again, in the order of their numbers."""
    rows = connection.execute(sql._READ, {"group": group_id})
    found = sorted(map(sql._position, rows), key=lambda each: each.partition)
    time.sleep(0.05)
    for position in found:
        if position.key == one.key:
            _move(connection, group_id, one)
        else:
            where = (t.c.group_id == group_id, t.c.topic == position.topic, t.c.partition_number == position.partition)
            connection.execute(update(t).where(*where).values(next_offset=position.offset))


def without_expectation(connection: Connection, group_id: str, one: Move) -> None:
    """A first position that replaces what is there."""
    _move(connection, group_id, Move(stored(connection, group_id, one), one.after) if one.before is None else one)


def made_if_missing(connection: Connection, group_id: str, one: Move) -> None:
    try:
        _move(connection, group_id, one)
    except PositionMovedError as error:
        if error.found is not None:
            raise
        _move(connection, group_id, Move(None, one.after))


def never_back(connection: Connection, group_id: str, one: Move) -> None:
    if one.before is None or one.after.offset >= one.before.offset:
        _move(connection, group_id, one)


def only_the_first(self: SqlPositions, transaction: Any, group_id: str, moves: Iterable[Move]) -> None:
    for one in list(moves)[:1]:
        with transaction.own_statements() as connection:
            _move(connection, group_id, one)


def one_by_one(self: SqlPositions, group_id: str, moves: Iterable[Move]) -> None:
    for one in moves:
        _reset(self, group_id, [one])


def unconditional(self: SqlPositions, group_id: str, moves: Iterable[Move]) -> None:
    found = self.read(group_id)
    _reset(self, group_id, [Move(found.get(one.key), one.after) for one in moves])


def forgotten_twice(self: SqlPositions, group_id: str) -> int:
    return _forget(self, group_id) or 1


def only_one_partition() -> Any:
    return delete(t).where(sql._OF_GROUP, t.c.partition_number == 0)


MUTANTS: Final[dict[str, Break]] = {
    "the offset is not compared": statement("_MOVE", update(t).where(*sql._OF_ONE, _ANY, _EXPECTED_ID).values(_VALUES)),
    "the topic's id is not compared": statement("_MOVE", update(t).where(*sql._OF_ONE, _EXPECTED, _ANY_ID).values(_VALUES)),
    "the topic's id is not stored": statement(
        "_MOVE",
        update(t)
        .where(*sql._OF_ONE, _EXPECTED, _EXPECTED_ID, bindparam("next_id").is_not(None))
        .values({name: value for name, value in _VALUES.items() if name != "topic_id"}),
    ),
    "a position is only moved forwards": moving(never_back),
    "a first position replaces what is there": moving(without_expectation),
    "a missing position is made": moving(made_if_missing),
    "only the first of several moves": method("move", only_the_first),
    "a reset moves one after the other": method("reset", one_by_one),
    "a reset has no condition": method("reset", unconditional),
    "forget leaves rows": statement("_DELETE", only_one_partition()),
    "forget removes other groups": statement(
        "_DELETE", delete(t).where(t.c.group_id.startswith(bindparam("group"), autoescape=False))
    ),
    "forget counts what is not there": method("forget", forgotten_twice),
    "groups are read by prefix": statement(
        "_READ", select(t).where(func.substr(t.c.group_id, 1, func.length(bindparam("group"))) == bindparam("group"))
    ),
    "groups are not chosen by their prefix": statement(
        "_GROUPS", select(t.c.group_id).where(bindparam("length") > literal(-1), bindparam("prefix").is_not(None)).distinct()
    ),
}

TESTS: Final = (
    ("test_a_rollback_moves_no_position", {}),
    ("test_a_move_from_another_position_is_refused", {"begins_at": None}),
    ("test_a_move_from_another_position_is_refused", {"begins_at": 4}),
    ("test_a_move_from_another_position_is_refused", {"begins_at": 6}),
    ("test_a_move_from_a_missing_position_is_refused", {}),
    ("test_a_move_from_another_topic_of_the_same_name_is_refused", {}),
    ("test_several_partitions_move_together", {}),
    ("test_groups_are_independent", {}),
    ("test_a_reset_moves_all_or_none", {}),
    ("test_a_group_is_forgotten", {}),
    ("test_a_position_is_committed_with_its_transaction", {}),
)
"""Those before the last one leave no rows of the scene's user behind."""


def verdict(scene: StoreScene, name: str, arguments: dict[str, Any]) -> bool:
    """Whether a test of the suite accepts the store."""
    try:
        getattr(PositionConformance(), name)(scene, **arguments)
    except (ClaimTimeoutError, StoreUnavailableError):
        raise  # the machine or the server, not the mutant
    except (AssertionError, pytest.fail.Exception, DualWriteError):
        return False
    return True


def test_the_suite_accepts_the_real_positions(sqlite_scene: StoreScene) -> None:
    """So that a mutant fails by what is broken in it."""
    assert [name for name, arguments in TESTS if not verdict(sqlite_scene, name, arguments)] == []


@pytest.mark.parametrize("mutant", MUTANTS)
def test_no_broken_positions_pass_the_suite(sqlite_scene: StoreScene, monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    MUTANTS[mutant](monkeypatch)
    assert not all(verdict(sqlite_scene, name, arguments) for name, arguments in TESTS)


def test_a_lost_update_does_not_pass_the_suite(postgresql_scene: StoreScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two transactions at once, both compare before one of them writes."""

    def move(connection: Connection, group_id: str, one: Move) -> None:
        (_move if one.before is None else read_then_written)(connection, group_id, one)

    moving(move)(monkeypatch)
    assert not verdict(postgresql_scene, "test_one_of_two_concurrent_transactions_moves_a_position", {"first": False})


def test_a_lost_update_of_another_partition_does_not_pass_the_suite(
    postgresql_scene: StoreScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two transactions at once, each writes the whole group."""

    def move(connection: Connection, group_id: str, one: Move) -> None:
        (_move if one.before is None else all_of_the_group_written)(connection, group_id, one)

    moving(move)(monkeypatch)
    assert not verdict(postgresql_scene, "test_concurrent_moves_of_different_partitions_are_all_kept", {})
