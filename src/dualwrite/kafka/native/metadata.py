"""The partitions of topics, and their leaders."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from dualwrite.deadline import Deadline
from dualwrite.errors import BrokerUnavailableError, DeliveryError
from dualwrite.kafka.client.broker_connection import ConnectionLostError
from dualwrite.kafka.client.brokers import Network
from dualwrite.kafka.client.config import Address
from dualwrite.kafka.native.retry_policy import NO_RESPONSE, Reaction, failure, reaction_to
from dualwrite.observability.logs import SubjectLogger
from dualwrite.observability.outages import DELIVERY, kafka_at

log = SubjectLogger(__name__)

_TOPIC_WAIT: Final = 5.0  # a broker that creates topics automatically returns "unknown" meanwhile
_PAUSE: Final = 0.05


@dataclass(frozen=True, slots=True)
class Layout:
    """A topic as the cluster described it at a time of `time.monotonic`: the leader of each partition, or None."""

    leaders: tuple[Address | None, ...]
    looked_up_at: float


class Topics:
    """The layouts of the topics that one producer writes to, looked up again after `max_age` seconds; negative means never."""

    def __init__(self, network: Network, max_age: float, kafka_transactional_id: str) -> None:
        self._network = network
        self._max_age = max_age
        self._id = kafka_transactional_id
        self._kafka = kafka_at(network.config.servers)
        self._layouts: dict[str, Layout] = {}
        self._stale: set[str] = set()

    def layout(self, topic: str, deadline: Deadline) -> Layout:
        """The topic's layout, looked up if it is unknown or too old.

        Raises:
            UnknownTopicError: The topic does not exist, and the broker did not create it within 5 s.
            BrokerAuthorizationError: The principal may not describe the topic.
            BrokerUnavailableError: No broker responded within the time limit.
        """
        known = self._layouts.get(topic)
        if known is not None and not 0 <= self._max_age < time.monotonic() - known.looked_up_at:
            return known
        with self._kafka.call(DELIVERY) as call:
            creation_deadline = deadline.within(_TOPIC_WAIT)
            code = 0
            while True:
                try:
                    code = self._look_up({topic}, deadline).get(topic, NO_RESPONSE)
                except (ConnectionLostError, BrokerUnavailableError) as error:
                    call.error = error
                    if deadline.expired and code:  # the response before the limit cut off the last request
                        raise failure(code, f"lookup of topic {topic!r}", self._id) from error
                    if deadline.expired:
                        raise failure(NO_RESPONSE, f"lookup of topic {topic!r}", self._id, message=f"{error}") from error
                else:
                    if not code:
                        return self._layouts[topic]
                    if reaction_to(code) is Reaction.FAILED or creation_deadline.expired:
                        raise failure(code, f"lookup of topic {topic!r}", self._id)
                deadline.sleep(_PAUSE)

    def leader(self, topic: str, partition: int) -> Address | None:
        """The known leader of a partition; None means that it must be looked up."""
        known = self._layouts.get(topic)
        if known is None or topic in self._stale or partition >= len(known.leaders):
            return None
        return known.leaders[partition]

    def check_exists(self, topic: str, partition: int) -> None:
        """Check that the newest layout of a topic still has a partition that an older one had.

        Raises:
            DeliveryError: It has not. The next transaction uses the new layout, in which keys belong to other partitions.
        """
        known = self._layouts.get(topic)
        if known is not None and topic not in self._stale and partition >= len(known.leaders):
            raise DeliveryError(
                f"Topic {topic!r} has no partition {partition} any more; it has {len(known.leaders)} partitions.",
                transactional_id=self._id,
                cause="the topic was deleted, and made anew with fewer partitions",
                next_step="run the whole transaction again: keys are spread over the partitions that it has now",
            )

    def invalidate(self, topic: str) -> None:
        """A leader has moved or does not respond: look up the topic before anything more is sent to it."""
        self._stale.add(topic)

    def forget(self, topic: str) -> None:
        """The topic may have more partitions now: `layout` looks it up again."""
        self._layouts.pop(topic, None)

    def refresh(self, topics: set[str], deadline: Deadline) -> None:
        """Look up the topics once. Those that can't be looked up now stay marked as stale.

        Raises:
            BrokerAuthorizationError: The principal may no longer describe one of them.
        """
        try:
            codes = self._look_up(topics, deadline)
        except (ConnectionLostError, BrokerUnavailableError) as error:
            log.debug("lookup of %s: %s", topics, error, kafka_transactional_id=self._id)
            self._stale |= topics
            return
        for topic, code in codes.items():
            if code and reaction_to(code) is Reaction.FAILED:
                raise failure(code, f"lookup of topic {topic!r}", self._id)

    def _look_up(self, topics: set[str], deadline: Deadline) -> dict[str, int]:
        """Request the layouts; returns the error code of each topic."""
        response = self._network.metadata(sorted(topics), deadline)
        addresses = {b.node_id: Address(b.host, b.port) for b in response.brokers}
        now = time.monotonic()
        codes = {}
        for topic in response.topics:
            codes[topic.name] = topic.error_code
            if topic.error_code:
                continue
            leaders = [addresses.get(p.leader_id) for p in sorted(topic.partitions, key=lambda p: p.partition_index)]
            self._layouts[topic.name] = Layout(tuple(leaders), now)
            self._stale.discard(topic.name)
        return codes
