"""Traces of Spark jobs: one trace leads from the caller through the driver's steps and the tasks, over processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from spark_scene import SparkScene

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
OBSERVED = {"observe": "spark_observers:install", "traceparent": f"00-{TRACE}-{CALLER}-01"}
Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines(spark_place: Path) -> Lines:
    """What the observers in Spark's processes have written."""
    place = spark_place / "spans"  # `PLACE` of warm/spark_observers.py
    place.unlink(missing_ok=True)
    return lambda: [json.loads(line) for line in place.read_text().splitlines()]


def named(lines: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [line for line in lines if line.get("name") == name]


def test_a_job_is_one_trace_though_a_task_is_killed(scene: SparkScene, lines: Lines) -> None:
    scene.fail_at("job_after_prepare", "kill")  # its messages are at the broker
    scene.write(scene.orders(range(60)), **OBSERVED)
    assert scene.has_failed
    scene.assert_holds(range(60))

    found = lines()
    spans = [line for line in found if "name" in line]
    assert {span["trace"] for span in spans} == {TRACE}
    (write,) = named(spans, "write job")
    assert write["parent"] == CALLER
    tasks = named(spans, "task")
    assert {task["parent"] for task in tasks} == {write["id"]}
    done = [task["attributes"] for task in tasks if task["status"] == "UNSET"]
    assert sorted(task["dualwrite.job.partition"] for task in done) == [0, 1, 2]
    assert any(task["dualwrite.job.attempt"] > 0 for task in done)
    (commit,) = named(spans, "commit job")
    assert commit["parent"] == write["id"]
    for name in ("commit database", "commit kafka"):
        assert [span["parent"] for span in named(spans, name)] == [commit["id"]]
    (kafka,) = named(spans, "commit kafka")
    outcomes = {span["parent"]: set[str]() for span in named(spans, "recover")}
    for span in named(spans, "recover"):
        outcomes[span["parent"]].add(span["attributes"]["dualwrite.recovery.outcome"])
    assert outcomes == {kafka["id"]: {"COMMITTED"}, commit["id"]: {"ABORTED"}}  # the winners, and what the killed attempt left
    assert len({span["process"] for span in (*tasks, commit)}) > 1
    events = [line["event"] for line in found if "event" in line]
    assert events.count("TaskPrepared") == 3
    assert events.count("JobCommitted") == 1
    assert {tuple(message.headers() or ()) for message in scene.messages()} == {()}


@pytest.mark.slow
def test_a_job_that_fails_has_the_errors_of_its_tasks_and_an_abort(scene: SparkScene, lines: Lines) -> None:
    frame = scene.orders(range(6), 1).selectExpr("*", "timestamp_millis(-5) as timestamp")
    with pytest.raises(PySparkException):
        scene.write(frame, **OBSERVED)
    scene.assert_holds([])

    found = lines()
    tasks = named(found, "task")
    assert {task["status"] for task in tasks} == {"ERROR"}
    (abort,) = named(found, "abort job")
    assert abort["trace"] == TRACE
    events = [line["event"] for line in found if "event" in line]
    assert events.count("TaskFailed") == len(tasks)
    assert events.count("JobAborted") == 1


@pytest.mark.slow
def test_an_observer_that_fails_changes_nothing(scene: SparkScene, lines: Lines) -> None:
    scene.write(scene.orders(range(30)), observe="spark_observers:fail")
    scene.write(scene.orders(range(30, 60)), observe="missing:install")
    scene.assert_holds(range(60))


@pytest.mark.slow
def test_tasks_and_commits_of_a_stream_have_their_own_traces(scene: SparkScene, lines: Lines) -> None:
    scene.add_input(range(40))
    scene.run(observe=OBSERVED["observe"])
    scene.assert_holds(range(40))

    found = lines()
    tasks, commits = named(found, "task"), named(found, "commit job")
    assert tasks
    jobs = {commit["attributes"]["dualwrite.job"] for commit in commits}
    assert len(jobs) == len(commits) > 0
    assert {task["attributes"]["dualwrite.job"] for task in tasks} == jobs
    assert {span["parent"] for span in (*tasks, *commits)} == {None}
    for commit in commits:
        assert {"commit database", "commit kafka"} <= {line["name"] for line in found if line.get("parent") == commit["id"]}
