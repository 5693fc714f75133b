"""A broker before 4.0: no EndTxn v5, no two-phase commit, no feature `transaction.version`. The same promise."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from crash.cases import after_crash_at
from crash.databases import Databases
from dualwrite.devcluster import DevCluster
from fixtures.broker import TRUSTING, started
from fixtures.raw_producer import write_behind_the_coordinator
from fixtures.tiers import thinned

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("librdkafka")]  # the only producer that works with such a broker


DYING = ["recover_after_decision", "recover_after_end_txn", "recover_after_resolution"]


@pytest.mark.parametrize(
    ("point", "dying"),
    thinned(
        product(["after_prepare", "before_db_commit", "after_db_commit"], DYING),
        kept=[
            ("after_prepare", "recover_after_decision"),
            ("after_db_commit", "recover_after_end_txn"),
        ],
    ),
)
def test_a_crash_and_a_crash_of_its_recovery_leave_both_sides_alike(
    databases: Databases, broker_3_9: DevCluster, point: str, dying: str
) -> None:
    scene, expected = databases.scene("postgresql", broker_3_9), after_crash_at(point)
    scene.write(1, 3, f"{point}#2=kill").killed()
    dead = scene.recovery(f"{dying}=kill")
    assert dead.end() in (-9, 0), dead.errors  # 0 if it is not reached: EndTxn is sent only to commit (rule FA)
    report = scene.recover()
    assert (report["error"], report["unacknowledged"]) == (None, [])
    scene.assert_continues(expected, 9)


def test_a_zombie_is_fenced(databases: Databases, broker_3_9: DevCluster) -> None:
    scene = databases.scene("postgresql", broker_3_9)
    zombie = scene.write(1, 3, "after_prepare#2=stop")
    zombie.wait_until_stopped()
    scene.write_here(100)
    zombie.resume()
    assert zombie.end() == 1
    assert zombie.last().startswith("error FencedError"), zombie.lines
    assert scene.agree() == [1, 100]


@pytest.fixture(scope="module")
def trusting() -> Iterator[DevCluster]:
    """A broker without EndTxn v5 that does not verify transactions before it appends, as those before 3.6."""
    with started(features={"transaction.version": "1"}, config=TRUSTING) as cluster:
        yield cluster


def test_fa_a_message_that_arrives_after_its_transaction_was_aborted_is_refused(
    databases: Databases, trusting: DevCluster
) -> None:
    """It was delayed in the network. If the broker stored it, no marker would ever follow: consumers would wait at it."""
    scene = databases.scene("postgresql", trusting)
    scene.write(1, 1, "after_prepare=kill").killed()
    open_one = scene.described()
    assert scene.recover()["outcomes"] == ["ABORTED"]
    with pytest.raises(AssertionError, match="INVALID_PRODUCER_EPOCH"):
        write_behind_the_coordinator(
            scene.bootstrap, scene.topic, open_one.producer_id, open_one.epoch, open_one.start_time_ms, sequence=1
        )
    scene.write_here(2)
    assert scene.agree() == [2]
