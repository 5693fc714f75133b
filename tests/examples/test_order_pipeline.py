"""The order pipeline as a service: two processes, one is killed, another takes its place."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from dualwrite import migration
from dualwrite.devcluster import DevCluster
from fixtures.broker import make_topic, read_topic, started
from fixtures.pace import ended, until_received, until_recorded
from fixtures.producing import producing

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "order_pipeline.py"
ORDERS = 300
CUSTOMERS = ("ann", "bob", "cem", "dua")


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    """Its topics are named as in the example."""
    with started(config={"group.min.session.timeout.ms": "500"}) as made:
        for topic in ("orders", "payments"):
            make_topic(made, topic, 4)
        yield made


@pytest.fixture
def url(postgres_url: str) -> str:
    migration.upgrade(postgres_url)
    return postgres_url


@contextmanager
def pipeline(url: str, cluster: DevCluster) -> Iterator[subprocess.Popen[str]]:
    environment = {
        **os.environ,
        "DUALWRITE_DATABASE_URL": url,
        "DUALWRITE_KAFKA_BOOTSTRAP_SERVERS": cluster.bootstrap_servers,
        "DUALWRITE_KAFKA_SESSION_TIMEOUT_MS": "2000",
        "DUALWRITE_KAFKA_HEARTBEAT_INTERVAL_MS": "300",
    }
    process = subprocess.Popen([sys.executable, str(EXAMPLE)], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as output:
        try:
            assert output.readline() == "ready\n"
            yield process
        finally:
            process.kill()
            process.wait()


def booked(url: str) -> dict[str, int]:
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        found = connection.execute(sa.text("SELECT customer, amount FROM balances")).all()
    return {row.customer: row.amount for row in found}


def paid(cluster: DevCluster) -> Counter[str]:
    found = Counter[str]()
    for message in read_topic(cluster.bootstrap_servers, "payments"):
        payment = json.loads(message.value() or b"")
        found[payment["customer"]] += payment["paid"]
    return found


@pytest.mark.soak
def test_each_order_is_counted_once(url: str, cluster: DevCluster) -> None:
    expected = Counter[str]()
    bad = {b"not JSON", b'{"customer": "ann", "amount": 12.5}', b'{"customer": "ann", "amount": true}', b'{"customer": "ann"}'}

    def order(numbers: range, *more: bytes) -> None:
        with producing(cluster.bootstrap_servers) as produce:
            for number in numbers:
                customer = CUSTOMERS[number % len(CUSTOMERS)]
                expected[customer] += number
                produce("orders", json.dumps({"customer": customer, "amount": number}), key=customer)
            for text in more:
                produce("orders", text, key="ann")

    with ExitStack() as processes:
        killed = processes.enter_context(pipeline(url, cluster))
        other = processes.enter_context(pipeline(url, cluster))
        order(range(ORDERS), *bad)
        until_received(lambda: list(booked(url)), "the first are booked")
        killed.kill()
        ended(killed)
        third = processes.enter_context(pipeline(url, cluster))
        order(range(ORDERS, 2 * ORDERS))
        until_recorded(lambda: booked(url), expected, "in the database", pause=0.2)
        until_recorded(lambda: paid(cluster), expected, "a live process recovers what the killed one had prepared", pause=0.5)
        for process in (other, third):
            process.send_signal(signal.SIGTERM)
        assert [ended(other), ended(third)] == [0, 0]
    assert paid(cluster) == booked(url) == expected
    assert {letter.value() for letter in read_topic(cluster.bootstrap_servers, "orders.dead")} == bad
