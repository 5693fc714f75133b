"""The id of a SQL database at Kafka: created once, when the first generation is taken."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from dualwrite.producer_kind import ProducerKind
from dualwrite.stores.sql import SqlStateStore
from fixtures.pace import LIMIT

WRITERS = 4


def test_writers_that_acquire_their_first_generations_at_once_agree_on_the_identity(database_url: str) -> None:
    together = Barrier(WRITERS)

    def take(number: int) -> str:
        with SqlStateStore.from_url(database_url) as store:
            claim = store.claim(f"writer-{number}", "tests", timeout=LIMIT)
            assert store.identity() is None
            together.wait(LIMIT)
            store.acquire_generation(claim, ProducerKind.NATIVE)
            return store.read_claimed(claim).store_id

    with ThreadPoolExecutor(WRITERS) as threads:
        taken = set(threads.map(take, range(WRITERS)))
    with SqlStateStore.from_url(database_url) as store:
        identity = store.identity()
        assert identity is not None
        assert taken == {identity.store_id}
        assert identity.marks == store.marks()
