"""A process that connects to another, reachable Kafka cluster does no harm: no transaction is lost, no id is claimed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from typer.testing import CliRunner

import dualwrite
from crash.cases import crash_writer
from crash.databases import DATABASES, Databases
from crash.scene import Scene
from dualwrite.cli import db
from dualwrite.devcluster import DevCluster
from dualwrite.recovery import clusters
from dualwrite.recovery.clusters import move_to_cluster
from dualwrite.state import PreparedTxnState, ProducerKind
from dualwrite.stores.base import LostKind, Resolution, StateRow
from fixtures.pace import LIMIT
from fixtures.tiers import thinned

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_lane")]

CASES = [*(("native", database) for database in DATABASES), ("librdkafka", "sqlite")]
"""Producer and database; what a store saves is the same for both producers."""

each = pytest.mark.parametrize(("producer", "scene"), CASES, indirect=True)
mostly_postgresql = pytest.mark.parametrize(
    ("producer", "scene"), thinned(CASES, kept=[("native", "postgresql"), ("librdkafka", "sqlite")]), indirect=True
)
"""That the cluster is read back from each store's row is shown by the tests with `each`."""
native = pytest.mark.usefixtures("native")


@pytest.fixture(params=["sqlite"])
def scene(request: pytest.FixtureRequest, databases: Databases, broker: DevCluster) -> Scene:
    return databases.scene(request.param, broker)


@pytest.fixture
def elsewhere(scene: Scene, other_broker: DevCluster) -> Scene:
    """The same database and the same id, with the other cluster's address."""
    return replace(scene, bootstrap=other_broker.bootstrap_servers)


def as_by_an_older_release(scene: Scene) -> None:
    """The row without a cluster."""
    with dualwrite.store_from_url(scene.url) as store:
        claim = store.claim(scene.transactional_id, "tests", timeout=LIMIT)
        store.record_resolution(claim, Resolution(cluster_id=""))


@each
def test_recovery_on_another_cluster_changes_nothing(producer: str, scene: Scene, elsewhere: Scene) -> None:
    crash_writer(scene, "after_db_commit")
    before = scene.row()
    assert before.prepared_state is not None
    report = elsewhere.recover()
    assert "the id is in use on cluster" in report["error"]
    assert (report["outcomes"], report["unacknowledged"]) == ([], [])
    assert scene.row() == before
    assert scene.recover()["outcomes"] == ["COMMITTED"]
    assert scene.agree() == [1, 2]


@mostly_postgresql
def test_opening_on_another_cluster_changes_nothing(producer: str, scene: Scene, elsewhere: Scene) -> None:
    crash_writer(scene, "after_db_commit")
    before = scene.row()
    with pytest.raises(dualwrite.ClusterMismatchError, match="move-cluster") as caught:
        elsewhere.write_here(9)
    assert (caught.value.stored_cluster_id, caught.value.transactional_id) == (before.cluster_id, scene.transactional_id)
    assert caught.value.seen_cluster_id not in ("", before.cluster_id)
    assert scene.row() == before
    scene.write_here(3)
    assert scene.agree() == [1, 2, 3]


@each
def test_a_new_id_of_a_prefix_is_refused_on_another_cluster(producer: str, scene: Scene, elsewhere: Scene) -> None:
    """No row of it names a cluster, but one of its sibling does."""
    prefix = scene.transactional_id
    first, second = replace(scene, transactional_id=f"{prefix}.1"), replace(elsewhere, transactional_id=f"{prefix}.2")
    first.write_here(1)
    before = first.row()
    with pytest.raises(dualwrite.ClusterMismatchError, match=rf"on cluster '{before.cluster_id}': {prefix}\.1") as caught:
        second.write_here(2)
    assert (caught.value.stored_cluster_id, caught.value.transactional_id) == (before.cluster_id, second.transactional_id)
    assert f"--id {prefix}.1" in str(caught.value.next_step)
    with dualwrite.store_from_url(scene.url) as store:
        assert store.list(f"{prefix}.2") == []
    assert (second.messages(), first.messages()) == ([], [1])


