"""Named clusters, which outlive the process that started them."""

from __future__ import annotations

import errno
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from dualwrite.devcluster import (
    BrokerExitedError,
    DevCluster,
    DevClusterError,
    SettingsDifferError,
    cluster_names,
    locations,
    registry,
)
from dualwrite.devcluster.broker_process import BrokerProcess
from dualwrite.devcluster.cluster_files import ClusterFiles
from dualwrite.devcluster.locations import make_cache_directory
from dualwrite.devcluster.registry import ClusterRecord, plan


def pretend_reboot(cluster: DevCluster) -> None:
    """Let another process have the broker's process id."""
    record = ClusterRecord.load(cluster.data_dir)
    assert record is not None
    record.nodes[0].process = BrokerProcess(psutil.Process().pid, "another boot")
    record.save(cluster.data_dir)


@pytest.mark.slow
def test_up_is_idempotent_and_down_keeps_the_data(state_dir: Path) -> None:
    cluster = DevCluster("mine")
    first = cluster.up()
    assert DevCluster("mine").up().nodes[0].pid == first.nodes[0].pid
    with pytest.raises(SettingsDifferError, match="nodes: 1, not 3"):
        DevCluster("mine", nodes=3).up()
    assert cluster_names() == ["mine"]

    cluster.down()
    assert not cluster.status().running
    cluster.down()
    pretend_reboot(cluster)
    assert not cluster.status().running
    again = DevCluster("mine", config={"num.partitions": "3"}).up()
    assert again.bootstrap_servers == first.bootstrap_servers

    cluster.down(purge=True)
    assert cluster_names() == []
    assert not state_dir.exists()
    with pytest.raises(DevClusterError, match=r"(?s)no cluster 'mine'.*dualwrite dev up"):
        cluster.status()
    cluster.down(purge=True)


def test_another_data_directory_is_the_clusters_own_until_it_is_purged(state_dir: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    plan("two", None, {}, None).save(elsewhere)
    registry.remember("two", elsewhere)
    assert DevCluster("two").data_dir == elsewhere
    assert [path.name for path in (state_dir / "clusters").iterdir()] == ["two"]
    with pytest.raises(DevClusterError, match=r"belongs to the cluster 'two', which is stopped"):
        DevCluster("three", data_dir=elsewhere).up()
    with pytest.raises(DevClusterError, match=r"(?s)is in .*elsewhere, not in"):
        DevCluster("two", data_dir=tmp_path / "other").up()
    DevCluster("two").down(purge=True)
    assert not elsewhere.exists()
    assert not state_dir.exists()


def test_a_busy_port_is_reported_and_nothing_is_left_behind(state_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(DevClusterError, match=f"Port {port} of node 1 is in use") as caught:
            DevCluster("busy", port=port).up()
    assert caught.value.port == port
    assert not state_dir.exists()


def test_a_reserved_port_is_not_reported_as_used(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations, "_port_obstacle", lambda port: errno.EACCES if port == 443 else None)
    with pytest.raises(DevClusterError, match="listen on port 443 of node 1 is denied"):
        DevCluster("c", port=443).up()


def test_a_full_disk_is_one_clear_error(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "cluster.json")

    monkeypatch.setattr(ClusterRecord, "save", full)
    with pytest.raises(DevClusterError, match=r"(?s)cluster 'c' can't be .*written.*No space left.*free space"):
        DevCluster("c").up()


def test_a_cache_that_cannot_be_created_names_the_variable_that_moves_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DevClusterError, match="XDG_CACHE_HOME"):
        make_cache_directory(tmp_path / "file" / "dualwrite")


def test_following_the_log_of_a_node_that_never_ran_ends(state_dir: Path) -> None:
    cluster = DevCluster("c")
    cluster.data_dir.mkdir(parents=True)
    plan("c", None, {}, None).save(cluster.data_dir)
    assert list(cluster.follow_logs()) == []


def test_a_directory_with_other_files_is_refused_and_a_purge_removes_nothing_from_it(state_dir: Path, tmp_path: Path) -> None:
    own = tmp_path / "project" / "log4j2.properties"
    own.parent.mkdir()
    own.touch()
    cluster = DevCluster("c", data_dir=own.parent)
    with pytest.raises(DevClusterError, match="not empty"):
        cluster.up()
    cluster.down(purge=True)
    assert own.exists()


def test_a_purge_removes_the_nodes_of_a_failed_start_too(tmp_path: Path) -> None:
    """A start with three nodes had failed, then one with a single node succeeded: its record has one."""
    files = ClusterFiles(tmp_path / "data")
    for node_id in (1, 2, 3):
        files.storage(node_id).mkdir(parents=True)
    (files.data_dir / "cluster.json.partial").touch()  # of a process that was killed while it wrote the record
    record = plan("c", None, {"nodes": 1}, None)
    record.save(files.data_dir)
    files.purge(record)
    assert not files.data_dir.exists()


def test_a_process_killed_while_it_wrote_the_record_does_not_block_the_directory(tmp_path: Path) -> None:
    (tmp_path / "cluster.json.partial").touch()
    ClusterFiles(tmp_path).check_owner("c")
    (tmp_path / "cluster.json.backup").touch()
    with pytest.raises(DevClusterError, match="not empty"):
        ClusterFiles(tmp_path).check_owner("c")


def test_a_record_that_could_not_be_written_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, _target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        plan("c", None, {}, None).save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_name_cannot_leave_its_directory(state_dir: Path) -> None:
    with pytest.raises(DevClusterError, match="is not a valid cluster name"):
        DevCluster("../../etc")


@pytest.mark.slow
def test_a_bad_property_is_reported_with_the_error_of_kafka(state_dir: Path) -> None:
    with pytest.raises(BrokerExitedError, match=r"broker\.heartbeat\.interval\.ms"):
        DevCluster("c", config={"broker.heartbeat.interval.ms": "often"}).up()
    assert not DevCluster("c").status().running
    with pytest.raises(BrokerExitedError, match=r"no\.such\.Authorizer") as caught:
        DevCluster("c", config={"authorizer.class.name": "no.such.Authorizer"}).up()
    assert "no.such.Authorizer" in caught.value.log_tail
    assert not DevCluster("c").status().running


def test_a_reused_process_id_is_not_taken_for_a_broker() -> None:
    recorded = BrokerProcess.running(psutil.Process().pid)
    assert recorded.alive
    for started in ("another boot 1", None):
        another = replace(recorded, started=started)
        assert not another.alive
        assert not another.send(signal.SIGTERM)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports a start time that does not depend on the clock")
def test_a_broker_is_found_again_after_the_clock_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux's start times are relative to the boot, whose time moves with the clock: `down --purge` removed a running
    broker's data."""
    recorded = BrokerProcess.running(psutil.Process().pid)
    before = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: before(self) + 3600)
    assert recorded.alive


def test_a_second_process_waits_for_its_turn(state_dir: Path) -> None:
    with registry.lock("c", timeout=1), pytest.raises(DevClusterError, match="Another process"):
        registry.lock("c", timeout=0.1).__enter__()
