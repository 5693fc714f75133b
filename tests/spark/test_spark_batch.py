"""Batch writes by Spark: what is written, what is refused, and what a second run does."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from spark_scene import SparkScene

from dualwrite import migration
from dualwrite.devcluster import DevCluster
from dualwrite.errors import StateTableMissingError
from dualwrite.stores.sql import SqlStateStore
from fixtures.tables import table


def refused(scene: SparkScene, frame: DataFrame, **options: str) -> str:
    """The text of Spark's error for a write that is refused."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  (Spark's own, of several kinds)
        scene.write(frame, **options)
    return str(caught.value)


def test_a_frame_is_written(scene: SparkScene) -> None:
    scene.write(scene.orders(range(1000), 4))
    scene.assert_holds(range(1000))
    scene.write(scene.orders(range(1000, 1500), 2))
    scene.assert_holds(range(1500))


@pytest.mark.slow
def test_state_tables_in_another_schema(scene: SparkScene) -> None:
    scene.execute("DROP SCHEMA IF EXISTS own CASCADE; CREATE SCHEMA own")
    migration.upgrade(scene.url, schema="own")
    scene.execute("DROP TABLE kafka_transaction_state")  # the one of the default schema: its use would fail
    scene.write(scene.orders(range(300)), stateSchema="own")
    with pytest.raises(StateTableMissingError):
        scene.store.list()
    scene.store.close()
    scene.store = SqlStateStore.from_url(scene.url, schema="own")
    assert [name for name in scene.store.list() if not name.startswith(scene.name)] == []
    assert len(scene.store.list()) == 3
    scene.assert_holds(range(300))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "mariadb"])
def test_other_databases(
    kind: str,
    request: pytest.FixtureRequest,
    make_scene: Callable[[str, DevCluster, str], SparkScene],
    broker: DevCluster,
    new_name: Callable[[str], str],
) -> None:
    scene = make_scene(request.getfixturevalue(f"{kind}_url"), broker, new_name("spark"))
    scene.write(scene.orders(range(300), 3))
    scene.assert_holds(range(300))


@pytest.mark.soak
def test_every_producer_one_after_the_other(scene: SparkScene) -> None:
    options = [{"producer": "librdkafka"}, {"twoPhase": "false"}, {"producer": "native", "twoPhase": "true"}]
    for number, chosen in enumerate([*options, options[0]]):
        scene.write(scene.orders(range(50 * number, 50 * (number + 1))), **chosen)
    scene.assert_holds(range(200))


@pytest.mark.soak
def test_an_old_broker(
    make_scene: Callable[[str, DevCluster, str], SparkScene],
    postgres_url: str,
    broker_v4: DevCluster,
    new_name: Callable[[str], str],
) -> None:
    scene = make_scene(postgres_url, broker_v4, new_name("spark"))
    for first in (0, 100):
        scene.write(scene.orders(range(first, first + 100)))
    scene.assert_holds(range(200))


@pytest.mark.slow
def test_the_columns_of_a_message(scene: SparkScene) -> None:
    began = int(time.time() * 1000)  # retention is by timestamp: a broker deletes records of another year
    frame = scene.spark.sql(f"""
        SELECT id, 'thing' AS item, CAST(0 AS double) AS price,
               CAST(CONCAT('key ', id) AS binary) AS key, CONCAT('value ', id) AS value,
               CONCAT('{scene.name}-', id % 2) AS topic, 0 AS partition,
               array(named_struct('key', 'kind', 'value', CAST('order' AS binary))) AS headers,
               timestamp_millis({began} + id) AS timestamp
        FROM range(0, 10, 1, 2)""")
    options = {name: text for name, text in scene.options.items() if name != "topic"}
    frame.write.format("dualwrite").mode("append").options(**options).save()
    for odd in (0, 1):
        messages = sorted(scene.messages(f"{scene.name}-{odd}"), key=lambda message: message.timestamp()[1])
        assert [message.value() for message in messages] == [f"value {i}".encode() for i in range(odd, 10, 2)]
        assert [message.key() for message in messages] == [f"key {i}".encode() for i in range(odd, 10, 2)]
        assert {tuple(message.headers() or ()) for message in messages} == {(("kind", b"order"),)}
        assert [message.timestamp()[1] for message in messages] == [began + i for i in range(odd, 10, 2)]
    assert [row[0] for row in scene.rows()] == list(range(10))


