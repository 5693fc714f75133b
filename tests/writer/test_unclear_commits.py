"""How a COMMIT that failed or was overtaken is reported: with its cause and a suitable next step."""

# ruff: noqa: PT012  (a block of several statements is what is tested: the last one, or its end, must raise)

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from dualwrite.errors import InDoubtTransactionError, StoreCommitFailedError
from dualwrite.testing import failpoints
from writer.cases import NATIVE
from writer.scene import Event, Scene


def test_a_commit_that_fails_on_a_full_disk_names_the_disk(sqlite_scene: Scene) -> None:
    """A limit on the size of files simulates a full disk; it is lifted as soon as COMMIT has failed."""
    scene = sqlite_scene
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill() -> None:
        size = Path(str(scene.engine.url.database)).stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))

    def make_room(_context: Any = None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with scene.connect() as writer:
        scene.write(writer, 1)
        sa.event.listen(scene.engine, "handle_error", make_room)
        try:
            full = failpoints.armed("before_db_commit", failpoints.only_at(1, fill))
            with full, pytest.raises(StoreCommitFailedError, match=r"disk") as caught, writer.transaction() as tx:
                scene.both(tx, 2)
                more = [{"writer": f"{scene.transactional_id}-more", "number": n} for n in range(5000)]
                tx.db.execute(sa.insert(Event), more)
        finally:
            make_room()
            sa.event.remove(scene.engine, "handle_error", make_room)
        assert "connection was lost" not in str(caught.value)
        scene.write(writer, 3)
    assert scene.agree() == [1, 3]


@pytest.mark.parametrize("producer", [NATIVE])  # with librdkafka the old Kafka id is left as it is and still shows the outcome
def test_a_writer_overtaken_after_the_database_commit_reports_that_it_committed(scene: Scene) -> None:

    def take_over() -> None:
        with scene.connect() as successor:
            scene.write(successor, 2, 3)

    with scene.connect() as writer:
        overtaken = failpoints.armed("after_db_commit", failpoints.only_at(1, take_over))
        with overtaken, pytest.raises(InDoubtTransactionError) as caught, writer.transaction() as tx:
            scene.both(tx, 1)
        assert caught.value.database_committed is True
        text = str(caught.value)
        assert "The database committed the transaction, but another writer or recoverer has claimed the id since" in text
        assert "don't repeat the transaction" in text
        assert "stays prepared" not in text
        assert "whether it committed" not in text
    assert scene.agree() == [1, 2, 3]
