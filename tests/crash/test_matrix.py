"""5 databases x 2 producers x 22 steps: a process is killed, and a row exists if and only if its message does.

The steps are 8 of a writer, and 7 of the process that recovers each of two states that a writer left: 5 of recovery, 2 of
opening. Each case is recovered by two processes at once and then again; then a new writer continues. Killed means SIGKILL,
which leaves the database and Kafka no more than an exit would.

The quick tier has one case of each database, and one with librdkafka. CI runs each step of a writer with the native producer
on PostgreSQL and on SQLite, which locks the whole database; on the other databases the last steps before and after each of the
two commits; with librdkafka, on PostgreSQL, those at which its state is another one: prepared, and after the commits. It runs
each step of recovery with PostgreSQL, and those that follow a change of the row with other databases too: at the other steps
the row is as it was one step before. `pytest -m soak` runs the rest.
"""

from __future__ import annotations

from itertools import product

import pytest

from crash.cases import (
    GROUP_POINTS,
    JOB_POINTS,
    JOURNAL_POINTS,
    LEFT,
    OPENING_POINTS,
    PRODUCERS,
    RECOVERY_POINTS,
    REPUBLISH_POINTS,
    WRITER_POINTS,
    recovery_dies,
    writer_dies,
)
from crash.databases import DATABASES, Databases
from dualwrite.devcluster import DevCluster
from dualwrite.failpoints import NAMES
from fixtures.tiers import thinned

RECOVERY_STEPS = [*RECOVERY_POINTS, *OPENING_POINTS]
CHANGED_BY_RECOVERY = ["recover_after_claim", "recover_after_resolution", "after_take_over"]
"""The steps before which the row was changed."""
AROUND_THE_COMMITS = ["before_db_commit", "after_db_commit", "after_kafka_commit"]


@pytest.mark.parametrize(
    ("database", "producer", "point"),
    thinned(
        product(DATABASES, PRODUCERS, WRITER_POINTS),
        kept=[
            *product(["postgresql", "sqlite"], ["native"], WRITER_POINTS),
            *product(DATABASES, ["native"], AROUND_THE_COMMITS),
            *product(["postgresql"], ["librdkafka"], ["after_prepare", "after_db_commit", "after_kafka_commit"]),
        ],
        quick=[*product(DATABASES, ["native"], ["after_db_commit"]), ("sqlite", "librdkafka", "after_db_commit")],
    ),
    indirect=["producer"],
)
def test_a_writer_that_dies_leaves_both_sides_alike(
    databases: Databases, broker: DevCluster, database: str, producer: str, point: str
) -> None:
    scene = databases.scene(database, broker)
    writer_dies(scene, point)


@pytest.mark.parametrize(
    ("database", "producer", "left", "point"),
    thinned(
        product(DATABASES, PRODUCERS, LEFT, RECOVERY_STEPS),
        kept=[
            *product(["postgresql"], ["native"], LEFT, RECOVERY_STEPS),
            *product(["postgresql"], ["librdkafka"], LEFT, ["recover_after_end_txn", *OPENING_POINTS]),  # only opening uses it
            ("sqlite", "native", "after_db_commit", "recover_after_claim"),
            *product(["sqlite", "mariadb", "rocksdb"], ["native"], ["after_prepare"], ["recover_after_resolution"]),
            *product(["mariadb", "zookeeper"], ["native"], ["after_db_commit"], CHANGED_BY_RECOVERY),
            *product(["rocksdb"], ["native"], ["after_db_commit"], ["recover_after_resolution", "after_take_over"]),
        ],
        quick=[],
    ),
    indirect=["producer"],
)
def test_an_interrupted_recovery_is_finished_by_the_next_one(
    databases: Databases, broker: DevCluster, database: str, producer: str, left: str, point: str
) -> None:
    scene = databases.scene(database, broker)
    recovery_dies(scene, left, point)


def test_every_failpoint_is_in_the_matrix_or_a_jobs() -> None:
    """A new failpoint is a writer's unless its name says otherwise: if no process is killed there, its case fails."""
    of_pools = [*GROUP_POINTS, *JOURNAL_POINTS, *JOB_POINTS]
    assert sorted([*WRITER_POINTS, *RECOVERY_STEPS, *REPUBLISH_POINTS, *of_pools]) == sorted(NAMES)
    steps = len(WRITER_POINTS) + len(LEFT) * len(RECOVERY_STEPS)
    assert (len(DATABASES), len(PRODUCERS), steps) == (5, 2, 22), "the figures above"
