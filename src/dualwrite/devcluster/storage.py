"""Formats the storage of a cluster's nodes, as `kafka-storage format` does."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path

from dualwrite.devcluster.errors import BrokerExitedError, DevClusterError
from dualwrite.devcluster.settings import ClusterSettings

_META = "meta.properties"
_FORMAT_TIMEOUT = 120.0


def new_id() -> str:
    """A new id in Kafka's format: a UUID in URL-safe base64. None starts with a dash, which would look like an option."""
    while (text := base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return text


def format_storage(
    java_command: Sequence[str | Path], settings: ClusterSettings, cluster_id: str, *, properties: Path, storage: Path
) -> None:
    """Format one node's storage.

    Args:
        java_command: Java with options and class path, without the main class.
        settings: The settings, whose feature levels and SCRAM users are written to the storage.
        cluster_id: Id of the new cluster.
        properties: The node's `server.properties`.
        storage: Its storage directory; anything left by a failed attempt is removed.

    Raises:
        BrokerExitedError: Kafka refused, most often because of a property; the message has the end of its output.
        DevClusterError: Formatting took too long.
    """
    shutil.rmtree(storage, ignore_errors=True)
    features = [argument for name, level in settings.features.items() for argument in ("--feature", f"{name}={level}")]
    scram = settings.security.scram_arguments if settings.security else []
    command = [
        *java_command,
        "kafka.tools.StorageTool",
        "format",
        f"--cluster-id={cluster_id}",
        f"--config={properties}",
        *features,
        *scram,
    ]
    try:
        done = subprocess.run(  # noqa: S603  (dualwrite's own command)
            command, capture_output=True, text=True, errors="replace", timeout=_FORMAT_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise DevClusterError(
            f"Formatting the storage took longer than {_FORMAT_TIMEOUT:g} s.",
            cause="the machine or its disk is very busy, or Java hangs",
            next_step="try again",
        ) from error
    if done.returncode != 0:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if not re.match(r"\s+at |\S+ INFO", line)]
        tail = "\n".join(lines[-8:])
        raise BrokerExitedError(
            f"Kafka {settings.kafka_version} refused to format the storage.\n{tail}\n",
            next_step="correct the property, feature or user that Kafka reports",
            log_file=None,
            log_tail=tail,
        )


def clone_storage(source: Path, target: Path, node_id: int) -> None:
    """Create another node's storage from a freshly formatted one: only two ids differ.

    This saves a JVM per node, and gives all nodes the same SCRAM credentials.
    """
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    meta = target / _META
    text = re.sub(r"(?m)^node\.id=.*$", f"node.id={node_id}", meta.read_text(encoding="ascii"))
    meta.write_text(re.sub(r"(?m)^directory\.id=.*$", f"directory.id={new_id()}", text), encoding="ascii")
