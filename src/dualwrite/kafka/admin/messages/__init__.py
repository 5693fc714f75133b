"""Protocol messages that kafka-python lacks: Kafka's own schemas of them (KIP-848), and their classes."""

from typing import Any

from kafka.protocol.api_message import ApiMessage

from dualwrite.kafka_python import ignore_warnings

ignore_warnings()  # again: the filters may have been replaced since, as pytest does for each test

message: Any = ApiMessage  # untyped, like its metaclass, which reads the schema of the class's name in this package


class ConsumerGroupDescribeRequest(message, load_json=__name__):  # type: ignore[call-arg, misc]  # of the metaclass
    """Requests the members of groups of the new consumer protocol, with their assignments (KIP-848)."""


class ConsumerGroupDescribeResponse(message, load_json=__name__):  # type: ignore[call-arg, misc]  # of the metaclass
    """The response to ConsumerGroupDescribeRequest."""
