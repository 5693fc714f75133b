"""The core of the crash tests on one release of a broker and of a database, outside of pytest: for `tools/matrix.py`.

    python -m crash.core KAFKA DATABASE RELEASE

KAFKA is a release such as 4.1.2, or `kfake:4.0`; RELEASE is that of the database, or empty for the usual one. A process is
killed at each step of a writer, and at each step of the recovery of two states that a writer left, always with a new id. After
recovery in two processes at once, a row exists if and only if its message does. Prints the result as JSON.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

from crash.cases import WRITER_POINTS, recovery_dies, recovery_steps, writer_dies
from crash.databases import Databases
from crash.scene import Scene
from dualwrite.devcluster import DevCluster
from dualwrite.kafka.inspect import probe
from dualwrite.testing.postgres import PostgresServer
from fixtures import kfake_broker
from fixtures.mariadb_programs import downloaded_programs
from fixtures.mariadb_server import MariaDBServer
from fixtures.mysql_server import MySQLServer
from fixtures.pace import LIMIT
from fixtures.postgres_binaries import downloaded_postgres

Step = Callable[[Scene], None]

PASSED: Final = "passed:"

_KFAKE: Final = "kfake:"
_VERSION: Final = re.compile(r"Kafka version: (\S+)")


def steps(*, aborts_by_registering: bool) -> Iterator[tuple[str, Step]]:
    """Each step, with its name; the argument is that of `recovery_steps`."""
    for point in WRITER_POINTS:
        yield point, partial(writer_dies, point=point)
    for left, point in recovery_steps(aborts_by_registering=aborts_by_registering):
        yield f"{left}, {point}", partial(recovery_dies, left=left, point=point)


def server(kind: type[Any], release: str) -> Any:
    """A server of the database in this release; PostgreSQL's and MariaDB's are downloaded."""
    if kind is PostgresServer:
        return PostgresServer(binaries=downloaded_postgres(release) if release else None)
    return MySQLServer() if release == "mysql" else MariaDBServer(programs=downloaded_programs(release) if release else None)


def run(kafka: str, database: str, release: str) -> dict[str, Any]:
    """The steps; returns what was run with what, and what failed."""
    failed: dict[str, str] = {}
    count = 0
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        broker: Any
        if kafka.startswith(_KFAKE):
            broker = opened.enter_context(kfake_broker.Kfake(kfake_broker.built(), kafka.removeprefix(_KFAKE)))
            reported = f"kfake {kfake_broker.release()}"
        else:
            broker = opened.enter_context(DevCluster.temporary(kafka_version=kafka, timeout=LIMIT))
            reported = _VERSION.findall(broker.logs())[0]
        databases = opened.enter_context(Databases(folder, lambda kind: opened.enter_context(server(kind, release))))
        with databases.scene(database, broker).engine.connect() as connection:
            asked = "sqlite_version()" if connection.dialect.name == "sqlite" else "version()"
            running = " ".join(str(connection.execute(sa.text(f"SELECT {asked}")).scalar_one()).split()[:2])  # no compiler
        capabilities = probe(broker.bootstrap_servers)
        for name, step in steps(aborts_by_registering=not capabilities.end_txn_v5):
            count += 1
            try:
                step(databases.scene(database, broker))
                print(PASSED, name, file=sys.stderr, flush=True)  # noqa: T201  (how far it came within its time)
            except Exception as error:  # noqa: BLE001  (of whatever kind: the other steps run, too)
                failed[name] = f"{type(error).__name__}: {error}"[:500]
                traceback.print_exc()
    return {
        "kafka": reported,
        "database": running,
        "python": sys.version.partition(" ")[0],
        "producer": "native" if capabilities.native_with(two_phase=capabilities.two_phase) else "librdkafka",
        "two-phase": capabilities.two_phase,
        "steps": count,
        "failed": failed,
    }


if __name__ == "__main__":
    print(json.dumps(run(*sys.argv[1:4])))  # noqa: T201  (for the process that has started this one)
