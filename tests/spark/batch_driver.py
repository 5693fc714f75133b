"""python batch_driver.py SETTINGS: batch writes of orders, one for each file that appears, with any Spark master.

SETTINGS is a JSON file with `place` (Spark's folder, in which the files appear), `master` ("standalone" starts a master with
two workers, each with its own host name), `spark` (settings of the session) and `options` (of the sink).

A JSON file `write-N` has `first`, `last` and `partitions`. The script prints `saved N`, and ends when the file `end` appears.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import DataFrame, SparkSession

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


def orders(spark: SparkSession, told: dict[str, Any]) -> DataFrame:
    columns = ("id", "concat('item ', id) as item", "id * 1.5D as price", "cast(id as string) as key")
    frame = spark.range(told["first"], told["last"], 1, told["partitions"]).selectExpr(*columns)
    return frame.selectExpr("*", "to_json(struct(id, item, price)) as value")


def wait_for(place: Path, number: int) -> dict[str, Any] | None:
    """The next request to write, or None at the end."""
    command = place / f"write-{number}"
    while not command.exists():
        if (place / "end").exists():
            return None
        time.sleep(0.05)
    told: dict[str, Any] = json.loads(command.read_text())
    return told


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    place, master = Path(settings["place"]), settings["master"]
    if not master.startswith("local["):
        os.environ["SPARK_HOME"] = str(home := own_home(place))
        if master == "standalone":
            master = start_cluster(home, place)
    spark = open_session(place, master, settings["spark"])
    dualwrite.spark.register(spark)
    say("open")
    for number in itertools.count():
        told = wait_for(place, number)
        if told is None:
            break
        orders(spark, told).write.format("dualwrite").mode("append").options(**settings["options"]).save()
        say("saved", number)
    spark.stop()


if __name__ == "__main__":
    main()