@native
def test_moving_one_id_moves_all_ids_of_its_name(scene: Scene, elsewhere: Scene) -> None:
    """Also the one that drains the journal; and an id that got another cluster, as by a change by hand."""
    name = scene.transactional_id
    ids = [f"{name}.1", f"{name}.2", f"{name}.journal", f"{name}.journal.1"]
    with dualwrite.store_from_url(scene.url) as store, elsewhere.coordinator() as new:
        for each in ids:
            replace(scene, transactional_id=each).connect(lanes=1).close()
        store.record_resolution(store.claim(ids[1], "tests", timeout=LIMIT), Resolution(cluster_id="a third one"))
        with pytest.raises(dualwrite.ClusterMismatchError, match="on cluster 'a third one'"):
            replace(scene, transactional_id=ids[0]).connect(lanes=1)
        replace(scene, transactional_id=f"{name}x.1").connect(lanes=1).close()
        arguments = ["move-cluster", "--url", scene.url, "--kafka", elsewhere.bootstrap, "--id", ids[0], "--yes"]
        moved = CliRunner().invoke(db.app, arguments)
        assert moved.exit_code == 0, moved.output
        assert all(f" {each} " in f" {moved.output}".replace("\n", " ") for each in ids)
        rows = {each: store.read(each) for each in store.list(name)}
        on_new = {each for each, row in rows.items() if row is not None and row.cluster_id == new.cluster_id()}
    assert on_new == set(ids)
    replace(elsewhere, transactional_id=ids[1]).connect(lanes=1).close()
    with pytest.raises(dualwrite.ClusterMismatchError):
        replace(scene, transactional_id=f"{name}.3").connect(lanes=1)


@native
def test_a_live_writer_is_not_fenced_from_another_cluster(scene: Scene, elsewhere: Scene) -> None:
    with scene.connect() as writer:
        with writer.transaction() as tx:
            tx.send(scene.topic, "1")
        with pytest.raises(dualwrite.ClusterMismatchError):
            elsewhere.write_here(9)
        assert elsewhere.recover()["error"]
        with writer.transaction() as tx:
            tx.send(scene.topic, "2")
    assert scene.messages() == [1, 2]


@mostly_postgresql
def test_a_transaction_left_unverified_by_a_wrong_cluster_is_committed_on_the_right_one(
    producer: str, scene: Scene, elsewhere: Scene
) -> None:
    """A row from an older release names no cluster."""
    crash_writer(scene, "after_db_commit")
    as_by_an_older_release(scene)
    report = elsewhere.recover()
    assert (report["outcomes"], [kind for kind, _ in report["unacknowledged"]]) == (["UNVERIFIED"], ["UNVERIFIED"])
    report = scene.recover()
    assert (report["outcomes"], report["unacknowledged"]) == (["COMMITTED"], [])
    assert scene.agree() == [1, 2]
    assert scene.row().lost == ()
    scene.write_here(3)
    assert scene.agree() == [1, 2, 3]


@native
def test_a_transaction_committed_on_the_right_cluster_is_no_longer_unverified(scene: Scene, elsewhere: Scene) -> None:
    crash_writer(scene, "after_kafka_commit")
    as_by_an_older_release(scene)
    assert elsewhere.recover()["outcomes"] == ["UNVERIFIED"]
    report = scene.recover()
    assert (report["outcomes"], report["unacknowledged"]) == (["ALREADY_COMMITTED"], [])


@native
def test_a_generation_with_an_unverified_transaction_is_not_reused(scene: Scene, elsewhere: Scene) -> None:
    """On another cluster the next transaction could have the same name as the unverified one (rule UG)."""
    crash_writer(scene, "after_db_commit")
    as_by_an_older_release(scene)
    elsewhere.recover()
    (unverified,) = scene.row().lost
    with elsewhere.connect(on_lost="report"):
        assert scene.row().generation > unverified.generation


