"""The conformance suite of stores: what `dualwrite.stores.base` promises, on a real database.

Write a scene for your store, and pytest runs the suite::

    class MyScene(StoreScene):
        def open(self):
            return MyStore("mydb://localhost/test")

        def put(self, handle, number):
            handle.insert("numbers", number)

        def numbers(self):
            return MyClient("mydb://localhost/test").all("numbers")


    class TestMyStore(StoreConformance):
        @pytest.fixture
        def scene(self):
            with MyScene() as scene:
                yield scene

The docstring of each test names the sentence of the contract, or the rule (F1 to FA, in `dualwrite.recovery.resolve` and
`dualwrite.recipe.lane`), that it tests; a failure says what the contract requires and what the store did. Where the contract
leaves a choice, `StoreScene.capabilities` says which one the store made, and that is tested. Tests that need an optional method
of the scene (`corrupt`, `opener`, …) are skipped without it. `pytest -rs` lists them: what is skipped is not tested.

The suite does not need an empty database, and leaves rows behind. It does not cover what is specific to your database:
deadlocks, isolation levels, killed servers. Use `dualwrite.testing.proxy` to break connections in such tests.

`dualwrite.testing.stores.machine` has a Hypothesis state machine for the same scene, which runs random steps of several
writers, crashes and recoveries, and compares the database with a model of the promise. It is not imported here, so that
the suite works without Hypothesis.
"""

from __future__ import annotations

import pytest

_PARTS = (
    *("claims", "concurrency", "durability", "fencing", "leases", "positions"),
    *("resolutions", "scene", "simulation", "steps", "transactions"),
)
pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in _PARTS))  # failures show both sides, as in a test's own file

# ruff: noqa: E402  (after the line above)
from dualwrite.testing.stores.claims import ClaimConformance, ForgettingConformance, ListingConformance, RowConformance
from dualwrite.testing.stores.concurrency import (
    InFlightConformance,
    ProcessConformance,
    ThreadConformance,
    TimeLimitConformance,
)
from dualwrite.testing.stores.durability import ConnectionLossConformance, DurabilityConformance, ErrorConformance
from dualwrite.testing.stores.fencing import FencingConformance
from dualwrite.testing.stores.leases import LeaseConformance
from dualwrite.testing.stores.positions import PositionConformance
from dualwrite.testing.stores.resolutions import GenerationConformance, LaneConformance, ResolutionConformance
from dualwrite.testing.stores.scene import ClaimsWait, LeasesEnd, StoreCapabilities, StoreScene
from dualwrite.testing.stores.transactions import OutcomeConformance, TransactionConformance, UnitConformance


class StoreConformance(
    RowConformance,
    ClaimConformance,
    LaneConformance,
    TransactionConformance,
    OutcomeConformance,
    UnitConformance,
    ResolutionConformance,
    GenerationConformance,
    ListingConformance,
    ForgettingConformance,
    FencingConformance,
    InFlightConformance,
    TimeLimitConformance,
    ThreadConformance,
    ProcessConformance,
    DurabilityConformance,
    ErrorConformance,
    ConnectionLossConformance,
    LeaseConformance,
    PositionConformance,
):
    """The whole suite; each base class can also be used separately."""


__all__ = [
    "ClaimConformance",
    "ClaimsWait",
    "ConnectionLossConformance",
    "DurabilityConformance",
    "ErrorConformance",
    "FencingConformance",
    "ForgettingConformance",
    "GenerationConformance",
    "InFlightConformance",
    "LaneConformance",
    "LeaseConformance",
    "LeasesEnd",
    "ListingConformance",
    "OutcomeConformance",
    "PositionConformance",
    "ProcessConformance",
    "ResolutionConformance",
    "RowConformance",
    "StoreCapabilities",
    "StoreConformance",
    "StoreScene",
    "ThreadConformance",
    "TimeLimitConformance",
    "TransactionConformance",
    "UnitConformance",
]
