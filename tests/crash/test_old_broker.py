"""A broker before 4.0: no EndTxn v5, no two-phase commit, no feature `transaction.version`. The same promise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from crash.databases import Databases
from dualwrite.devcluster import DevCluster
from fixtures.broker import started

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("librdkafka")]  # the only producer that works with such a broker


@pytest.fixture(scope="module")
def old_broker() -> Iterator[DevCluster]:
    with started(kafka_version="3.9.1") as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("point", "expected"), [("after_prepare", [1]), ("before_db_commit", [1]), ("after_db_commit", [1, 2])]
)
@pytest.mark.parametrize("dying", ["recover_after_decision", "recover_after_end_txn", "recover_after_settle"])
def test_a_crash_and_a_crash_of_its_recovery_leave_both_sides_alike(
    databases: Databases, old_broker: DevCluster, point: str, expected: list[int], dying: str
) -> None:
    scene = databases.scene("postgresql", old_broker)
    scene.write(1, 3, f"{point}#2=kill").killed()
    scene.recovery(f"{dying}=kill").end()  # may not be reached: EndTxn is sent only to commit (rule FA)
    report = scene.recover()
    assert (report["error"], report["unacknowledged"]) == (None, [])
    assert scene.agree() == expected
    scene.write_here(9)
    assert scene.agree() == [*expected, 9]


def test_a_zombie_is_fenced(databases: Databases, old_broker: DevCluster) -> None:
    scene = databases.scene("postgresql", old_broker)
    zombie = scene.write(1, 3, "after_prepare#2=stop")
    zombie.wait_until_stopped()
    scene.write_here(100)
    zombie.resume()
    assert zombie.end() == 1
    assert zombie.last().startswith("error FencedError"), zombie.lines
    assert scene.agree() == [1, 100]
