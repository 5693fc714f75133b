"""Which partitions a topic has, and where their leaders are."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Final

from dualwrite.deadline import Deadline
from dualwrite.errors import BrokerUnavailableError
from dualwrite.kafka.client.cluster import Network
from dualwrite.kafka.client.config import Address
from dualwrite.kafka.client.sockets import ConnectionLostError
from dualwrite.kafka.native.retry_policy import NO_ANSWER, Verdict, failure, verdict_on

log = logging.getLogger(__name__)

_TOPIC_WAIT: Final = 5.0  # a broker that makes topics at first use says "unknown" while it does
_PAUSE: Final = 0.05


@dataclass(frozen=True, slots=True)
class Layout:
    """A topic as the cluster described it.

    Args:
        leaders: The leader of each partition, or None where there is none at the moment.
        looked_up_at: When, by `time.monotonic`.
    """

    leaders: tuple[Address | None, ...]
    looked_up_at: float


class Topics:
    """The layouts of the topics that one producer writes to.

    Args:
        network: Where to ask.
        max_age: Seconds after which a layout is looked up again; negative for never.
        kafka_transactional_id: For error messages.
    """

    def __init__(self, network: Network, max_age: float, kafka_transactional_id: str) -> None:
        self._network = network
        self._max_age = max_age
        self._id = kafka_transactional_id
        self._layouts: dict[str, Layout] = {}
        self._stale: set[str] = set()

    def layout(self, topic: str, deadline: Deadline) -> Layout:
        """The topic's layout, looked up where it is not known or too old.

        Raises:
            UnknownTopicError: There is no such topic, and the broker makes none (5 s are waited for that).
            BrokerAuthorizationError: The principal may not see it.
            BrokerUnavailableError: No broker answered in time.
        """
        known = self._layouts.get(topic)
        if known is not None and not 0 <= self._max_age < time.monotonic() - known.looked_up_at:
            return known
        return self._looked_up(topic, deadline)

    def leader(self, topic: str, partition: int) -> Address | None:
        """Where to send a partition's batches, as far as it is known; None means that it must be looked up."""
        known = self._layouts.get(topic)
        if known is None or topic in self._stale or partition >= len(known.leaders):
            return None
        return known.leaders[partition]

    def distrust(self, topic: str) -> None:
        """A leader has moved, or does not answer: look the topic up before anything is sent to it."""
        self._stale.add(topic)

    def refresh(self, topics: set[str], deadline: Deadline) -> None:
        """Look the topics up once. What can't be had now stays distrusted.

        Raises:
            BrokerAuthorizationError: The principal may not see one of them any more.
        """
        try:
            codes = self._ask(topics, deadline)
        except (ConnectionLostError, BrokerUnavailableError) as error:
            log.debug("%s: looking up %s: %s", self._id, topics, error)
            self._stale |= topics
            return
        for topic, code in codes.items():
            if code and verdict_on(code) is Verdict.FAILED:
                raise failure(code, f"looking up topic {topic!r}", self._id)

    def _looked_up(self, topic: str, deadline: Deadline) -> Layout:
        for_making = deadline.within(_TOPIC_WAIT)
        while True:
            try:
                code = self._ask({topic}, deadline).get(topic, 0)
            except (ConnectionLostError, BrokerUnavailableError) as error:
                if deadline.expired:
                    raise failure(NO_ANSWER, f"looking up topic {topic!r}", self._id, message=str(error)) from error
            else:
                if not code:
                    return self._layouts[topic]
                if verdict_on(code) is Verdict.FAILED or for_making.expired:
                    raise failure(code, f"looking up topic {topic!r}", self._id)
            deadline.sleep(_PAUSE)

    def _ask(self, topics: set[str], deadline: Deadline) -> dict[str, int]:
        """Ask for the layouts; the error code of each topic. A topic without any leader yet counts as not available."""
        answer = self._network.metadata(sorted(topics), deadline)
        addresses = {b.node_id: Address(b.host, b.port) for b in answer.brokers}
        now = time.monotonic()
        codes = {}
        for topic in answer.topics:
            codes[topic.name] = topic.error_code
            if topic.error_code:
                continue
            leaders = [addresses.get(p.leader_id) for p in sorted(topic.partitions, key=lambda p: p.partition_index)]
            self._layouts[topic.name] = Layout(tuple(leaders), now)
            if all(leaders):
                self._stale.discard(topic.name)
        return codes
