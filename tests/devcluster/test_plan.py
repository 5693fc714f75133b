"""The settings, the plan made from them, and the files written from the plan, without a broker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dualwrite.devcluster import DevClusterError, Security, SettingsDifferError, TlsFiles
from dualwrite.devcluster.cluster_files import render, server_properties
from dualwrite.devcluster.cluster_settings import STARTS_FAST, ClusterSettings
from dualwrite.devcluster.registry import ClusterRecord, plan
from fixtures.tables import table


def properties(record: ClusterRecord, index: int = 0) -> dict[str, str]:
    return server_properties(
        record.settings, record.nodes, record.nodes[index], storage=Path("/s"), keystore=Path("/k/keystore.pem")
    )


def formatted(**settings: object) -> ClusterRecord:
    record = plan("c", None, settings, None)
    record.formatted = True
    return record


def test_one_node_keeps_one_replica_and_three_nodes_keep_three_with_two_in_sync() -> None:
    one = properties(plan("c", None, {}, None))
    three = properties(plan("c", None, {"nodes": 3}, None), 2)
    assert (one["transaction.state.log.replication.factor"], one["transaction.state.log.min.isr"]) == ("1", "1")
    assert (three["transaction.state.log.replication.factor"], three["transaction.state.log.min.isr"]) == ("3", "2")
    assert three["node.id"] == "3"
    assert three["controller.quorum.voters"].count("@") == 3


def test_two_phase_commit_is_on_and_properties_of_the_user_take_precedence() -> None:
    assert properties(plan("c", None, {}, None))["transaction.two.phase.commit.enable"] == "true"
    own = plan("c", None, {"config": {"transaction.two.phase.commit.enable": "false"}}, None)
    assert properties(own)["transaction.two.phase.commit.enable"] == "false"


def test_all_ports_are_distinct_and_the_one_asked_for_is_the_first_nodes() -> None:
    record = plan("c", None, {"nodes": 3, "security": Security(users={"alice": "secret"})}, 20500)
    ports = [port for node in record.nodes for port in node.ports.values()]
    assert len(set(ports)) == 9
    assert record.bootstrap_servers("PLAINTEXT") == "127.0.0.1:20500,127.0.0.1:20501,127.0.0.1:20502"


def test_clients_of_the_proxied_listener_are_told_the_ports_of_the_proxies_and_brokers_are_not() -> None:
    record = plan("c", None, {"nodes": 3, "proxy_port": 20600}, None)
    for place, node in enumerate(record.nodes):
        found = properties(record, place)
        own = f"PLAINTEXT://127.0.0.1:{node.ports['PLAINTEXT']}"
        assert found["advertised.listeners"] == f"{own},PROXIED://127.0.0.1:{20600 + place}"
        assert f"{own},PROXIED://127.0.0.1:{node.ports['PROXIED']}," in found["listeners"]
        assert found["inter.broker.listener.name"] == "PLAINTEXT"
        assert found["listener.security.protocol.map"] == "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,PROXIED:PLAINTEXT"
        assert not {20600, 20601, 20602} & set(node.ports.values())
    with pytest.raises(DevClusterError, match=r"first proxy's port can't be 65534"):
        plan("c", None, {"nodes": 3, "proxy_port": 65_534}, None)


@table("config", [{"listeners": "x"}, {"a": "1\n2"}, {"": "1"}])
def test_properties_that_would_break_the_cluster_are_refused(config: dict[str, str]) -> None:
    with pytest.raises(DevClusterError):
        ClusterSettings(config=config)


@table("port, nodes", [(-1, 1), (0, 1), (65_536, 1), (65_534, 3)])
def test_a_port_that_does_not_exist_is_refused(port: int, nodes: int) -> None:
    with pytest.raises(DevClusterError, match=f"(?s)can't be {port}.*from 1 to {65_536 - nodes}"):
        plan("c", None, {"nodes": nodes}, port)


@table("asked, why", [({"kafka_version": "latest"}, "'latest' is not a Kafka version"), ({"nodes": 2}, "1 or 3")])
def test_a_value_that_does_not_exist_is_refused_before_it_is_compared_with_the_data(asked: dict[str, Any], why: str) -> None:
    with pytest.raises(DevClusterError, match=why):
        plan("c", formatted(), asked, None)


def test_a_record_survives_being_written_and_read(tmp_path: Path) -> None:
    security = Security(users={"alice": "secret"}, tls=TlsFiles(tmp_path / "ca", tmp_path / "cert", tmp_path / "key"))
    settings = {"nodes": 3, "config": {"a": "1"}, "features": {"f": "1"}, "security": security}
    for record in (plan("c", None, settings, None), plan("c", None, {"java_options": ("-Xmx384m",)}, None)):
        record.save(tmp_path)
        assert ClusterRecord.load(tmp_path) == record
    assert (tmp_path / "cluster.json").stat().st_mode & 0o077 == 0


def test_a_stopped_cluster_keeps_its_ports_and_takes_new_properties() -> None:
    known = formatted()
    again = plan("c", known, {"config": {"num.partitions": "3"}}, None)
    assert again.nodes[0].ports == known.nodes[0].ports
    assert again.cluster_id == known.cluster_id
    assert again.formatted
    assert again.settings.config == {"num.partitions": "3"}


@table(
    "asked",
    [
        {"nodes": 3},
        {"features": {"transaction.version": "1"}},
        {"kafka_version": "3.9.1"},
        {"security": Security(users={"alice": "secret"})},
    ],
)
def test_settings_fixed_by_formatting_cannot_be_changed(asked: dict[str, object]) -> None:
    with pytest.raises(SettingsDifferError, match="down --purge") as caught:
        plan("c", formatted(), asked, None)
    assert len(caught.value.differences) == 1


def test_settings_of_a_failed_start_are_not_kept() -> None:
    failed = plan("c", None, {"config": {"broker.heartbeat.interval.ms": "x"}}, None)
    assert plan("c", failed, {}, None).settings.config == {}


@table("value, text", [("C\\:b", "C\\\\:b"), ("é→", "\\u00e9\\u2192"), ("😀", "\\ud83d\\ude00"), (" x=y", "\\ x=y"), (1, "1")])
def test_values_are_escaped_for_properties_files(value: object, text: str) -> None:
    assert render({"a b": value}).splitlines()[-1] == f"a\\ b={text}"


def test_a_password_that_would_break_out_of_its_quotes_is_refused() -> None:
    with pytest.raises(DevClusterError, match="password"):
        Security(users={"alice": 'se"cret'})


def test_other_java_options_are_a_difference() -> None:
    settings = ClusterSettings(java_options=["-Xmx384m"], config={"a": "1"})
    assert settings.differences(ClusterSettings(config={"a": "1"})) == [f"java_options: ('-Xmx384m',), not {STARTS_FAST}"]
