"""Registering an id at a broker that has no InitProducerId that can only create, or that does not answer (rule NG).

The answers are those of other brokers than Apache's, from a fake server; `test_foreign_broker.py` runs one of them.
"""

from __future__ import annotations

from typing import Any

import pytest
from kafka.protocol.admin import DescribeTransactionsRequest, DescribeTransactionsResponse
from kafka.protocol.producer import InitProducerIdRequest

from dualwrite.errors import BrokerError, ProducerFencedError
from dualwrite.kafka.base import NewProducerId
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.client.requests import FOREIGN_PRODUCER_ID
from dualwrite.kafka.native.native_producer import NativeProducer
from fixtures.pace import LIMIT
from fixtures.wire_server import HANG_UP, PRODUCER_ID, WireServer, init_producer_id_answer

INVALID_PRODUCER_ID_MAPPING = 49


def refusing(request: Any) -> Any:
    """No producer has the id that the request names: this broker compares nothing else."""
    return init_producer_id_answer(error_code=0 if request.producer_id < 0 else INVALID_PRODUCER_ID_MAPPING)


def producer_at(server: WireServer) -> NativeProducer:
    return NativeProducer(KafkaConfig.of(server.bootstrap_servers), "shop.1#5f0c2a9be1d4.1", two_phase=True)


def asked(server: WireServer) -> list[Any]:
    """The requests about the id, as the producer ids that they name; None for a description."""
    about = (InitProducerIdRequest, DescribeTransactionsRequest)
    return [getattr(request, "producer_id", None) for request in server.requests if isinstance(request, about)]


def test_a_broker_that_refuses_an_unknown_producer_gets_the_plain_request() -> None:
    with WireServer({InitProducerIdRequest: refusing}) as server:
        producer = producer_at(server)
        assert producer.create(timeout=LIMIT)
        assert producer.identity == (PRODUCER_ID, 0)
        assert asked(server) == [FOREIGN_PRODUCER_ID, None, -1]
        producer.close()


def test_an_id_that_is_known_by_then_is_left_alone() -> None:
    def known(request: Any) -> Any:
        state = DescribeTransactionsResponse.TransactionState
        names = request.transactional_ids
        found = {"transaction_state": "Empty", "transaction_timeout_ms": 60_000, "transaction_start_time_ms": -1}
        ids = {"producer_id": PRODUCER_ID, "producer_epoch": 0}
        return DescribeTransactionsResponse(
            transaction_states=[state(error_code=0, transactional_id=name, topics=[], **found, **ids) for name in names]
        )

    with WireServer({InitProducerIdRequest: refusing, DescribeTransactionsRequest: known}) as server:
        producer = producer_at(server)
        assert not producer.create(timeout=LIMIT)
        assert asked(server) == [FOREIGN_PRODUCER_ID, None]
        producer.close()


@pytest.mark.parametrize("plain", [False, True])
def test_a_request_without_an_answer_is_not_sent_again(plain: bool) -> None:
    """It may arrive later, and would end what was begun under the id by then."""
    with WireServer({InitProducerIdRequest: lambda r: refusing(r) if plain and r.producer_id >= 0 else HANG_UP}) as server:
        producer = producer_at(server)
        assert not producer.create(timeout=LIMIT)
        assert asked(server) == ([FOREIGN_PRODUCER_ID, None, -1] if plain else [FOREIGN_PRODUCER_ID])
        producer.close()


def test_one_of_several_ids_that_is_not_answered_does_not_repeat_the_others() -> None:
    def one_hangs(request: Any) -> Any:
        return HANG_UP if request.transactional_id == "b" else init_producer_id_answer()

    with WireServer({InitProducerIdRequest: one_hangs}) as server:
        coordinator = WireTransactionCoordinator(KafkaConfig.of(server.bootstrap_servers))
        found = coordinator.create_all([NewProducerId(name, 60_000, two_phase=False) for name in "ab"], timeout=LIMIT)
        assert [each.name for each in found] == ["NONE", "NETWORK_EXCEPTION"]
        assert [request.transactional_id for request in server.received(InitProducerIdRequest)] == ["a", "b"]
        coordinator.close()


def test_an_error_does_not_say_that_somebody_has_taken_over_an_id_that_is_unknown() -> None:
    with WireServer(
        {InitProducerIdRequest: lambda _: init_producer_id_answer(error_code=INVALID_PRODUCER_ID_MAPPING)}
    ) as server:
        producer = producer_at(server)
        with pytest.raises(BrokerError, match=r"(?s)refuses to register.*INVALID_PRODUCER_ID_MAPPING.*librdkafka") as caught:
            producer.create(timeout=LIMIT)
        assert not isinstance(caught.value, ProducerFencedError)
        producer.close()
