"""What is measured: this sink, Spark's own two sinks one after the other, and reading alone, which all of them begin with."""

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
"""`batchsize` is 1000 if not set; the driver's `reWriteBatchedInserts=true` stands in the address."""


class Sinks:
    """Writes a frame by each of the sinks, and says how long it took.

    Args:
        url: The database, as SQLAlchemy takes it.
        kafka: Kafka's settings.
        producer: The option of this sink.
    """

    def __init__(self, url: str, kafka: Mapping[str, Any], *, producer: str) -> None:
        self._url = make_url(url)
        self._kafka = {f"kafka.{name}": str(value) for name, value in kafka.items()}
        self._producer = producer

    def write(self, name: Name, frame: DataFrame, topic: str) -> dict[str, float]:
        """Write the frame; seconds of the whole under the sink's name, and of its parts."""
        if name == "read":
            return {"read": _timed(lambda: frame.write.format("noop").mode("append").save())}
        if name == "dualwrite":
            return {"dualwrite": _timed(lambda: self.dualwrite(frame, topic))}
        jdbc = _timed(lambda: self._jdbc(frame))
        kafka = _timed(lambda: self._topic(frame, topic))
        return {"spark": jdbc + kafka, "jdbc": jdbc, "kafka": kafka}

    def dualwrite(self, frame: DataFrame, topic: str, *, source: str = "dualwrite") -> None:
        """Write by this sink.

        Args:
            frame: The rows.
            topic: The topic.
            source: The data source: this sink, or what stands in for it.
        """
        options = {
            "url": self._url.render_as_string(hide_password=False),
            "dbtable": TABLE,
            "topic": topic,
            "value.format": "json",
            "transactionalIdPrefix": PREFIX,
            "producer": self._producer,
            **self._kafka,
        }
        _keyed(frame).write.format(source).mode("append").options(**options).save()

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
        from pyspark.sql import functions  # noqa: PLC0415  (the script answers --help where no Spark is)

        value = functions.to_json(functions.struct(*frame.columns)).alias("value")
        messages = _keyed(frame).select("key", value)
        messages.write.format("kafka").mode("append").options(**self._kafka, topic=topic).save()


def _keyed(frame: DataFrame) -> DataFrame:
    return frame.withColumn("key", frame["id"].cast("string"))


def _timed(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
