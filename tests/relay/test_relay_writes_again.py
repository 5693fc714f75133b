"""The database takes no writes for a while, or a migration changes the outbox: the relay goes on by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa
from relay_scene import RelayScene, running

from dualwrite.devcluster import DevCluster
from dualwrite.observability.outages import database_at
from dualwrite.relay import BatchOptions
from fixtures.pace import until
from fixtures.read_only import read_only
from fixtures.tiers import thinned


@pytest.fixture(params=thinned(["postgres_url", "mariadb_url"], quick=["postgres_url"]))
def scene(request: pytest.FixtureRequest, broker: DevCluster, new_name: Callable[[str], str]) -> Iterator[RelayScene]:
    made = RelayScene(request.getfixturevalue(request.param), broker, new_name)
    yield made
    made.engine.dispose()


def empty(scene: RelayScene) -> None:
    until(lambda: scene.waiting() == 0, "the outbox to be empty")


def test_a_relay_goes_on(scene: RelayScene) -> None:
    scene.insert(3)
    with running(scene) as relay:
        database = database_at(relay._store.description)
        empty(scene)
        with read_only(scene.url) as over:
            scene.engine.dispose()
            with scene.engine.connect() as connection:
                session = "SESSION CHARACTERISTICS AS" if connection.dialect.name == "postgresql" else "SESSION"
                connection.exec_driver_sql(f"SET {session} TRANSACTION READ WRITE")
                connection.commit()
                scene.insert_on(connection, range(3, 6))
                connection.commit()
            until(lambda: not relay.check().database.is_ok and database.is_out, "the relay has seen it")
            over()
        empty(scene)
        until(lambda: relay.check().is_ready, "it is over")
    assert (relay.published, relay.status().dead) == (6, 0)
    scene.check(range(6))


def test_a_column_is_widened(on_postgres: RelayScene) -> None:
    """PostgreSQL refuses each prepared statement that reads it once: cached plan must not change result type."""
    scene = on_postgres
    scene.insert(20)
    with running(scene, batch=BatchOptions(rows=1)) as relay:
        empty(scene)
        with scene.engine.begin() as connection:
            connection.execute(sa.text("ALTER TABLE outbox ALTER COLUMN topic TYPE varchar(600)"))
        scene.insert(20)
        empty(scene)
    assert relay.published == 40
    scene.check(range(40))


def test_a_full_disk_is_not_the_fault_of_a_row(on_postgres: RelayScene) -> None:
    """Emulated by a trigger, which raises what PostgreSQL says of a full disk."""
    scene = on_postgres
    with scene.engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = '53100'; END $$"
        )
        connection.exec_driver_sql("CREATE TRIGGER full_disk BEFORE DELETE ON outbox EXECUTE FUNCTION full_disk()")
    scene.insert(5)
    with running(scene) as relay:
        until(lambda: "could not extend file" in relay.check().database.text, "the relay has seen it")
        with scene.engine.begin() as connection:
            connection.exec_driver_sql("DROP TRIGGER full_disk ON outbox")
        empty(scene)
    assert (relay.published, relay.status().dead) == (5, 0)
    scene.check(range(5))
