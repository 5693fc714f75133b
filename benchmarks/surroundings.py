"""The environment that a benchmark's figures depend on."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import confluent_kafka
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

import dualwrite
import workload
from dualwrite.kafka.native.compiled import is_compiled
from machine import is_in_memory, processor_model
from services import Services

ROOT: Final = Path(__file__).resolve().parents[1]
OPTIONS: Final = "options"
_SETTINGS: Final = ("server_version", "fsync", "synchronous_commit", "full_page_writes")
_PACKAGES: Final = ("psycopg", "SQLAlchemy", "confluent-kafka")


def surroundings(servers: Services, options: argparse.Namespace, more: Mapping[str, Any]) -> dict[str, Any]:
    """Date, versions, machine, servers and options."""
    return without_database(servers.cluster, options, {"postgresql": _postgres(servers), **more})


def without_database(cluster: str, options: argparse.Namespace, more: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a benchmark that uses no database; `cluster` says what the Kafka cluster is."""
    return without_servers(options, {"kafka": cluster, **more})


def without_servers(options: argparse.Namespace, more: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a benchmark that uses no servers."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "dualwrite": f"{dualwrite.__version__}, commit {commit(ROOT)}{', compiled' if is_compiled() else ''}",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
        "librdkafka": confluent_kafka.libversion()[0],
        "machine": f"{os.cpu_count()} processors, {processor_model()}, {platform.machine()}, {platform.system()}",
        "load average before": os.getloadavg()[0],
        **({"producer": options.producer} if "producer" in options else {}),
        **more,
        OPTIONS: {name: str(value) for name, value in vars(options).items()},
    }


def commit(checkout: Path) -> str:
    """The commit of a checkout, with `-dirty` if files are changed."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603  (the command above)
    except (OSError, subprocess.CalledProcessError):  # no git, or not a checkout
        return "unknown"
    return done.stdout.strip()


def _postgres(servers: Services) -> dict[str, str]:
    database = workload.engine(servers.url)
    with database.connect() as connection:
        postgres = {name: str(connection.scalar(text(f"SHOW {name}"))) for name in _SETTINGS}
        try:
            folder = str(connection.scalar(text("SHOW data_directory")))
        except DBAPIError:  # only a superuser may see it
            folder = None
    database.dispose()
    if folder is not None and servers.owns_database and is_in_memory(Path(folder)):
        postgres["data"] = "in memory"
    return postgres


def line(around: Mapping[str, Any]) -> str:
    """The surroundings in one line."""
    return "; ".join(f"{name}: {value}" for name, value in around.items() if name != OPTIONS)


def warnings(around: Mapping[str, Any]) -> Iterator[str]:
    """Reasons why the figures are less significant than they look."""
    postgres = around["postgresql"]
    if "off" in (postgres["fsync"], postgres["synchronous_commit"]):
        yield "WARNING: this PostgreSQL does not wait for its disk, so its commits are not durable."
    if "data" in postgres:
        yield "WARNING: this PostgreSQL's files are in memory, so its commits are not durable; set TMPDIR to a folder on disk."
