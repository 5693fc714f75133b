"""A Spark job without one decision over the whole frame: every 500 rows of a partition are a transaction of their own.

    export DUALWRITE_DATABASE_URL=postgresql+psycopg://localhost/shop DUALWRITE_KAFKA_BOOTSTRAP_SERVERS=127.0.0.1:9092
    dualwrite db upgrade
    python examples/spark_partitions.py orders.csv orders-2026-11-21

orders.csv has the columns id, item and quantity. Run it again after a crash, with the same name of the job: it goes on after
the transactions that are committed, and where all are, it writes nothing.
"""

from __future__ import annotations

import json
import os
import sys

import pyarrow as pa
from pyspark.sql import SparkSession
from sqlalchemy import create_engine, text

import dualwrite
from dualwrite.spark import write_partitions

TOPIC = os.environ.get("SHOP_TOPIC", "orders")
CREATE = "CREATE TABLE IF NOT EXISTS orders (id varchar(40) PRIMARY KEY, item varchar(200), quantity integer)"
INSERT = "INSERT INTO orders (id, item, quantity) VALUES (:id, :item, :quantity)"


def writer(transactional_id: str) -> dualwrite.DualWriter:
    """Open a writer in the task: database and broker stand in the environment, which Spark's workers share here."""
    return dualwrite.connect(transactional_id=transactional_id)


def write(tx: dualwrite.Transaction, rows: pa.Table) -> None:
    """Write one chunk, in the database and to Kafka."""
    orders = rows.to_pylist()
    tx.db.execute(text(INSERT), orders)
    tx.send_many(TOPIC, [json.dumps(order) for order in orders], keys=[order["id"] for order in orders])


def main(path: str, job_id: str) -> None:
    """Write the orders of a CSV file."""
    engine = create_engine(os.environ["DUALWRITE_DATABASE_URL"])
    with engine.begin() as connection:
        connection.execute(text(CREATE))
    engine.dispose()

    spark = SparkSession.builder.appName(job_id).getOrCreate()
    orders = spark.read.csv(path, header=True, schema="id string, item string, quantity int")
    # the same rows in the same partitions, in the same order, each time that the job runs and wherever it does
    orders = orders.repartition(4, "id").sortWithinPartitions("id")
    done = write_partitions(orders, writer, write, job_id=job_id, prefix="orders-import", rows_per_transaction=500, arrow=True)
    print(f"{done.rows} orders written in {done.chunks} transactions; {done.rows_before} had been before")
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
