"""Streams: exactly once over restarts, with failures in the workers, and with different numbers of partitions."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import StreamingQueryException
from spark_scene import SparkScene, await_end

import dualwrite.spark
from fixtures.tiers import thinned

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def add_three_files(scene: SparkScene) -> range:
    for first in (0, 10, 20):
        scene.add_input(range(first, first + 10))
    return range(30)


def test_a_stream(scene: SparkScene) -> None:
    ids = add_three_files(scene)
    query = scene.run()
    assert [progress["sink"]["numOutputRows"] for progress in query.recentProgress] == [10, 10, 10]
    scene.assert_holds(ids)
    scene.add_input(range(30, 35))
    scene.run()
    scene.assert_holds(range(35))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "action"),
    thinned([("job_after_batch", "raise"), ("job_after_prepare", "kill")], kept=[("job_after_prepare", "kill")]),
)
def test_a_worker_that_dies_in_a_task(scene: SparkScene, point: str, action: str) -> None:
    """Spark retries the task in another worker. At every step: tests/jobs/test_job_kills.py."""
    ids = add_three_files(scene)
    scene.fail_at(point, action)
    scene.run()
    assert scene.has_failed
    scene.assert_holds(ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "action"),
    thinned([("job_after_move", "raise"), ("job_after_commit", "kill")], kept=[("job_after_move", "raise")]),
)
def test_a_worker_that_dies_in_commit(scene: SparkScene, point: str, action: str) -> None:
    """Spark aborts the batch, the query ends, and the next start runs the same batch again, with fewer or more partitions."""
    ids = add_three_files(scene)
    scene.fail_at(point, action)
    with pytest.raises(StreamingQueryException):
        scene.run(3)
    assert scene.has_failed
    scene.run(1 if action == "raise" else 5)
    scene.assert_holds(ids)


@pytest.mark.soak
def test_foreach_batch(scene: SparkScene) -> None:
    ids = add_three_files(scene)
    each: Callable[[DataFrame, int], None] = partial(write_batch, scene.options)
    await_end(scene.start(each=each))
    scene.assert_holds(ids)
    scene.add_input(range(30, 40))
    scene.fail_at("job_after_commit", "kill")
    with pytest.raises(StreamingQueryException):
        await_end(scene.start(each=each))
    await_end(scene.start(each=each))
    scene.assert_holds(range(40))


def write_batch(options: dict[str, str], frame: DataFrame, batch_id: int, job_id: str | None = None) -> None:
    dualwrite.spark.write_batch(frame, batch_id, job_id=job_id, **options)


@pytest.mark.soak
def test_a_job_with_a_name_belongs_to_one_query(scene: SparkScene) -> None:
    """A new checkpoint numbers its batches from 0 again: their rows must not be taken for those that are committed."""
    each: Callable[[DataFrame, int], None] = partial(write_batch, scene.options, job_id="my job")
    twice: Callable[[DataFrame, int], None] = partial(write_twice, scene.options)
    scene.add_input(range(10))
    scene.fail_at("job_after_commit", "kill")
    with pytest.raises(StreamingQueryException):
        await_end(scene.start(each=each))
    await_end(scene.start(each=each))  # the same query: batch 0 was committed before
    (scene.place / "checkpoint").rename(scene.place / "first")
    scene.add_input(range(10, 20))
    with pytest.raises(
        StreamingQueryException, match=r"(?s)batch 0 of job 'my job' was committed for the query .*; this run is"
    ):
        await_end(scene.start(each=each))
    shutil.rmtree(scene.place / "checkpoint")
    (scene.place / "first").rename(scene.place / "checkpoint")
    with pytest.raises(StreamingQueryException, match="write_batch was called twice for batch 1 of job 'my job'"):
        await_end(scene.start(each=twice))
    scene.assert_holds(range(20))


def write_twice(options: dict[str, str], frame: DataFrame, batch_id: int) -> None:
    for _ in range(2):
        write_batch(options, frame, batch_id, "my job")


@pytest.mark.soak  # in CI: without Spark, in tests/jobs/test_job_commit.py
def test_a_checkpoint_that_was_restored_from_an_older_copy(scene: SparkScene) -> None:
    """Its next batches have the numbers of batches that are committed, but maybe other rows."""
    checkpoint, copy = scene.place / "checkpoint", scene.place / "copy"
    scene.add_input(range(10))
    scene.run()
    shutil.copytree(checkpoint, copy)
    for first in (10, 20):
        scene.add_input(range(first, first + 10))
    scene.run()
    shutil.rmtree(checkpoint)
    copy.rename(checkpoint)
    with pytest.raises(StreamingQueryException, match="out of order: batch 2 of the same job"):
        scene.run()
    shutil.rmtree(checkpoint)  # a new query: the first one keeps the prefix
    with pytest.raises(StreamingQueryException, match="is held by job"):
        scene.run()
    scene.assert_holds(range(30))
