"""The environment that a benchmark's figures depend on."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import confluent_kafka
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

import dualwrite
import workload
from machine import is_in_memory
from services import Services

_SETTINGS: Final = ("server_version", "fsync", "synchronous_commit", "full_page_writes")
OPTIONS: Final = "options"

_OWN_BROKER: Final = {True: "our own, one node, JVM options of a server, warm", False: "our own, one node, starts fast"}


def surroundings(servers: Services, options: argparse.Namespace, more: Mapping[str, Any]) -> dict[str, Any]:
    """Versions, machine, servers and options."""
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
    return {
        "dualwrite": dualwrite.__version__,
        "python": platform.python_version(),
        "machine": f"{os.cpu_count()} processors, {platform.machine()}, {platform.system()}",
        "load average before": os.getloadavg()[0],
        "producer": options.producer,
        "librdkafka": confluent_kafka.libversion()[0],
        "postgresql": postgres,
        "kafka": _OWN_BROKER[bool(getattr(options, "broker_warm_up", 0))]
        if servers.brokers
        else servers.kafka["bootstrap.servers"],
        **more,
        OPTIONS: {name: str(value) for name, value in vars(options).items()},
    }


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
