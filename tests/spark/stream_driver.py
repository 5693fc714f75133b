"""python stream_driver.py SETTINGS: a stream of orders from files, over the available input; tests kill it.

SETTINGS is a JSON file with `place` (Spark's folder), `input`, `checkpoint`, `schema`, `partitions`, `tries` (how often the
query is started in this session before the script fails) and `options` (of the sink).
"""

import json
import sys
from pathlib import Path
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

import dualwrite.spark
from spark.session import open_session, say


def run(spark: SparkSession, settings: dict[str, Any]) -> None:
    files = spark.readStream.schema(settings["schema"]).option("maxFilesPerTrigger", 1).json(settings["input"])
    orders = files.selectExpr("*", "cast(id as string) as key", "to_json(struct(*)) as value")
    writer = (
        orders.repartition(settings["partitions"])
        .writeStream.option("checkpointLocation", settings["checkpoint"])
        .trigger(availableNow=True)
    )
    writer.format("dualwrite").options(**settings["options"]).start().awaitTermination()


settings = json.loads(Path(sys.argv[1]).read_text())
spark = open_session(Path(settings["place"]))
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
