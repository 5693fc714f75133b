"""The Kafka side of the recipe: producers, coordinator, configuration, and detection of what a cluster supports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dualwrite.kafka.base import GroupMetadata
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.inspect import PROBE_ID, BrokerCapabilities, TwoPhaseObstacle, probe
from dualwrite.state import ConsumedOffset

if TYPE_CHECKING:
    from dualwrite.kafka.librdkafka.librdkafka_producer import LibrdkafkaProducer
    from dualwrite.kafka.native.native_producer import NativeProducer

__all__ = [
    "PROBE_ID",
    "BrokerCapabilities",
    "ConsumedOffset",
    "GroupMetadata",
    "KafkaConfig",
    "LibrdkafkaProducer",
    "NativeProducer",
    "TwoPhaseObstacle",
    "probe",
]


def __getattr__(name: str) -> Any:
    """Load the producers on first use: each one needs its own client library."""
    if name == "NativeProducer":
        from dualwrite.kafka.native.native_producer import NativeProducer  # noqa: PLC0415  (see above)

        return NativeProducer
    if name == "LibrdkafkaProducer":
        from dualwrite.kafka.librdkafka.librdkafka_producer import LibrdkafkaProducer  # noqa: PLC0415  (see above)

        return LibrdkafkaProducer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
