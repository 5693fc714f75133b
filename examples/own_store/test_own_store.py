"""The conformance suite, run on this example's store."""
# ruff: noqa: ANN001, ANN201, D101, D103  (short, like a test in your own package)

import pytest
from in_memory import Database, InMemoryStore

from dualwrite.testing.stores import ClaimsWait, StoreCapabilities, StoreConformance, StoreScene
from dualwrite.testing.stores.machine import run_random_steps


class Scene(StoreScene):
    capabilities = StoreCapabilities(claims_wait=ClaimsWait.NEVER)
    database = Database()

    def open(self):
        return InMemoryStore(self.database)

    def put(self, handle, number):
        handle.put(number, number)

    def numbers(self):
        return list(self.database.content.data)


class TestInMemoryStore(StoreConformance):
    @pytest.fixture
    def scene(self):
        with Scene() as scene:
            yield scene


def test_random_steps():
    with Scene() as scene:
        run_random_steps(scene)
