"""What users see of the objects that they get: what is theirs, and the same of both pools and of both transactions."""

from __future__ import annotations

import inspect
from typing import Any, cast

from dualwrite import Transaction, WriterPool
from dualwrite.aio import AsyncTransaction, AsyncWriterPool
from dualwrite.pool.calls import UnitCall
from dualwrite.transaction import OpenTransaction, UnitTransaction
from fixtures.tables import table

OF_A_TRANSACTION = {"cancel", "db", "outcome", "send", "send_many", "send_offsets", "session", "state", "transactional_id"}

ONLY_SYNC = {"submit", "unit_on"}
"""A coroutine makes a task of `run` instead; frameworks that need `unit_on` have blocking connections."""


def names(seen: object) -> set[str]:
    return {name for name in dir(seen) if not name.startswith("_")}


def test_a_unit_gets_only_what_is_its_own() -> None:
    opened = UnitTransaction(OpenTransaction("shop.1", cast("Any", None), cast("Any", None), timeout=1))
    given: list[Transaction] = []
    UnitCall(given.append, (), {}, None).run(opened)
    assert names(given[0]) == OF_A_TRANSACTION
    assert (given[0].transactional_id, given[0].state) == ("shop.1", None)
    assert not hasattr(given[0], "__dict__")  # a mistyped name can't be set either


def test_a_coroutine_gets_the_same_and_a_thread_for_what_blocks() -> None:
    assert names(AsyncTransaction) == OF_A_TRANSACTION | {"run_sync"}


def test_both_pools_have_the_same() -> None:
    assert names(AsyncWriterPool) == names(WriterPool) - ONLY_SYNC


@table("name", sorted(names(AsyncWriterPool)))
def test_both_pools_take_the_same(name: str) -> None:
    plain, coroutine = (getattr(pool, name) for pool in (WriterPool, AsyncWriterPool))
    assert isinstance(plain, property) is isinstance(coroutine, property)
    if not isinstance(plain, property):
        assert parameters(plain) == parameters(coroutine)


def parameters(method: Any) -> list[tuple[str, Any, Any]]:
    return [(one.name, one.kind, one.default) for one in inspect.signature(method).parameters.values()]
