"""Consume, transform, dual write: each message takes effect once, in the database and in the topics that are written."""

from dualwrite.processor.async_processor import AsyncDualProcessor
from dualwrite.processor.dead_letter_topic import DeadLetterTopic
from dualwrite.processor.dead_letters import DeadLetter
from dualwrite.processor.decoded import Received, to_arrow, to_pandas
from dualwrite.processor.options import ProcessorOptions
from dualwrite.processor.processor import DualProcessor

__all__ = [
    "AsyncDualProcessor",
    "DeadLetter",
    "DeadLetterTopic",
    "DualProcessor",
    "ProcessorOptions",
    "Received",
    "to_arrow",
    "to_pandas",
]
