"""What retention does: it deletes the records of a topic."""

from __future__ import annotations

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from crash.scene import Scene
from fixtures.pace import LIMIT


def delete_records(scene: Scene, topic: str) -> None:
    """Delete all records of the topic's partition 0."""
    delete_records_at(scene.bootstrap, topic)


def delete_records_at(bootstrap: str, topic: str) -> None:
    """The same without a scene."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.delete_records([TopicPartition(topic, 0, -1)])[TopicPartition(topic, 0)].result(LIMIT)