@native
def test_an_id_moves_to_another_cluster_once_it_is_resolved(scene: Scene, elsewhere: Scene) -> None:
    crash_writer(scene, "after_db_commit")
    before = scene.row()
    arguments = ["move-cluster", "--url", scene.url, "--kafka", elsewhere.bootstrap, "--id", scene.transactional_id]
    refused = CliRunner().invoke(db.app, [*arguments, "--yes"])
    assert isinstance(refused.exception, dualwrite.NotResolvedError)
    assert scene.row() == before
    scene.recover()
    moved = CliRunner().invoke(db.app, [*arguments, "--yes"])
    assert moved.exit_code == 0, moved.output
    assert before.cluster_id in moved.output
    assert "already" in CliRunner().invoke(db.app, [*arguments, "--yes"]).output
    elsewhere.write_here(3)
    assert elsewhere.messages() == [3]
    with pytest.raises(dualwrite.ClusterMismatchError):
        scene.write_here(4)


@native
def test_a_transaction_given_up_on_a_cluster_is_recorded_and_found_there_later(scene: Scene, elsewhere: Scene) -> None:
    crash_writer(scene, "after_db_commit")
    state = scene.row().prepared_state
    with dualwrite.store_from_url(scene.url) as store, scene.coordinator() as old, elsewhere.coordinator() as new:
        with pytest.raises(dualwrite.NotResolvedError, match="give-up-prepared"):
            move_to_cluster(store, new, [scene.transactional_id], timeout=LIMIT)
        (move,) = move_to_cluster(store, new, [scene.transactional_id], give_up_prepared=True, timeout=LIMIT)
        assert move.given_up is not None
        assert (move.given_up.kind, move.given_up.state) == (LostKind.UNVERIFIED, state)
        assert move.to_cluster_id == new.cluster_id()
        assert [kind for kind, _ in elsewhere.recover()["unacknowledged"]] == ["UNVERIFIED"]
        move_to_cluster(store, old, [scene.transactional_id], timeout=LIMIT)  # after all
    assert scene.recover()["outcomes"] == ["COMMITTED"]
    assert scene.agree() == [1, 2]


@native
def test_a_transaction_prepared_during_a_move_is_not_given_up(
    scene: Scene, elsewhere: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer with the old address has claimed the id, and commits in the database after the move has read the row."""
    scene.write_here(1)
    state = PreparedTxnState(1, 2)
    check = clusters._require_resolved
    with dualwrite.store_from_url(scene.url) as store, elsewhere.coordinator() as new:
        claim = store.claim(scene.transactional_id, "a writer with the old address", timeout=LIMIT)

        def then_the_writer_commits(row: StateRow, seen: str) -> None:
            check(row, seen)
            monkeypatch.undo()
            generation = store.acquire_generation(claim, ProducerKind.NATIVE_TWO_PHASE)
            transaction = store.begin(claim)
            transaction.record(state, generation=generation, transaction_number=1)
            transaction.commit()

        monkeypatch.setattr(clusters, "_require_resolved", then_the_writer_commits)
        with pytest.raises(dualwrite.NotResolvedError):
            move_to_cluster(store, new, [scene.transactional_id], timeout=LIMIT)
        row = store.read(scene.transactional_id)
        assert row is not None
        assert (row.prepared_state, row.lost) == (state, ())
        assert row.cluster_id not in ("", new.cluster_id())
        with pytest.raises(dualwrite.FencedError):
            store.begin(claim)


@native
@pytest.mark.parametrize("scene", ["sqlite", "mariadb"], indirect=True)
def test_lanes_forgotten_before_a_move_can_be_opened_after_it(scene: Scene, elsewhere: Scene) -> None:
    """A forgotten lane is not listed, so it is not moved."""
    scene.connect(lanes=3).close()
    lanes = [f"{scene.transactional_id}~{number}" for number in (1, 2)]
    with dualwrite.store_from_url(scene.url) as store, elsewhere.coordinator() as new:
        for lane in lanes:
            store.forget(lane)
        move_to_cluster(store, new, [scene.transactional_id], timeout=LIMIT)
        with elsewhere.connect(lanes=3) as writer, writer.transaction() as tx:
            tx.send(elsewhere.topic, "1")
        rows = map(store.read, (scene.transactional_id, *lanes))
        assert {row.cluster_id for row in rows if row is not None} == {new.cluster_id()}
    assert elsewhere.messages() == [1]
