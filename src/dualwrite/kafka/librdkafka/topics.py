"""Wait until a topic exists, before the first message to it: librdkafka itself would report a missing one after 30 s."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException

from dualwrite.deadline import Deadline
from dualwrite.errors import BrokerUnavailableError
from dualwrite.kafka.librdkafka.errors import broker_error, is_retriable
from dualwrite.kafka.librdkafka.interrupts import undisturbed

_CREATION_WAIT: Final = 5.0  # a broker that creates topics automatically returns "unknown" meanwhile
_PAUSE: Final = 0.1
_LEAST_TIME: Final = 0.001


def wait_for_topic(
    list_topics: Callable[[str, float], Any], topic: str, kafka_transactional_id: str, deadline: Deadline
) -> None:
    """Look the topic up until it exists; a broker may create it because of the lookup.

    Args:
        list_topics: Gives librdkafka's metadata of a topic; must not refer to its producer, which a traceback would keep alive.
        topic: The topic.
        kafka_transactional_id: For error messages.
        deadline: For the whole call.

    Raises:
        UnknownTopicError: It does not exist, and the broker did not create it within 5 s.
        BrokerAuthorizationError: The principal may not describe it.
        BrokerUnavailableError: No broker responded within the time limit.
    """
    creation_deadline = deadline.within(_CREATION_WAIT)
    problem: KafkaError | None = None
    while True:
        try:
            wait = max(min(deadline.left, _CREATION_WAIT), _LEAST_TIME)
            known = undisturbed(partial(list_topics, topic, wait))
            found = known.topics.get(topic)
        except KafkaException as error:
            failed = broker_error(problem or error, kafka_transactional_id, f"lookup of topic {topic!r}")
            if deadline.expired or not isinstance(failed, BrokerUnavailableError):
                raise failed from error
            deadline.sleep(_PAUSE)
            creation_deadline = deadline.within(_CREATION_WAIT)
            continue
        problem = None if found is None else found.error
        if found is not None and problem is None and found.partitions:
            return
        if (problem is not None and not is_retriable(problem)) or creation_deadline.expired:
            raise broker_error(problem, kafka_transactional_id, f"lookup of topic {topic!r}")
        deadline.sleep(_PAUSE)
