"""Brokers that are too old, or have no transactions: said at once, with what they lack, and not taken for an outage.

The fake broker plays what no broker at hand does. `test_foreign_broker.py` has a real one that is too old.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from kafka.protocol.admin import DescribeTransactionsRequest, DescribeTransactionsResponse
from kafka.protocol.metadata import (
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    MetadataRequest,
)
from kafka.protocol.producer import EndTxnRequest, EndTxnResponse, InitProducerIdRequest, ProduceRequest

import dualwrite
from dualwrite.errors import UnsupportedBrokerError
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.inspect import probe
from dualwrite.migration import upgrade
from fixtures.command import output_of
from fixtures.pace import LIMIT
from fixtures.tables import table
from fixtures.wire_server import WireServer, init_producer_id_answer

UNSUPPORTED_VERSION, INVALID_REQUEST = 35, 42


class Lacking(WireServer):
    """A broker without some requests."""

    def __init__(self, *missing: Any, **more: Any) -> None:
        super().__init__(**more)
        for request in missing:
            del self._handlers[request]


def without_coordinators(code: int) -> WireServer:
    """As Azure Event Hubs in its Standard plan: it refuses to name a coordinator of transactions."""

    def refuse(request: Any) -> Any:
        coordinator = FindCoordinatorResponse.Coordinator
        nobody = {"node_id": -1, "host": "", "port": -1, "error_code": code, "error_message": "no transactions"}
        return FindCoordinatorResponse(**nobody, coordinators=[coordinator(key=k, **nobody) for k in request.coordinator_keys])

    return WireServer({FindCoordinatorRequest: refuse})


def about_every_id(request: Any) -> Any:
    state = DescribeTransactionsResponse.TransactionState
    return DescribeTransactionsResponse(
        transaction_states=[
            state(error_code=UNSUPPORTED_VERSION, transactional_id=name, topics=[]) for name in request.transactional_ids
        ]
    )


CASES = MappingProxyType(
    {
        "no coordinators": (lambda: without_coordinators(INVALID_REQUEST), "FindCoordinator of type 1 with INVALID_REQUEST"),
        "no such type": (lambda: without_coordinators(UNSUPPORTED_VERSION), "type 1 with UNSUPPORTED_VERSION"),
        "no InitProducerId": (lambda: Lacking(InitProducerIdRequest, EndTxnRequest), "no InitProducerId; no EndTxn"),
        "no DescribeTransactions": (lambda: Lacking(DescribeTransactionsRequest), "no DescribeTransactions"),
        "no AddPartitionsToTxn": (lambda: Lacking(versions={ProduceRequest: (0, 11)}), "no AddPartitionsToTxn"),
        "an old InitProducerId": (
            lambda: Lacking(versions={InitProducerIdRequest: (0, 1)}),
            "InitProducerId v0 to v1, where v4 to v6 is needed",
        ),
        "an old FindCoordinator": (lambda: Lacking(versions={FindCoordinatorRequest: (0, 3)}), "FindCoordinator v0 to v3"),
        "an old Metadata": (lambda: Lacking(versions={MetadataRequest: (0, 8)}), "Metadata v0 to v8"),
        "EndTxn in name only": (
            lambda: WireServer({EndTxnRequest: lambda _: EndTxnResponse(error_code=UNSUPPORTED_VERSION)}),
            "it answers EndTxn with UNSUPPORTED_VERSION",
        ),
    }
)


@table("case", CASES)
def test_the_probe_says_what_a_broker_lacks(case: str) -> None:
    make, lacks = CASES[case]
    with make() as server, pytest.raises(UnsupportedBrokerError) as caught:
        probe(server.bootstrap_servers, timeout=LIMIT)
    assert lacks in caught.value.what
    assert lacks in "; ".join(caught.value.lacks)
    assert not caught.value.retriable


@pytest.mark.parametrize("producer", ["auto", "librdkafka"])
def test_a_pool_does_not_wait_for_transactions_that_a_broker_does_not_have(producer: Any, tmp_path: Path) -> None:
    store = dualwrite.SqlStateStore.from_url(f"sqlite:///{tmp_path}/shop.db")
    upgrade(store.engine)
    with without_coordinators(INVALID_REQUEST) as server, pytest.raises(UnsupportedBrokerError, match="no transactions"):
        dualwrite.create_pool(store, kafka=server.bootstrap_servers, prefix="shop", producer=producer)
    store.close()


def test_a_description_that_a_broker_does_not_have_is_said_as_well() -> None:
    with WireServer({DescribeTransactionsRequest: about_every_id}) as server:
        coordinator = WireTransactionCoordinator(KafkaConfig.of(server.bootstrap_servers))
        with pytest.raises(UnsupportedBrokerError, match="answers DescribeTransactions with UNSUPPORTED_VERSION"):
            coordinator.describe("shop", timeout=LIMIT)
        coordinator.close()


@pytest.mark.parametrize(
    ("server", "finding"),
    [
        (lambda: without_coordinators(INVALID_REQUEST), "does not offer what dualwrite needs"),
        (lambda: WireServer({InitProducerIdRequest: lambda _: init_producer_id_answer(error_code=49)}), "refuses to register"),
    ],
    ids=["no transactions", "no registration"],
)
def test_the_doctor_says_what_a_pool_would_say(
    server: Callable[[], WireServer], finding: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with server() as found:
        code, out, _ = output_of(capsys, "doctor", "--kafka", found.bootstrap_servers)
    text = " ".join(out.split())
    assert (code, "BROKEN kafka" in text, finding in text) == (1, True, True), text
