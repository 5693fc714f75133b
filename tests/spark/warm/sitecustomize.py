"""Spark's Python daemons import what their workers will need, before they fork one: a second or more for each worker.

The folder is in PYTHONPATH of what the tests start (`spark.session.environment`). Nothing here starts a thread, so that forking
is safe; numpy and pyarrow do, and workers import these themselves. `spark.python.daemon.module`, Spark's own setting for such a
thing, is for one of its six kinds of daemons only.
"""

import contextlib
import importlib
import sys

NEEDED = (
    "dualwrite.jobs.driver",
    "dualwrite.jobs.task",
    "dualwrite.kafka.client.coordinator",
    "dualwrite.kafka.native.native_producer",
    "dualwrite.stores.sql",
    "psycopg",
    "pyspark.sql.datasource",
    "pyspark.worker",
    "sqlalchemy.dialects.postgresql.psycopg",
    "sqlalchemy.orm",
)

if "pyspark.daemon" in sys.orig_argv:
    with contextlib.suppress(ImportError):  # a Python without dualwrite, in a test
        for name in NEEDED:
            importlib.import_module(name)
