"""A marker that waits between two brokers, and reaches the partition's leader while the id's next transaction is open there.

The coordinator has sent it again meanwhile, over another connection, and only so could the next transaction begin. The second
time it comes, it should do nothing (KIP-1228, KAFKA-19446). The cases are those of the table "A marker that comes late" in
`docs/operations/broker.md`: the log, what read_committed consumers get, and the rows are compared.

    pytest -n 0 -s -m soak tests/crash/test_delayed_marker.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import pytest

import dualwrite
from crash.databases import Databases
from crash.delayed_marker import BrokersBehindDoors, HeldMarker, brokers_behind_doors, log_of
from crash.scene import Scene
from dualwrite.state import TransactionStatus
from dualwrite.testing import failpoints
from fixtures.broker import read_values
from fixtures.pace import until

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("one_lane")]  # further lanes have Kafka ids of their own


class RolledBackError(Exception):
    """Ends a block."""


@dataclass(frozen=True)
class Seen:
    """What was there after the held marker had come, in the middle of the second transaction, and at the end.

    Attributes:
        during: What read_committed consumers got before the second transaction had ended.
        messages: What they got at the end.
        rows: The rows at the end.
        log: The messages and markers at the end.
    """

    during: list[int]
    messages: list[int]
    rows: list[int]
    log: str


@pytest.fixture(scope="module")
def brokers(request: pytest.FixtureRequest) -> Iterator[BrokersBehindDoors]:
    with brokers_behind_doors(request.param) as found:
        yield found


def observed(databases: Databases, brokers: BrokersBehindDoors, *, first_commits: bool) -> Seen:
    """Event 1 in a transaction whose marker is held; 2 and 3 in the next one, with the marker released between them.

    The second transaction ends in the other way than the first.
    """
    door = None
    while door is None:  # the topic and the id are new each time
        scene = databases.scene("sqlite", brokers.cluster)
        door = brokers.between(scene)
    during: list[int] = []

    def release() -> None:
        until(lambda: "2" in messages_in(scene), "message 2 is stored")
        marker.release()
        during.extend(visible(scene))

    with scene.connect() as writer:
        transaction(scene, writer, 0)
        until(lambda: is_complete(scene), "the first marker")
        marker = HeldMarker(door, scene.topic)
        transaction(scene, writer, 1, commits=first_commits)
        marker.wait_until_held()
        until(lambda: is_complete(scene), "the coordinator has sent the marker again")
        transaction(scene, writer, 2, 3, commits=not first_commits, between=release)
    print("", " ".join(log_of(scene)))  # noqa: T201  (with `-s`, as the page shows it)
    return Seen(during, visible(scene), scene.rows(), " ".join(messages_in(scene)))


def transaction(
    scene: Scene,
    writer: dualwrite.DualWriter,
    *numbers: int,
    commits: bool = True,
    between: Callable[[], None] = lambda: None,
) -> None:
    """Events in one transaction, which is rolled back once the broker has stored all of them; or it commits."""
    with ExitStack() as block:
        if not commits:
            block.enter_context(suppress(RolledBackError))
            block.enter_context(failpoints.armed("after_prepare", failpoints.raises(RolledBackError())))
        tx = block.enter_context(writer.transaction())
        for number in numbers:
            scene.events.write(tx.db, scene.transactional_id, number)
            tx.send(scene.topic, str(number))
            if number != numbers[-1]:
                between()


def is_complete(scene: Scene) -> bool:
    """Whether the coordinator knows that the markers of the id's last transaction were written."""
    return scene.described().status in (TransactionStatus.COMPLETE_COMMIT, TransactionStatus.COMPLETE_ABORT)


def messages_in(scene: Scene) -> list[str]:
    """The log without epochs."""
    return [each.partition("/")[0] for each in log_of(scene)]


def visible(scene: Scene) -> list[int]:
    """What a read_committed consumer gets now."""
    return [int(value or b"-1") for value in read_values(scene.bootstrap, scene.topic)]


FIRST_COMMITS, FIRST_IS_ROLLED_BACK = True, False

DOES_NOTHING = {
    FIRST_COMMITS: Seen([0, 1], [0, 1], [0, 1], "0 COMMIT 1 COMMIT 2 3 ABORT"),
    FIRST_IS_ROLLED_BACK: Seen([0], [0, 2, 3], [0, 2, 3], "0 COMMIT 1 ABORT 2 3 COMMIT"),
}
ENDS_THE_NEXT_EARLY = {
    FIRST_COMMITS: Seen([0, 1, 2], [0, 1, 2], [0, 1], "0 COMMIT 1 COMMIT 2 COMMIT 3 ABORT"),  # 2 is a phantom
    FIRST_IS_ROLLED_BACK: Seen([0], [0, 3], [0, 2, 3], "0 COMMIT 1 ABORT 2 ABORT 3 COMMIT"),  # 2 is lost
}


@pytest.mark.parametrize(
    ("brokers", "producer", "late"),
    [
        ("3.9.1", "librdkafka", ENDS_THE_NEXT_EARLY),
        ("4.1.2", "librdkafka", ENDS_THE_NEXT_EARLY),
        ("4.1.2", "native", ENDS_THE_NEXT_EARLY),
        ("4.2.2", "librdkafka", ENDS_THE_NEXT_EARLY),
        ("4.2.2", "native", DOES_NOTHING),
    ],
    indirect=["brokers", "producer"],
)
@pytest.mark.parametrize("first", [FIRST_COMMITS, FIRST_IS_ROLLED_BACK])
def test_a_marker_that_comes_twice(
    databases: Databases, brokers: BrokersBehindDoors, producer: str, late: dict[bool, Seen], first: bool
) -> None:
    assert observed(databases, brokers, first_commits=first) == late[first]
