"""Writers with several lanes in other processes, killed or paused; a transaction in doubt; outcomes by lane."""

from __future__ import annotations

import pytest

import dualwrite
from crash.scene import Worker
from dualwrite import (
    BrokerUnavailableError,
    DualWriter,
    InDoubtTransactionError,
    Outcome,
)
from dualwrite.testing import failpoints
from writer.scene import Scene

BEFORE_COMMIT_POINT = ["after_begin", "after_send", "after_prepare", "after_record", "before_db_commit"]
PAST_COMMIT_POINT = ["after_db_commit", "before_kafka_commit", "after_kafka_commit"]


def start(scene: Scene, first: int, count: int, stop: str = "", lanes: int = 3, **environment: str) -> Worker:
    """A writer in a separate process."""
    where = [scene.url, scene.servers, scene.transactional_id, scene.topic]
    return Worker(["write", *where, str(first), str(count)], stop, DUALWRITE_LANES=str(lanes), **environment)


def crash(scene: Scene, point: str, first: int, count: int, lanes: int = 3) -> None:
    """A process that writes and is killed at the point."""
    worker = start(scene, first, count, f"{point}=kill", lanes)
    assert worker.end() == -9, f"{worker.lines} {worker.errors[-2000:]}"


def stopped(scene: Scene, point: str, first: int, count: int, lanes: int = 3) -> Worker:
    """A process that writes and is paused at the point."""
    worker = start(scene, first, count, f"{point}=stop", lanes)
    worker.wait_until_stopped()
    return worker


def outcomes(report: dualwrite.RecoveryReport) -> dict[str, list[Outcome]]:
    """The outcomes by lane."""
    return {one.transactional_id: [found.outcome for found in one.outcomes] for one in report.ids}


def unavailable() -> BrokerUnavailableError:
    return BrokerUnavailableError("Nobody answers.")


def leave_in_doubt(scene: Scene, writer: DualWriter, number: int) -> InDoubtTransactionError:
    """A transaction that the database commits while Kafka does not answer."""
    with (
        failpoints.armed("before_kafka_commit", failpoints.raises(unavailable())),
        failpoints.armed("recover_after_describe", failpoints.raises(unavailable())),
        pytest.raises(InDoubtTransactionError) as caught,
    ):
        scene.write(writer, number)
    return caught.value
