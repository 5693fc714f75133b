"""The exception classes: facts, messages, pickling."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

import dualwrite
from dualwrite import errors
from dualwrite.errors import DualWriteError
from fixtures.tables import table

KINDS = sorted(
    (kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, DualWriteError)),
    key=lambda kind: kind.__name__,
)


def made(kind: type[DualWriteError]) -> DualWriteError:
    return kind("It failed.", transactional_id="orders", cause="the cause", next_step="the step", fence=3, owner="me")


@table("kind", KINDS)
def test_an_error_survives_pickling_and_copying_with_all_its_facts(kind: type[DualWriteError]) -> None:
    error = made(kind)
    pickled = [pickle.loads(pickle.dumps(error, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
    for again in (*pickled, copy.copy(error), copy.deepcopy(error)):
        assert (type(again), str(again), again.args) == (kind, str(error), error.args)
        facts = (again.what, again.transactional_id, again.cause, again.next_step)
        assert facts == ("It failed.", "orders", "the cause", "the step")
        assert (again.fence, again.owner, again.facts) == (3, "me", {"fence": 3, "owner": "me"})


@table("kind", KINDS)
def test_an_error_says_what_for_which_id_why_and_what_to_do(kind: type[DualWriteError]) -> None:
    lines = ["It failed. [transactional id 'orders']", "Cause: the cause", "Next step: the step"]
    assert str(made(kind)) == "\n".join(lines)
    assert f"{made(kind)}" == " ".join(lines)
    assert str(kind("It failed.")) == "It failed."


def test_an_unknown_fact_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="DualWriteError has no attribute 'nothing'"):
        _ = made(DualWriteError).nothing
    assert not hasattr(made(DualWriteError), "nothing")


def test_an_error_that_may_have_committed_is_never_retriable() -> None:
    in_doubt = (errors.InDoubtTransactionError, errors.LostTransactionError, errors.FencedError, errors.StoreCommitUnknownError)
    assert not any(kind.retriable for kind in in_doubt)


def test_errors_of_the_caller_are_also_builtin_errors() -> None:
    assert issubclass(errors.ConfigurationError, ValueError)
    assert issubclass(errors.InvalidMessageError, TypeError)
    assert issubclass(errors.UsageError, RuntimeError)


def test_every_error_can_be_imported_from_the_package() -> None:
    assert len(KINDS) > 30
    assert {kind.__name__ for kind in KINDS} == set(errors.__all__)
    assert all(getattr(dualwrite, kind.__name__) is kind for kind in KINDS)
