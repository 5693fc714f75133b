"""Messages of Kafka that kafka-python does not have, as Kafka's own schemas (KIP-848), and their classes."""

from typing import Any

from kafka.protocol.api_message import ApiMessage

message: Any = ApiMessage  # untyped, like its metaclass, which reads the schema of the class's name in this package


class ConsumerGroupDescribeRequest(message, load_json=__name__):  # type: ignore[call-arg, misc]  # of the metaclass
    """What groups of the consumer protocol have been assigned (KIP-848)."""


class ConsumerGroupDescribeResponse(message, load_json=__name__):  # type: ignore[call-arg, misc]  # of the metaclass
    """Its response."""
