"""A Spark job that does not commit the frame as a whole: every 500 rows of a partition are a separate transaction.

    export DUALWRITE_DATABASE_URL=postgresql+psycopg://localhost/shop DUALWRITE_KAFKA_BOOTSTRAP_SERVERS=127.0.0.1:9092
    dualwrite db upgrade
    python examples/spark_partitions.py orders.csv orders-2026-11-21

orders.csv has the columns id, item and quantity. After a crash run it again with the same job name: it continues after the
committed transactions. If all of them are committed, it writes nothing.
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
    """Return a writer for the task: it reads database and broker from the environment, which local Spark workers inherit."""
    return dualwrite.connect(transactional_id=transactional_id)


def write(tx: dualwrite.Transaction, rows: pa.Table) -> None:
    """Write one chunk to the database and to Kafka."""
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
    # makes the frame deterministic: each run has the same rows in the same partitions, in the same order
    orders = orders.repartition(4, "id").sortWithinPartitions("id")
    done = write_partitions(orders, writer, write, job_id=job_id, prefix="orders-import", rows_per_transaction=500, arrow=True)
    print(f"Wrote {done.rows} orders in {done.chunks} transactions; {done.rows_before} orders were committed before.")
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
