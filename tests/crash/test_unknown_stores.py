"""The connection to MariaDB or ZooKeeper breaks around the commit, in either direction: the block reports the outcome.

For PostgreSQL test_unknown_outcome has the same tests, and more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

import dualwrite
from crash import worker
from crash.databases import Databases
from crash.scene import Scene
from dualwrite import DualWriter, StoreCommitFailedError, StoreCommitUnknownError, Timeouts
from dualwrite.devcluster import DevCluster
from dualwrite.testing import failpoints
from dualwrite.testing.proxy import Link, TcpProxy
from fixtures.pace import LIMIT
from fixtures.tiers import thinned

pytestmark = pytest.mark.usefixtures("native", "one_lane")


@dataclass
class Fault:
    """How the connection breaks when the commit passes.

    Args:
        when: The moment, as defined by TcpProxy.
        action: What is done to the connection.
        committed: Whether the database commits; None if that is a race.
    """

    when: str
    action: Callable[[Link], None]
    committed: bool | None


FAULTS = {
    "cut before it arrives": Fault("before", Link.cut, committed=False),
    "reset before it arrives": Fault("before", Link.cut_with_reset, committed=False),
    "cut while it runs": Fault("after", Link.cut, committed=None),
    "reset while it runs": Fault("after", Link.cut_with_reset, committed=None),
    "cut when it was answered": Fault("answered", Link.cut, committed=True),
    "reset when it was answered": Fault("answered", Link.cut_with_reset, committed=True),
}
NO_REQUEST = Fault("before", lambda link: link.blackhole("client_to_server"), committed=False)
NO_ANSWER = Fault("before", lambda link: link.blackhole("server_to_client"), committed=True)


@dataclass
class Proxied:
    """A scene whose writer connects through a proxy; the test's own checks bypass it."""

    scene: Scene
    proxy: TcpProxy
    commit: bytes
    url: str

    def connect(self, claim: float = LIMIT) -> DualWriter:
        return dualwrite.connect(
            self.url,
            kafka=self.scene.settings,
            transactional_id=self.scene.transactional_id,
            timeouts=Timeouts(claim=claim, kafka=LIMIT, delivery=LIMIT),
        )

    def break_commit(self, fault: Fault) -> None:
        self.proxy.on_client_bytes(self.commit, fault.action, when=fault.when)  # type: ignore[arg-type]  # a literal


@pytest.fixture
def proxied_mariadb(databases: Databases, broker: DevCluster) -> Iterator[Proxied]:
    yield from through_a_proxy(databases.scene("mariadb", broker), lambda _: b"\x03COMMIT", "read_timeout=2")


@pytest.fixture
def proxied_zookeeper(databases: Databases, broker: DevCluster) -> Iterator[Proxied]:
    def commit(scene: Scene) -> bytes:
        return f"/events/{scene.transactional_id}:2".encode()

    yield from through_a_proxy(databases.scene("zookeeper", broker), commit, "session_timeout=4")


@pytest.fixture(params=["mariadb", "zookeeper"])
def proxied(request: pytest.FixtureRequest) -> Proxied:
    made: Proxied = request.getfixturevalue(f"proxied_{request.param}")
    return made


def through_a_proxy(scene: Scene, commit: Callable[[Scene], bytes], options: str) -> Iterator[Proxied]:
    found = re.search(r":(\d+)/", scene.url)
    assert found is not None
    with TcpProxy("127.0.0.1", int(found[1])) as proxy:
        url = f"{scene.url.replace(found[0], f':{proxy.port}/')}{'&' if '?' in scene.url else '?'}{options}"
        yield Proxied(scene, proxy, commit(scene), url)


