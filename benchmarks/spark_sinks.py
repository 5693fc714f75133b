"""What is measured: this sink, Spark's own two sinks one after the other, and only reading, which all of them include."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from sqlalchemy import make_url

from spark_flights import TABLE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Name: TypeAlias = Literal["read", "dualwrite", "spark"]
NAMES: Final[tuple[Name, ...]] = ("read", "dualwrite", "spark")
TITLES: Final[Mapping[str, str]] = {
    "read": "reading alone",
    "dualwrite": "this sink",
    "spark": "Spark's two sinks",
    "jdbc": "… of which JDBC",
    "kafka": "… of which Kafka",
}
PREFIX: Final = "dualwrite-benchmark"
JDBC_SETTINGS: Final = {"batchsize": "10000", "driver": "org.postgresql.Driver"}
"""The default of `batchsize` is 1000; the driver's `reWriteBatchedInserts=true` is set in the URL."""
KAFKA_SETTINGS: Final = {"kafka.batch.size": "1000000", "kafka.linger.ms": "50"}
"""Batches as large as this sink's; the defaults of Kafka's Java producer are 16 KB, and 0 or 5 ms."""


class Sinks:
    """Writes a frame with each of the sinks, and measures how long it takes.

    Args:
        url: The database, as a URL for SQLAlchemy.
        kafka: Kafka's settings.
        producer: This sink's option `producer`.
    """

    def __init__(self, url: str, kafka: Mapping[str, Any], *, producer: str) -> None:
        self._url = make_url(url)
        self._kafka = {f"kafka.{name}": str(value) for name, value in kafka.items()}
        self._producer = producer

    def write(self, name: Name, frame: DataFrame, topic: str) -> dict[str, float]:
        """Write the frame; return the seconds of the whole write, under the sink's name, and of its parts."""
        if name == "read":
            return {"read": _timed(lambda: frame.write.format("noop").mode("append").save())}
        if name == "dualwrite":
            return {"dualwrite": _timed(lambda: self.dualwrite(frame, topic))}
        jdbc = _timed(lambda: self._jdbc(frame))
        kafka = _timed(lambda: self._topic(frame, topic))
        return {"spark": jdbc + kafka, "jdbc": jdbc, "kafka": kafka}

    def dualwrite(self, frame: DataFrame, topic: str, *, source: str = "dualwrite") -> None:
        """Write with this sink.

        Args:
            frame: The rows.
            topic: The topic.
            source: The name of the data source: this sink, or its variant with timers.
        """
        options = {
            "url": self._url.render_as_string(hide_password=False),
            "dbtable": TABLE,
            "topic": topic,
            "transactionalIdPrefix": PREFIX,
            "producer": self._producer,
            **self._kafka,
        }
        _messages(frame).write.format(source).mode("append").options(**options).save()

    def _jdbc(self, frame: DataFrame) -> None:
        url = self._url
        options = {
            "url": f"jdbc:postgresql://{url.host}:{url.port or 5432}/{url.database}?reWriteBatchedInserts=true",
            "dbtable": TABLE,
            "user": url.username or "",
            "password": url.password or "",
            **JDBC_SETTINGS,
        }
        frame.write.format("jdbc").mode("append").options(**options).save()

    def _topic(self, frame: DataFrame, topic: str) -> None:
        messages = _messages(frame).select("key", "value")
        messages.write.format("kafka").mode("append").options(**KAFKA_SETTINGS, **self._kafka, topic=topic).save()


def _messages(frame: DataFrame) -> DataFrame:
    return frame.selectExpr("*", "cast(id AS string) AS key", "to_json(struct(*)) AS value")


def _timed(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
