"""A job with dualwrite's tables in a separate schema, and its own tables in the default schema."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa
from job_scene import JobScene

import dualwrite
from dualwrite import migration
from dualwrite.devcluster import DevCluster
from dualwrite.stores.sql import SqlStateStore


@pytest.fixture
def scene(postgres_url: str, broker: DevCluster, new_name: Callable[[str], str]) -> Iterator[JobScene]:
    engine = sa.create_engine(postgres_url)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA IF EXISTS own CASCADE; CREATE SCHEMA own")
    engine.dispose()
    migration.upgrade(postgres_url, schema="own")
    made = JobScene(postgres_url, broker.bootstrap_servers, new_name("job"), schema="own")
    made.store.close()
    made.store = SqlStateStore.from_url(postgres_url, schema="own")
    yield made
    made.close()


def test_a_job_is_committed_and_another_recovered_in_a_schema(scene: JobScene) -> None:
    scene.commit(scene.write(scene.run(), [[1, 2], [3]]))
    scene.assert_holds([1, 2, 3])
    scene.write(scene.run(1), [[4]])  # and its driver dies
    assert len(scene.open_ids()) == 1
    report = dualwrite.recover(scene.url, kafka=scene.servers, schema="own", ids=[f"{scene.prefix}.0.0"])
    assert [found.outcome for found in report][-1] is dualwrite.Outcome.ABORTED
    with SqlStateStore.from_url(scene.url) as elsewhere:
        assert elsewhere.list() == []
    scene.commit(scene.write(scene.run(2), [[5]]))
    scene.assert_holds([1, 2, 3, 5])
