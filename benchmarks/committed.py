"""Reads the committed messages of a topic one by one: there may be more than fit in memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any, Final

from confluent_kafka import OFFSET_BEGINNING, Consumer, Message, TopicPartition

from records import VerificationError

_FETCH: Final = 10_000
_POLL: Final = 0.1
_PATIENCE: Final = 60.0
_SETTINGS: Final = {"group.id": "dualwrite-benchmark", "enable.auto.commit": False, "log_level": 2}


def committed(kafka: Mapping[str, Any], topic: str) -> Iterator[Message]:
    """Every message that a `read_committed` consumer gets, up to the end of each partition.

    Raises:
        VerificationError: The topic can't be read to its end within a minute, for example because a transaction stays open.
    """
    ends = _ends(kafka, topic)
    with closing(Consumer({**kafka, **_SETTINGS, "isolation.level": "read_committed"})) as consumer:
        places = [TopicPartition(topic, number, OFFSET_BEGINNING) for number, end in ends.items() if end > 0]
        consumer.assign(places)
        deadline = time.monotonic() + _PATIENCE
        while any(place.offset < ends[place.partition] for place in consumer.position(places)):
            first = consumer.poll(_POLL)  # `consume` alone waits for a whole batch, or for its timeout
            messages = [] if first is None else [first, *consumer.consume(_FETCH, 0)]
            for message in messages:
                if (error := message.error()) is not None:
                    raise VerificationError(f"the topic can't be read: {error.str()}")
                yield message
            if messages:
                deadline = time.monotonic() + _PATIENCE
            elif time.monotonic() > deadline:
                raise VerificationError(f"{topic} was not read to its end, {ends}: is a transaction open there?")


def _ends(kafka: Mapping[str, Any], topic: str) -> dict[int, int]:
    """The end of each partition, behind open transactions too."""
    with closing(Consumer({**kafka, **_SETTINGS, "isolation.level": "read_uncommitted"})) as consumer:
        numbers = consumer.list_topics(topic, timeout=_PATIENCE).topics[topic].partitions
        return {
            number: consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=_PATIENCE)[1] for number in numbers
        }
