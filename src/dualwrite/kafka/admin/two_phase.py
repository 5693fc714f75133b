"""On which brokers two-phase commit is switched on: the probe tries it on one, the coordinator of its id."""

from __future__ import annotations

from contextlib import closing
from typing import Final

from dualwrite.deadline import Deadline
from dualwrite.kafka.admin.brokers import Brokers
from dualwrite.kafka.client.cluster import Network
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.connection import Connection
from dualwrite.kafka.client.messages_generated import DescribeConfigsRequest, DescribeConfigsResponse, InitProducerIdRequest
from dualwrite.kafka.client.together import MakeRequest
from dualwrite.kafka.inspect.capabilities import INIT_PRODUCER_ID, TWO_PHASE_SETTING
from dualwrite.kafka.inspect.client import BROKER_RESOURCE, settings_in, settings_request

_BROKER_TIMEOUT: Final = 5.0


def two_phase_by_broker(config: KafkaConfig, *, timeout: float) -> dict[int, bool | None]:
    """Whether each live broker has two-phase commit switched on, by node id; None if that is not known.

    Args:
        config: The cluster's settings.
        timeout: Seconds, including retries.

    Raises:
        BrokerUnavailableError: No broker responded.
        BrokerAuthorizationError: The login was refused.
    """
    has_version: dict[int, bool] = {}

    def request(node: int) -> MakeRequest:
        def made(connection: Connection) -> DescribeConfigsRequest:
            has_version[node] = connection.supports(InitProducerIdRequest, INIT_PRODUCER_ID)
            return settings_request(BROKER_RESOURCE, [str(node)], [TWO_PHASE_SETTING])

        return made

    def setting(node: int, response: DescribeConfigsResponse) -> str | None:
        return settings_in(response).get(str(node), {}).get(TWO_PHASE_SETTING)

    with closing(Network(config)) as network:
        brokers = Brokers(network, Deadline.after(timeout), _BROKER_TIMEOUT)
        live = brokers.view([]).brokers
        settings = brokers.request(live, {node: request(node) for node in live}, setting)
    return {node: _is_on(settings.get(node), has_version=has_version.get(node)) for node in sorted(live)}


def _is_on(setting: str | None, *, has_version: bool | None) -> bool | None:
    if has_version is False:
        return False
    return None if setting is None else setting == "true"
