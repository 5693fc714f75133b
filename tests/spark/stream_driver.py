"""python stream_driver.py SETTINGS: a stream of orders from files, over the available input, with any master; tests kill it.

SETTINGS is a JSON file with `place` (Spark's folder), `master` ("standalone" starts a master with two workers, each with its
own host name), `spark` (settings of the session), `input`, `checkpoint`, `schema`, `partitions`, `tries` (how often the query
is started in this session before the script fails) and `options` (of the sink).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyspark
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

import dualwrite.spark
from dualwrite.testing.server_process import free_port
from spark.session import open_session, say

HOSTS = ("127.0.0.1", "127.0.0.2")
"""Spark runs no second copy of a task on a host that has one."""


def own_home(place: Path) -> Path:
    """A Spark home with Spark's own files, in which clusters can write."""
    home = place / "spark-home"
    home.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        if entry.name != "work":
            (home / entry.name).symlink_to(entry)
    return home


def start_cluster(home: Path, place: Path) -> str:
    """Start a master and two workers, which end with this process; return the master's address."""
    port = str(free_port())
    address = f"spark://{HOSTS[0]}:{port}"
    _start(home, place / "master.log", "master.Master", "--host", HOSTS[0], "--port", port)
    for host in HOSTS:
        resources = ("-c", "1", "-m", "1g", "-d", str(place / host))
        _start(home, place / f"worker-{host}.log", "worker.Worker", "--host", host, "--port", "0", *resources, address)
    return address


def _start(home: Path, log: Path, what: str, *arguments: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "SPARK_LOCAL_IP"}
    with log.open("wb") as output:
        subprocess.Popen(
            [home / "bin" / "spark-class", f"org.apache.spark.deploy.{what}", *arguments, "--webui-port", "0"],
            env={**environment, "SPARK_HOME": str(home), "SPARK_DAEMON_MEMORY": "256m"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509  (one prctl, no lock)
        )


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def session_on(place: Path, master: str, settings: dict[str, str]) -> SparkSession:
    if not master.startswith("local["):
        os.environ["SPARK_HOME"] = str(home := own_home(place))
        if master == "standalone":
            master = start_cluster(home, place)
    return open_session(place, master, settings)


def run(spark: SparkSession, settings: dict[str, Any]) -> None:
    files = spark.readStream.schema(settings["schema"]).option("maxFilesPerTrigger", 1).json(settings["input"])
    orders = files.selectExpr("*", "cast(id as string) as key", "to_json(struct(*)) as value")
    writer = (
        orders.repartition(settings["partitions"])
        .writeStream.option("checkpointLocation", settings["checkpoint"])
        .trigger(availableNow=True)
    )
    writer.format("dualwrite").options(**settings["options"]).start().awaitTermination()


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    spark = session_on(Path(settings["place"]), settings["master"], settings["spark"])
    dualwrite.spark.register(spark)
    say("open")
    for left in reversed(range(settings["tries"])):
        try:
            run(spark, settings)
            break
        except StreamingQueryException:
            say("failed")
            if not left:
                raise
    spark.stop()
    say("done")


if __name__ == "__main__":
    main()
