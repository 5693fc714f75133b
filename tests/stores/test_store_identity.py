"""The id of a SQL database at Kafka, created once, when the first generation is taken; and what tells databases apart."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from uuid import uuid4

from dualwrite.migration import upgrade
from dualwrite.state import ProducerKind
from dualwrite.stores.sql import SqlStateStore
from dualwrite.testing.postgres import PostgresServer
from fixtures.mariadb_server import MariaDBServer
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


def test_a_database_of_the_same_name_on_another_server_has_other_marks(
    postgres_server: PostgresServer, own_postgres_server: PostgresServer, mariadb_server: MariaDBServer
) -> None:
    """As a dump restored there; PostgreSQL's oids may be the same on both servers."""
    name = f"marks_{uuid4().hex}"
    marks = []
    for server in (postgres_server, own_postgres_server, mariadb_server):
        url = server.create_database(name)
        upgrade(url)
        with SqlStateStore.from_url(url) as store:
            marks.append(sorted(store.marks()))
    (first,), (second,), (third,) = marks
    systems = [mark.split(", ")[0] for mark in (first, second)]
    assert all(system.startswith("system ") for system in systems)
    assert systems[0] != systems[1]
    assert third.startswith("server ")
    assert third.endswith(f"schema {name}")
