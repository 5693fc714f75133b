"""Orders written by Spark to a table and a topic, and the checks of both afterwards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from dualwrite.stores.sql import SqlStateStore
from fixtures.broker import read_topic
from fixtures.job_evidence import open_at_kafka, staged_rows, unresolved
from fixtures.pace import TimeLimitError, limit, until

if TYPE_CHECKING:
    from confluent_kafka import Message
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

LIMIT = limit(120)
SCHEMA = "id bigint, item string, price double"
ORDERS = "CREATE TABLE orders (id bigint PRIMARY KEY, item varchar(100) NOT NULL, price double precision)"


def await_end(query: StreamingQuery) -> None:
    """Wait for the query's end; raise its exception if it failed."""
    if not query.awaitTermination(int(LIMIT)):
        raise TimeLimitError(f"the query has not ended within {LIMIT:.0f} s")


@dataclass
class SparkScene:
    """One job, with its own prefix and topic.

    Args:
        spark: The session, with the data source registered.
        url: A database with only dualwrite's tables.
        servers: The brokers.
        name: The prefix and the topic.
        place: A folder for files.
        failpoints: The file from which Spark's workers read failpoints.
    """

    spark: SparkSession
    url: str
    servers: str
    name: str
    place: Path
    failpoints: Path
    more: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store = SqlStateStore.from_url(self.url)
        self.execute(ORDERS)
        self.failpoints.unlink(missing_ok=True)
        self.input = self.place / "input"
        self.input.mkdir()

    def close(self) -> None:
        self.failpoints.unlink(missing_ok=True)
        for query in self.spark.streams.active:
            query.stop()
        until(lambda: not self._a_task_runs, "the end of the tasks that Spark has stopped", seconds=LIMIT)
        self.store.close()

    @property
    def _a_task_runs(self) -> bool:
        """Spark stops tasks without waiting for them; in the emptied database of the next test they would not be refused."""
        return bool(self.spark.sparkContext._jsc.sc().taskScheduler().isExecutorBusy("driver"))

    @property
    def options(self) -> dict[str, str]:
        return {
            "url": self.url,
            "dbtable": "orders",
            "kafka.bootstrap.servers": self.servers,
            "topic": self.name,
            "value.format": "json",
            "transactionalIdPrefix": self.name,
            "leaseTimeout": "2",
            **self.more,
        }

    # --- writing ----------------------------------------------------------------------------------------------------------

    def orders(self, ids: Iterable[int], partitions: int = 3) -> DataFrame:
        rows = [(number, f"item {number}", number * 1.5) for number in ids]
        return self.spark.createDataFrame(rows, SCHEMA).selectExpr("*", "cast(id as string) as key").repartition(partitions)

    def write(self, frame: DataFrame, **options: str) -> None:
        frame.write.format("dualwrite").mode("append").options(**{**self.options, **options}).save()

    def add_input(self, ids: Sequence[int]) -> None:
        """Add one file, which is one micro-batch."""
        number = len(list(self.input.iterdir()))
        hidden = self.place / f"{number}.json"
        hidden.write_text("".join(json.dumps({"id": i, "item": f"item {i}", "price": i * 1.5}) + "\n" for i in ids))
        shutil.move(hidden, self.input / f"{number:05}.json")

    def stream(self, partitions: int = 3) -> DataFrame:
        files = self.spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(self.input))
        return files.selectExpr("*", "cast(id as string) as key").repartition(partitions)

    def start(
        self, partitions: int = 3, each: Callable[[DataFrame, int], None] | None = None, **options: str
    ) -> StreamingQuery:
        """Start the query on the available input."""
        writer = self.stream(partitions).writeStream.option("checkpointLocation", str(self.place / "checkpoint"))
        writer = writer.trigger(availableNow=True)
        if each is not None:
            return writer.foreachBatch(each).start()
        return writer.format("dualwrite").options(**{**self.options, **options}).start()

    def run(self, partitions: int = 3, **options: Any) -> StreamingQuery:
        """Run the query over the available input."""
        query = self.start(partitions, **options)
        await_end(query)
        return query

    def fail_at(self, point: str, action: str) -> None:
        """Arm a failpoint for the first of Spark's workers that reaches it."""
        hidden = self.failpoints.with_suffix(".new")
        hidden.write_text(f"{point}={action}")
        hidden.rename(self.failpoints)

    @property
    def has_failed(self) -> bool:
        """Whether the armed failpoint was reached."""
        return not self.failpoints.exists()

    # --- looking ----------------------------------------------------------------------------------------------------------

    def execute(self, statement: str) -> None:
        with self.store.engine.begin() as connection:
            connection.exec_driver_sql(statement)

    def rows(self, query: str = "SELECT id, item, price FROM orders ORDER BY id") -> list[tuple[Any, ...]]:
        with self.store.engine.connect() as connection:
            return [tuple(row) for row in connection.execute(sa.text(query))]

    def messages(self, topic: str | None = None) -> list[Message]:
        return read_topic(self.servers, topic or self.name)

    def assert_holds(self, ids: Iterable[int]) -> None:
        """Assert that table and topic have exactly these orders, row by row, and that nothing is left open or staged."""
        expected = [(number, f"item {number}", number * 1.5) for number in sorted(ids)]
        assert open_at_kafka(self.servers, self.name) == []
        assert self.rows() == expected
        found = sorted((message.key(), json.loads(message.value() or b"null")) for message in self.messages())
        assert sorted((value["id"], value["item"], value["price"]) for _, value in found) == expected
        assert all(key == str(value["id"]).encode() for key, value in found)
        assert staged_rows(self.store.engine) == 0
        assert unresolved(self.store, self.name) == []
