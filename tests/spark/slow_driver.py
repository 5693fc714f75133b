"""python slow_driver.py PLACE [OPTION=VALUE …]: writes 20 rows in two partitions with SlowSink."""

import sys
from pathlib import Path

from spark.session import open_session
from spark.slow_sink import SlowSink, say

spark = open_session(Path(sys.argv[1]))
spark.dataSource.register(SlowSink)
say("open")
writer = spark.range(0, 20, 1, 2).write.format("slow").mode("append")
for option in sys.argv[2:]:
    writer = writer.option(*option.split("=", 1))
writer.save()
say("saved")
spark.stop()
say("stopped")
