"""A Spark stream that writes files to a table and a topic exactly once: you can stop, kill and restart it at any time.

    export DUALWRITE_DATABASE_URL=postgresql+psycopg://localhost/flights DUALWRITE_KAFKA_BOOTSTRAP_SERVERS=127.0.0.1:9092
    dualwrite db upgrade
    python examples/spark_stream.py --input folder-of-flights --checkpoint checkpoint-of-flights

The stream consists of the files of examples/spark_batch.py, one per month; each is a micro-batch. After a restart with the same
checkpoint, the query continues where it was: committed micro-batches are not written again, and others left nothing behind.

The checkpoint identifies the query. A query with another checkpoint can't use this one's prefix, so it can't write data twice
by mistake, unless you release the prefix with `dualwrite recover --prefix flights_by_month-import --release`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pyspark.sql.streaming import StreamingQuery
from spark_batch import as_messages, count_rows, create_table, make_input, open_spark, options

import dualwrite


def main() -> None:
    """Run the query until all files are written."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--input", type=Path, required=True, help="the folder for the flights; it is created and filled")
    arguments.add_argument("--checkpoint", type=Path, required=True, help="the folder for the query's progress")
    arguments.add_argument("--name", default="flights_by_month", help="table and topic name (default: flights_by_month)")
    chosen = arguments.parse_args()
    settings = dualwrite.Settings.from_environment()
    create_table(settings, chosen.name)
    make_input(chosen.input)

    spark = open_spark(chosen.name)
    schema = spark.read.parquet(str(chosen.input)).schema
    files = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(chosen.input))
    query = (
        as_messages(files)
        .writeStream.format("dualwrite")
        .options(**options(settings, chosen.name))
        .option("checkpointLocation", str(chosen.checkpoint))
        .trigger(availableNow=True)  # for a continuous query use processingTime="10 seconds"
        .start()
    )
    show_progress(query)
    spark.stop()
    print(f"{count_rows(settings, chosen.name):,} flights are in the table {chosen.name}.")


def show_progress(query: StreamingQuery) -> None:
    """Print each micro-batch until the query ends; raise its exception if it failed."""
    newest = -1
    while True:
        has_ended = query.awaitTermination(1)
        for progress in query.recentProgress:
            if progress.batchId > newest:
                newest = progress.batchId
                rows, seconds = progress.sink.numOutputRows, progress.durationMs["triggerExecution"] / 1000
                print(f"batch {newest}: {rows:,} flights in {seconds:.1f} s", flush=True)
        if has_ended:
            return


if __name__ == "__main__":
    main()