def assert_outcome(proxied: Proxied, writer: DualWriter, fault: Fault) -> None:
    scene = proxied.scene
    told = committed(proxied, writer, fault)
    assert fault.committed in (None, told)
    assert scene.agree() == ([1, 2] if told else [1])
    worker.write_event(writer, scene.topic, 3)
    assert scene.agree() == ([1, 2, 3] if told else [1, 3])
    writer.close()
    report = scene.recover()
    assert (report["error"], report["outcomes"], report["unacknowledged"]) == (None, [], [])


def committed(proxied: Proxied, writer: DualWriter, fault: Fault) -> bool:
    """What the block reported."""
    failed: StoreCommitFailedError | None = None
    try:
        with failpoints.armed("before_db_commit", lambda: proxied.break_commit(fault)):
            worker.write_event(writer, proxied.scene.topic, 2)
    except StoreCommitFailedError as error:
        failed = error
    assert failed is None or (failed.retriable and isinstance(failed.__cause__, StoreCommitUnknownError)), failed
    return failed is None


@pytest.mark.parametrize(
    "fault",
    thinned(
        FAULTS,
        kept=[*(fault for fault in FAULTS if fault.startswith("cut")), "reset while it runs"],
        quick=["cut before it arrives", "cut when it was answered"],
    ),
)
def test_the_connection_breaks_around_the_commit(proxied: Proxied, fault: str) -> None:
    with proxied.connect() as writer:
        worker.write_event(writer, proxied.scene.topic, 1)
        assert_outcome(proxied, writer, FAULTS[fault])


@pytest.mark.slow
def test_the_answer_to_the_commit_never_arrives(proxied: Proxied) -> None:
    """Until a time limit of the driver or the session ends the wait."""
    with proxied.connect() as writer:
        worker.write_event(writer, proxied.scene.topic, 1)
        assert_outcome(proxied, writer, NO_ANSWER)


@pytest.mark.slow
def test_the_commit_never_arrives_at_zookeeper_on_a_connection_that_stays(proxied_zookeeper: Proxied) -> None:
    with proxied_zookeeper.connect() as writer:
        worker.write_event(writer, proxied_zookeeper.scene.topic, 1)
        assert_outcome(proxied_zookeeper, writer, NO_REQUEST)


@pytest.mark.slow
def test_the_commit_never_arrives_at_mariadb_on_a_connection_that_stays(proxied_mariadb: Proxied) -> None:
    """The server keeps the transaction open and may still commit it, so it stays in doubt until that connection has ended."""
    scene = proxied_mariadb.scene
    with proxied_mariadb.connect(claim=1) as writer:
        worker.write_event(writer, scene.topic, 1)
        with (
            failpoints.armed("before_db_commit", lambda: proxied_mariadb.break_commit(NO_REQUEST)),
            pytest.raises(dualwrite.InDoubtTransactionError, match="stayed locked for 1 s"),
        ):
            worker.write_event(writer, scene.topic, 2)
        proxied_mariadb.proxy.cut()
        worker.write_event(writer, scene.topic, 3)
    assert scene.agree() == [1, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", thinned(["cut before it arrives", "cut when it was answered"], kept=["cut when it was answered"])
)
def test_an_unreachable_database_leaves_the_transaction_in_doubt_until_recovery(proxied: Proxied, fault: str) -> None:
    found = FAULTS[fault]

    def cut_for_good(link: Link) -> None:
        proxied.proxy.refuse()
        found.action(link)

    scene = proxied.scene
    with proxied.connect(claim=1) as writer:
        worker.write_event(writer, scene.topic, 1)
        away = Fault(found.when, cut_for_good, committed=None)
        with (
            failpoints.armed("before_db_commit", lambda: proxied.break_commit(away)),
            pytest.raises(dualwrite.InDoubtTransactionError) as caught,
        ):
            worker.write_event(writer, scene.topic, 2)
        assert caught.value.database_committed is None
        report = scene.recover()
        assert report["error"] is None
        assert scene.agree() == ([1, 2] if found.committed else [1])
        with pytest.raises(dualwrite.InDoubtTransactionError):
            writer.close()
