"""Sending: all arguments after topic and value are keyword-only, because their order differs between Kafka clients."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from dualwrite import Transaction
from dualwrite.aio import AsyncTransaction
from dualwrite.kafka import LibrdkafkaProducer, NativeProducer
from fixtures.tables import table

SENDING: list[Callable[..., Any]] = [
    Transaction.send,
    Transaction.send_many,
    AsyncTransaction.send,
    AsyncTransaction.send_many,
    LibrdkafkaProducer.send,
    LibrdkafkaProducer.send_many,
    NativeProducer.send,
    NativeProducer.send_many,
    NativeProducer.send_columns,
]


@table("method", SENDING, ids=lambda method: method.__qualname__)
def test_parameters_after_topic_and_value_are_keyword_only(method: Callable[..., Any]) -> None:
    _self, _topic, _value, *others = inspect.signature(method).parameters.values()
    assert others
    assert {parameter.kind for parameter in others} == {inspect.Parameter.KEYWORD_ONLY}
