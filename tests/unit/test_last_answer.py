"""A time limit that cuts off a request: the error says what the brokers answered last.

The network is a stand-in: a real one can't be made to answer once and then be silent at a given moment.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dualwrite.deadline import Deadline
from dualwrite.errors import BrokerUnavailableError, UnknownTopicError
from dualwrite.kafka.client.broker_connection import ConnectionLostError
from dualwrite.kafka.client.config import Address, KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.client.kafka_errors import ErrorCode
from dualwrite.kafka.client.retries import NoLeaderError
from dualwrite.kafka.native.metadata import Topics

SHORT = 0.2
BROKER = Address("127.0.0.1", 9092)


class AnswersOnce:
    """Answers the first request that the topic is unknown, and the next one not within its limit."""

    config = KafkaConfig.of("127.0.0.1:9092")

    def __init__(self, *codes: int) -> None:
        self._codes = list(codes)

    def metadata(self, topics: list[str], deadline: Deadline) -> Any:
        if self._codes:
            code = self._codes.pop(0)
            return SimpleNamespace(brokers=[], topics=[SimpleNamespace(name=name, error_code=code) for name in topics])
        deadline.sleep(2 * SHORT)
        raise ConnectionLostError(BROKER, "the time limit has passed")


def test_a_topic_that_is_unknown_at_the_limit() -> None:
    topics = Topics(AnswersOnce(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), -1, "orders-1")  # type: ignore[arg-type]
    with pytest.raises(UnknownTopicError):
        topics.layout("orders", Deadline.after(SHORT))


def test_no_answer_at_the_limit() -> None:
    topics = Topics(AnswersOnce(), -1, "orders-1")  # type: ignore[arg-type]
    with pytest.raises(BrokerUnavailableError):
        topics.layout("orders", Deadline.after(SHORT))


def test_a_partition_without_leader_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = WireTransactionCoordinator(KafkaConfig.of("127.0.0.1:9092"))
    monkeypatch.setattr(coordinator.network, "find_coordinators", lambda names, *_, **__: dict.fromkeys(names, BROKER))
    answers: list[dict[str, Exception]] = [{"orders-1": NoLeaderError("orders-0 has no leader")}]

    def without_leaders(_addresses: Any, _fresh: Any, deadline: Deadline) -> dict[str, Exception]:
        if not answers:
            deadline.sleep(2 * SHORT)
            return {"orders-1": ConnectionLostError(BROKER, "the time limit has passed")}
        return answers.pop()

    monkeypatch.setattr(coordinator, "_without_leaders", without_leaders)
    with pytest.raises(BrokerUnavailableError, match="orders-0 has no leader"):
        coordinator.wait_for_leaders("orders-1", timeout=SHORT)
    coordinator.close()