@pytest.mark.soak
def test_upsert(scene: SparkScene) -> None:
    told = refused(scene, scene.orders([1, 2, 2, 3]), upsertKeys="id")
    assert "The batch is ambiguous" in told
    assert "id=2 (2 rows)" in told
    scene.assert_holds([])
    scene.write(scene.orders(range(10)))
    newer = scene.orders(range(5, 15)).selectExpr("id", "upper(item) AS item", "price", "key", "value")
    scene.write(newer, upsertKeys="id")
    assert scene.rows("SELECT id, item FROM orders ORDER BY id") == [
        (i, f"item {i}" if i < 5 else f"ITEM {i}") for i in range(15)
    ]
    assert len(scene.messages()) == 20


REFUSED_OPTIONS = [
    ({"dbTabel": "orders"}, "unknown option dbtabel (did you mean dbtable?)"),
    ({"url": ""}, "url is missing"),
    ({"transactionalIdPrefix": "a#b"}, "contains '#'"),
    ({"producer": "quick"}, "producer must be one of auto, native, librdkafka, not 'quick'"),
    ({"url": "zookeeper://nowhere:2181"}, "needs a SQL database"),
    ({"dbtable": "nowhere"}, "There is no table 'nowhere'"),
    ({"numPartitions": "2"}, "The frame has more partitions than numPartitions allows (2)"),
]


@pytest.mark.soak
@table("options, expected", REFUSED_OPTIONS)
def test_options_that_are_wrong(scene: SparkScene, options: dict[str, str], expected: str) -> None:
    assert expected in refused(scene, scene.orders(range(30), 3), **options)
    assert scene.rows() == []


@pytest.mark.soak
def test_frames_that_are_refused(scene: SparkScene) -> None:
    """By mode, by types (all mismatches in one error), and by the table itself."""
    with pytest.raises(PySparkException, match="messages can't be taken back"):
        scene.orders([1]).write.format("dualwrite").mode("overwrite").options(**scene.options).save()
    told = refused(scene, scene.orders([1]).selectExpr("CAST(id AS string) AS id", "price", "'x' AS colour", "key", "value"))
    assert "column id: string does not fit bigint" in told
    assert "column colour: the table has no column with this name" in told
    assert "column item of the table is NOT NULL" in told
    scene.write(scene.orders([]))
    assert scene.store.list(scene.name) == []
    scene.write(scene.orders([1, 2]))
    assert "duplicate key value violates unique constraint" in refused(scene, scene.orders([2, 3]))
    scene.assert_holds([1, 2])
    scene.write(scene.orders([3]))
    scene.assert_holds([1, 2, 3])


@pytest.mark.soak
def test_a_named_job_is_done_once(scene: SparkScene) -> None:
    for partitions in (3, 1):
        scene.write(scene.orders(range(50), partitions), jobId="nightly 2026-11-21")
    scene.assert_holds(range(50))
    address = scene.store.engine.url
    jdbc = {"url": scene.url}
    if address.host:
        jdbc = {
            "url": f"jdbc:postgresql://{address.host}:{address.port}/{address.database}",
            "user": address.username or "",
        }
    scene.write(scene.orders(range(50, 60)), jobId="nightly 2026-11-22", **jdbc)
    scene.assert_holds(range(60))
    told = refused(scene, scene.orders(range(60, 70)), jobId="nightly 2026-11-22", topic=f"{scene.name}-other")
    assert f"committed for table orders, topic {scene.name}; this run is of table orders, topic {scene.name}-other" in told
    scene.assert_holds(range(60))
