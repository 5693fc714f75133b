"""A batch as a table: what stands in it is what the messages say."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
import sqlalchemy as sa
from processor_scene import ProcessorScene

import dualwrite
from dualwrite import Topic
from dualwrite.errors import MissingDependencyError
from dualwrite.processor import to_arrow, to_pandas
from fixtures.producing import producing

pa = pytest.importorskip("pyarrow")

WHEN = datetime(2026, 11, 23, 12, 30, 0, 250_000, tzinfo=UTC)


def processed(scene: ProcessorScene, topic: str | Topic[Any, Any], look: Callable[[Any], Any]) -> list[Any]:
    """What `look` makes of each batch."""
    seen: list[Any] = []

    def handle(messages: Any, tx: dualwrite.Transaction[Any]) -> None:
        seen.append(look(messages))
        for message in messages:
            scene.events.write(tx.db, scene.group, message.offset())
            tx.send(scene.target, str(message.offset()))

    with scene.running(handle_batch=handle, topics=[topic]):
        scene.wait_for(range(3))
    return seen


def produce(scene: ProcessorScene, values: list[bytes | None]) -> None:
    headers: list[tuple[str, bytes | None]] = [("a", b"1"), ("a", None)]
    with producing(scene.broker.bootstrap_servers) as produce:
        for number, value in enumerate(values):
            produce(
                scene.source,
                value,
                key=None if number == 0 else b"key",
                partition=2,
                timestamp=int(WHEN.timestamp() * 1000) + number,
                headers=headers if number == 2 else [],
            )


@pytest.mark.slow
def test_a_table_has_the_fields_of_the_messages(scene: ProcessorScene) -> None:
    produce(scene, [b"\0lamp", None, b"chair"])
    table = pa.concat_tables(processed(scene, scene.source, to_arrow))
    assert table.schema.names == ["topic", "partition", "offset", "timestamp", "key", "value", "headers"]
    assert [str(table.schema.field(name).type) for name in ("partition", "offset", "timestamp", "key", "value")] == [
        "int32",
        "int64",
        "timestamp[ms, tz=UTC]",
        "binary",
        "binary",
    ]
    assert table["topic"].to_pylist() == [scene.source] * 3
    assert table["partition"].to_pylist() == [2, 2, 2]
    assert table["offset"].to_pylist() == [0, 1, 2]
    assert table["timestamp"].to_pylist()[0] == WHEN
    assert table["key"].to_pylist() == [None, b"key", b"key"]
    assert table["value"].to_pylist() == [b"\0lamp", None, b"chair"]
    assert table["headers"].to_pylist() == [[], [], [{"name": "a", "value": b"1"}, {"name": "a", "value": None}]]


@pytest.mark.slow
def test_deserialized_values_are_structs(scene: ProcessorScene) -> None:
    produce(scene, [json.dumps({"item": "lamp", "amount": amount}).encode() for amount in range(3)])
    topic: Topic[dict[str, Any], bytes] = Topic(scene.source, value_deserializer=lambda content, _: json.loads(content))
    table = pa.concat_tables(processed(scene, topic, to_arrow))
    assert table["value"].combine_chunks().field("amount").to_pylist() == [0, 1, 2]


def test_no_messages() -> None:
    assert to_arrow([]).num_rows == 0


@pytest.mark.parametrize("function", [to_arrow, to_pandas])
def test_without_pyarrow(monkeypatch: pytest.MonkeyPatch, function: Callable[[Any], Any]) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependencyError, match="pip install pyarrow"):
        function([])


@pytest.mark.slow
def test_a_frame_is_written_as_one_statement(scene: ProcessorScene) -> None:
    """What frames are for."""
    produce(scene, [b"1", b"2", b"3"])
    times: list[Any] = []

    def handle(messages: Any, tx: dualwrite.Transaction[Any]) -> None:
        frame = to_pandas(messages)
        times.extend(frame["timestamp"])
        rows = [{"g": scene.group, "n": int(number)} for number in frame["value"]]
        tx.db.execute(sa.text("INSERT INTO events (writer, number) VALUES (:g, :n)"), rows)
        tx.send_many(scene.target, frame["value"])

    with scene.running(handle_batch=handle):
        scene.wait_for([1, 2, 3])
    assert scene.agree() == [1, 2, 3]
    assert times[0] == WHEN
