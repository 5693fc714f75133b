"""A Kafka Connect worker with Debezium's PostgreSQL connector: publishes an outbox by the event router, exactly once.

The settings are those of Debezium's and Kafka's documentation for this, and otherwise the defaults. Differences, each in
Debezium's favor: nothing is read before the slot exists (`no_data`), there are no headers about Debezium itself, and PostgreSQL
does not send it the deletions. The jars are on Maven Central.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from sqlalchemy import make_url

from dualwrite.devcluster.programs import DEFAULT_KAFKA_VERSION, artifact_jars, find_java
from dualwrite.errors import DualWriteError
from dualwrite.testing.server_process import ServerProcess, free_port

CONNECTOR: Final = "debezium-connector-postgres"
DEBEZIUM_VERSION: Final = "3.6.1.Final"
_ARTIFACTS: Final = (
    *(f"org.apache.kafka:{name}:{DEFAULT_KAFKA_VERSION}" for name in ("connect-runtime", "connect-json", "kafka-clients")),
    # jgo would choose the versions of Jersey and Jetty, which are too old for Connect
    "jakarta.ws.rs:jakarta.ws.rs-api:3.1.0",
    "jakarta.servlet:jakarta.servlet-api:6.0.0",
    f"io.debezium:{CONNECTOR}:{DEBEZIUM_VERSION}",
    f"io.debezium:debezium-api:{DEBEZIUM_VERSION}",
    "org.apache.logging.log4j:log4j-slf4j-impl:2.25.2",
)
_JAVA_OPTIONS: Final = (
    "-server",
    "-Xms256M",
    "-Xmx2G",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
    "-Dorg.apache.logging.log4j.level=ERROR",
)
"""Those of Kafka's `connect-distributed.sh`."""
_LIMIT: Final = 60.0


class ConnectStartError(DualWriteError):
    """The worker or a connector did not start."""


def connect_jars() -> list[Path]:
    """The jars of Connect and of the connector. Raises DevClusterError if they can't be downloaded."""
    return artifact_jars(
        "Debezium", f"{DEBEZIUM_VERSION}-{DEFAULT_KAFKA_VERSION}", _ARTIFACTS, not_needed=("org.apache.kafka:kafka-tools-api",)
    )


class ConnectWorker(ServerProcess):
    """One worker of a Connect cluster of its own, on a free port; see ServerProcess for its lifecycle.

    Args:
        jars: `connect_jars()`.
        bootstrap: Kafka's `bootstrap.servers`.
        group: The name of the Connect cluster.
    """

    _kind: ClassVar[str] = "Connect"
    _start_error: ClassVar[type[DualWriteError]] = ConnectStartError

    def __init__(self, jars: Sequence[Path], bootstrap: str, group: str) -> None:
        super().__init__()
        self._jars, self._bootstrap, self._group = jars, bootstrap, group

    def url_at(self, port: int) -> str:
        return f"http://127.0.0.1:{port}"

    def publish(self, name: str, url: str, table: str, poll: float) -> None:
        """Start a connector for an outbox, and wait until it follows the database's log.

        Args:
            name: The name of the connector, its slot and its publication, which must exist.
            url: The database, with `wal_level=logical`.
            table: The outbox, in the schema `public`.
            poll: The connector's `poll.interval.ms`, in seconds.
        """
        address = make_url(url)
        status, answer = self._ask(
            "PUT",
            f"/connectors/{name}/config",
            {
                "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
                "tasks.max": "1",
                "exactly.once.support": "required",
                "database.hostname": address.host,
                "database.port": str(address.port),
                "database.user": address.username,
                "database.password": address.password or "none",
                "database.dbname": address.database,
                "topic.prefix": name,
                "plugin.name": "pgoutput",
                "slot.name": name,
                "publication.name": name,
                "publication.autocreate.mode": "disabled",
                "table.include.list": f"public.{table}",
                "snapshot.mode": "no_data",
                "tombstones.on.delete": "false",
                "extended.headers.enabled": "false",
                "poll.interval.ms": str(round(poll * 1e3)),
                "transforms": "outbox",
                "transforms.outbox.type": "io.debezium.transforms.outbox.EventRouter",
            },
        )
        if status not in (http.client.OK, http.client.CREATED):
            raise ConnectStartError(f"Connect refused the connector {name}.", cause=f"{status} {answer}")

    def check(self, name: str) -> None:
        """Raise ConnectStartError if a connector or its task has failed."""
        status, answer = self._ask("GET", f"/connectors/{name}/status")
        if status == http.client.OK and any(each["state"] == "FAILED" for each in (answer["connector"], *answer["tasks"])):
            raise ConnectStartError(f"The connector {name} failed.", cause=json.dumps(answer)[-4000:])

    def end(self, name: str) -> None:
        """Remove a connector; its task ends soon after."""
        self._ask("DELETE", f"/connectors/{name}")

    # --- inside -----------------------------------------------------------------------------------------------------------

    def _ask(self, method: str, path: str, content: Any = None) -> tuple[int, Any]:
        """The status of the answer, and its content."""
        deadline = time.monotonic() + _LIMIT
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_LIMIT)
            try:
                connection.request(
                    method, path, None if content is None else json.dumps(content), {"Content-Type": "application/json"}
                )
                answer = connection.getresponse()
                status, text = answer.status, answer.read()
            finally:
                connection.close()
            if status != http.client.CONFLICT or time.monotonic() > deadline:  # while the workers rebalance
                return status, json.loads(text) if text.startswith((b"{", b"[")) else text.decode(errors="replace")
            time.sleep(0.1)

    @property
    def _title(self) -> str:
        return "Kafka Connect"

    def _fill(self, folder: Path) -> None:
        self.port = free_port()
        (folder / "worker.properties").write_text("".join(f"{name}={value}\n" for name, value in self._settings().items()))

    def _settings(self) -> Mapping[str, str]:
        storages = ("config", "offset", "status")
        text = "org.apache.kafka.connect.storage.StringConverter"
        return {
            "bootstrap.servers": self._bootstrap,
            "group.id": self._group,
            "exactly.once.source.support": "enabled",
            "listeners": self.url,
            "plugin.discovery": "service_load",
            "key.converter": text,
            "value.converter": text,
            **{f"{each}.storage.topic": f"{self._group}-{each}" for each in storages},
            **{f"{each}.storage.replication.factor": "1" for each in storages},
        }

    def _server_command(self, folder: Path) -> Sequence[str | Path]:
        classes = os.pathsep.join(map(str, self._jars))
        main = "org.apache.kafka.connect.cli.ConnectDistributed"
        return [find_java().executable, *_JAVA_OPTIONS, "-cp", classes, main, folder / "worker.properties"]

    def _ping(self) -> None:
        status, answer = self._ask("GET", "/connectors")
        if status != http.client.OK:  # it listens before it serves
            raise ConnectionError(f"{status} {answer}")

    def _not_ready_errors(self) -> tuple[type[Exception], ...]:
        return (OSError, http.client.HTTPException)
