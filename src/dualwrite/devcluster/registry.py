"""The current user's clusters: the record of each one, the plan of the next start, and where they are by name."""

from __future__ import annotations

import base64
import json
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from dualwrite.devcluster.broker_process import BrokerProcess
from dualwrite.devcluster.cluster_settings import ClusterSettings
from dualwrite.devcluster.locations import LOOPBACK, DevClusterError, SettingsDifferError, free_port, make_directory, state_dir

PLAINTEXT = "PLAINTEXT"
CONTROLLER = "CONTROLLER"
"""Names of the two listeners that every node has."""

_FILE = "cluster.json"
_PARTIAL = f"{_FILE}.partial"
"""The record while it is being written."""


@dataclass
class NodeRecord:
    """One node: its ports by listener, and its latest process."""

    node_id: int
    ports: dict[str, int]
    process: BrokerProcess | None = None

    @property
    def alive(self) -> bool:
        """Whether its process is running."""
        return self.process is not None and self.process.alive

    @property
    def working(self) -> bool:
        """Whether its process is running and not paused."""
        return self.process is not None and self.process.alive and not self.process.paused


@dataclass
class ClusterRecord:
    """A cluster as it was last started."""

    name: str
    settings: ClusterSettings
    cluster_id: str
    nodes: list[NodeRecord]
    formatted: bool = False
    """Whether the storage of all nodes has been formatted."""

    @property
    def running(self) -> list[NodeRecord]:
        """The nodes whose processes are running."""
        return [node for node in self.nodes if node.alive]

    @property
    def listeners(self) -> dict[str, str]:
        """Bootstrap servers by listener, without the controller listener."""
        return {listener: self.bootstrap_servers(listener) for listener in self.nodes[0].ports if listener != CONTROLLER}

    def bootstrap_servers(self, listener: str) -> str:
        """Host and port of every node's listener of this name."""
        return ",".join(f"{LOOPBACK}:{node.ports[listener]}" for node in self.nodes)

    @classmethod
    def load(cls, data_dir: Path) -> Self | None:
        """Read the record of a data directory; None if it has none.

        Raises:
            DevClusterError: The record can't be read, such as one that another release has written.
        """
        path = data_dir / _FILE
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            nodes = [
                NodeRecord(node["node_id"], node["ports"], node["process"] and BrokerProcess(**node["process"]))
                for node in data["nodes"]
            ]
            return cls(**{**data, "settings": ClusterSettings.from_json(data["settings"]), "nodes": nodes})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DevClusterError(
                f"The record {path} can't be read.", cause=str(error), next_step=f"remove {data_dir}", data_dir=data_dir
            ) from error

    def save(self, data_dir: Path) -> None:
        """Write the record atomically, readable by its owner only, since it may contain passwords."""
        partial = data_dir / _PARTIAL
        try:
            partial.touch(mode=0o600)
            partial.write_text(json.dumps(self, indent=1, default=_as_json), encoding="utf-8")
            partial.replace(data_dir / _FILE)
        except BaseException:  # such as a full disk
            partial.unlink(missing_ok=True)
            raise

    @staticmethod
    def exists(data_dir: Path) -> bool:
        """Whether this directory contains a cluster."""
        return (data_dir / _FILE).is_file()

    @staticmethod
    def has_other_files(data_dir: Path) -> bool:
        """Whether this directory contains anything apart from a record and one that a killed process has not completed."""
        return data_dir.is_dir() and any(path.name not in (_FILE, _PARTIAL) for path in data_dir.iterdir())

    @staticmethod
    def remove(data_dir: Path) -> None:
        """Remove the record, and one that a killed process has not completed."""
        for name in (_FILE, _PARTIAL):
            (data_dir / name).unlink(missing_ok=True)


def plan(name: str, known: ClusterRecord | None, requested: Mapping[str, Any], port: int | None) -> ClusterRecord:
    """The record of the cluster to start, from its existing one and the requested settings, without those that were not given.

    `port` is the requested one of the first node's plain listener.

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
            chosen[listener] = port + node_id - 1 if port is not None and listener == PLAINTEXT else free_port(reserved)
            reserved.add(chosen[listener])
        nodes.append(NodeRecord(node_id, chosen))
    return ClusterRecord(name, settings, new_id(), nodes)


def _as_json(value: Any) -> Any:
    """What json can't write by itself: the paths of TLS files, and our own objects."""
    return str(value.absolute()) if isinstance(value, Path) else dict(value) if isinstance(value, Mapping) else vars(value)


def new_id() -> str:
    """A new id in Kafka's format: a UUID in URL-safe base64. None starts with a dash, which would look like an option."""
    while (text := base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return text


def directory(name: str) -> Path:
    """The cluster's directory; its data is there too, unless the user chose another directory.

    Raises:
        DevClusterError: The name has characters that are not allowed.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise DevClusterError(
            f"{name!r} is not a valid cluster name.", next_step="use letters, digits, dots, dashes and underscores"
        )
    return state_dir() / "clusters" / name


def data_dir(name: str) -> Path:
    """Where the data of the cluster is, or will be: its directory may be a link to one that the user chose."""
    own = directory(name)
    return own.readlink() if own.is_symlink() else own


def remember(name: str, place: Path) -> None:
    """Record where the data of a cluster is. The caller must hold the cluster's lock."""
    own = directory(name)
    if place == data_dir(name):
        return
    if own.is_symlink():
        own.unlink()
    elif own.exists():
        own.rmdir()
    if place != own:
        make_directory(own.parent)
        own.symlink_to(place)


def forget(name: str) -> None:
    """Remove everything that is stored for the name. The caller must hold the cluster's lock.

    A process that waits for the lock notices that the lock file is gone, and creates a new one.
    """
    own = directory(name)
    if own.is_symlink():
        own.unlink()
    _lock_file(name).unlink(missing_ok=True)
    for path in (own, own.parent, own.parent.parent):
        with suppress(OSError):  # missing, or not empty
            path.rmdir()


def names() -> list[str]:
    """Names of all clusters that have a record, running or not."""
    found = sorted(path.name for path in (state_dir() / "clusters").glob("*") if path.is_dir())
    return [name for name in found if ClusterRecord.exists(data_dir(name))]


def _lock_file(name: str) -> Path:
    return directory(name).with_name(f".{name}.lock")


@contextmanager
def lock(name: str, *, timeout: float) -> Iterator[None]:
    """Keep other processes from changing the cluster at the same time.

    Raises:
        DevClusterError: Another process held the lock for longer than `timeout` seconds.
    """
    path = _lock_file(name)
    make_directory(path.parent)
    file_lock = FileLock(path)
    try:
        file_lock.acquire(timeout=timeout)
    except Timeout as error:
        raise DevClusterError(
            f"Another process is starting or stopping the cluster {name!r}.",
            next_step="try again when that process is done",
            cluster=name,
        ) from error
    try:
        yield
    finally:
        file_lock.release()
