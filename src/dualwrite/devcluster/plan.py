"""Decides which cluster to run: the existing one, the same with changes that its storage allows, or a new one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dualwrite.devcluster import ports, storage
from dualwrite.devcluster.errors import SettingsDifferError
from dualwrite.devcluster.record import CONTROLLER, PLAINTEXT, ClusterRecord, NodeRecord
from dualwrite.devcluster.settings import ClusterSettings


def plan(name: str, known: ClusterRecord | None, requested: Mapping[str, Any], port: int | None) -> ClusterRecord:
    """The record of the cluster to start.

    Args:
        name: The cluster's name.
        known: Its existing record, if any.
        requested: The requested settings, without those that were not given.
        port: The requested port of the first node's plain listener, if any.

    Raises:
        SettingsDifferError: The cluster is running with other settings, or its storage was formatted with other settings.
        DevClusterError: A setting is not valid.
    """
    if known is None or not known.formatted:
        return _new_record(name, ClusterSettings(**requested), port)
    wanted = ClusterSettings(**{**vars(known.settings), **requested})
    first_port = known.nodes[0].ports[PLAINTEXT]
    if known.running:
        differences = known.settings.differences(wanted)
        if port not in (None, first_port):
            differences.append(f"port: {first_port}, not {port}")
        if differences:
            raise _differ(name, "is running with other settings", differences, "down")
        return known
    if obstacles := known.settings.obstacles(wanted):
        raise _differ(name, "has data that was created with other settings", obstacles, "down --purge")
    record = _new_record(name, wanted, port)
    record.cluster_id, record.formatted = known.cluster_id, True
    if port in (None, first_port):  # clients know the old ports
        for node, old in zip(record.nodes, known.nodes, strict=True):
            node.ports = {listener: old.ports.get(listener, new) for listener, new in node.ports.items()}
    return record


def _differ(name: str, what: str, differences: list[str], command: str) -> SettingsDifferError:
    return SettingsDifferError(
        f"The cluster {name!r} {what}: {'; '.join(differences)}.",
        next_step=f"omit that setting, use another name, or first run: dualwrite dev {command} --name {name}",
        cluster=name,
        differences=differences,
    )


def _new_record(name: str, settings: ClusterSettings, port: int | None) -> ClusterRecord:
    if port is not None:
        settings.check_port(port)
    listeners = (PLAINTEXT, CONTROLLER, *settings.listeners)
    reserved = {first + place for first in (port, settings.proxy_port) if first is not None for place in range(settings.nodes)}
    nodes = []
    for node_id in range(1, settings.nodes + 1):
        chosen: dict[str, int] = {}
        for listener in listeners:
            chosen[listener] = port + node_id - 1 if port is not None and listener == PLAINTEXT else ports.choose(reserved)
            reserved.add(chosen[listener])
        nodes.append(NodeRecord(node_id, chosen))
    return ClusterRecord(name, settings, storage.new_id(), nodes)
