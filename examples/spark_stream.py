"""A Spark stream that writes files to a table and to a topic, exactly once: stop it, kill it, start it again as you like.

    export DUALWRITE_DATABASE_URL=postgresql+psycopg://localhost/flights DUALWRITE_KAFKA_BOOTSTRAP_SERVERS=127.0.0.1:9092
    dualwrite db upgrade
    python examples/spark_stream.py --input folder-of-flights --checkpoint checkpoint-of-flights

The files of examples/spark_batch.py are the stream, one for each month, which makes a micro-batch. Started again with the same
checkpoint, the query goes on where it was: what is committed is not written again, and what is not has left nothing.

The checkpoint makes it the same query. A query with another checkpoint can't have this one's prefix, so that it writes nothing
twice by mistake; `dualwrite recover --prefix flights_by_month-import --release` lets it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pyspark.sql.streaming import StreamingQuery
from spark_batch import as_messages, count_rows, create_table, make_input, open_spark, options

import dualwrite


def main() -> None:
    """Run the query until every file is written."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--input", type=Path, required=True, help="the folder of the flights; it is made and filled")
    arguments.add_argument("--checkpoint", type=Path, required=True, help="the folder in which Spark keeps where the query is")
    arguments.add_argument("--name", default="flights_by_month", help="of the table and of the topic (flights_by_month)")
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
        .trigger(availableNow=True)  # a query that goes on for ever has processingTime="10 seconds"
        .start()
    )
    show_progress(query)
    spark.stop()
    print(f"{count_rows(settings, chosen.name):,} flights are in the table {chosen.name}.")


def show_progress(query: StreamingQuery) -> None:
    """Tell of each micro-batch, until the query ends; raises what it ended with."""
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
