"""librdkafka's AdminClient, and topics that it creates, also on a cluster that is not ready yet, and deletes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from dualwrite.deadline import Deadline, Limit
from dualwrite.errors import BrokerError, BrokerUnavailableError
from dualwrite.kafka.client.brokers import check_not_refused
from dualwrite.kafka.librdkafka.client_settings import client_settings
from dualwrite.kafka.librdkafka.librdkafka_errors import broker_error, is_retriable, kafka_error

_DEFAULTS: Final = {
    "topic.metadata.refresh.interval.ms": 1000,
    "log_level": 4,  # at 6 it logs that it was closed with unread events
}
_FENCED: Final = "fenced"
_PAUSE: Final = 0.1
_CREATION_WAIT: Final = 5.0  # a broker that creates topics automatically returns "unknown" meanwhile
_MIN_SECONDS: Final = 0.001


def admin_client(settings: Mapping[str, Any], timeout: Limit) -> AdminClient:
    """confluent-kafka's AdminClient, which notices a new controller, and passes on what librdkafka logs when it is polled.

    While no broker is alive, which may be for a moment after a start or on a busy machine, a cluster has no controller.
    librdkafka then waits for one, but asks for it only when it refreshes its metadata: by default every five minutes, so that
    the request times out first.

    Raises:
        BrokerAuthorizationError: The brokers refuse this client: known within the timeout, unless no broker answers.
    """
    check_not_refused(settings, timeout)
    return AdminClient(client_settings({**_DEFAULTS, **settings}))


def create_topic(
    settings: Mapping[str, Any],
    name: str,
    partitions: int = 1,
    *,
    replicas: int = -1,
    config: Mapping[str, str] | None = None,
    timeout: float = 60.0,
) -> None:
    """Create a topic, once the cluster has a controller and brokers that are alive.

    Raises:
        BrokerAuthorizationError: The brokers refuse this client, or it may not create the topic.
        BrokerUnavailableError: The cluster was not ready within the time limit, in seconds.
        BrokerError: The topic was refused, or exists already.
    """
    deadline = Deadline(timeout)
    topic = NewTopic(name, partitions, replicas, config=dict(config or {}))
    admin = admin_client(settings, deadline)  # must live until the response arrives
    may_exist = False
    while True:
        try:
            admin.create_topics([topic], request_timeout=max(deadline.left, _PAUSE))[name].result()
        except KafkaException as error:
            admin.poll(0)
            failed = _creation_error(error, name)
            if may_exist and failed.code == KafkaError.TOPIC_ALREADY_EXISTS:
                return
            if deadline.expired or not failed.retriable:
                raise failed from error
            may_exist = may_exist or failed.code != KafkaError.INVALID_REPLICATION_FACTOR
            time.sleep(_PAUSE)
        else:
            return


def delete_topic(settings: Mapping[str, Any], name: str, *, timeout: float = 60.0) -> None:
    """Delete a topic.

    Raises:
        BrokerError: It was not deleted, or that is unknown.
    """
    admin = admin_client(settings, timeout)
    try:
        admin.delete_topics([name], request_timeout=timeout)[name].result()
    except KafkaException as error:
        admin.poll(0)
        raise broker_error(error, None, f"deleting the topic {name!r}") from error


def _creation_error(error: KafkaException, name: str) -> BrokerError:
    inner = kafka_error(error)
    doing = f"creating the topic {name!r}"
    if inner is not None and inner.code() == KafkaError.INVALID_REPLICATION_FACTOR and _FENCED in inner.str():
        return BrokerUnavailableError(
            f"Kafka error during {doing}: {inner.str()}",
            cause="the brokers are just starting, or too busy to send heartbeats to the controller",
            next_step="retry",
            code=inner.code(),
            name=inner.name(),
        )
    return broker_error(error, None, doing)


def wait_for_topic(
    list_topics: Callable[[str, float], Any], topic: str, kafka_transactional_id: str, deadline: Deadline
) -> None:
    """Look the topic up until it exists; a broker may create it because of the lookup.

    `list_topics` gives librdkafka's metadata; it must not refer to its producer, which a traceback would keep alive.

    Raises:
        UnknownTopicError: It does not exist, and the broker did not create it within 5 s.
        BrokerAuthorizationError: The principal may not describe it.
        BrokerUnavailableError: No broker responded within the time limit.
    """
    creation_deadline = deadline.within(_CREATION_WAIT)
    problem: KafkaError | None = None
    while True:
        try:
            wait = max(min(deadline.left, _CREATION_WAIT), _MIN_SECONDS)
            found = list_topics(topic, wait).topics.get(topic)
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
