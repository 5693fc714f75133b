"""How many round trips opening takes, to PostgreSQL and Kafka together: what is sent at the same time counts once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

import dualwrite
from dualwrite.devcluster import DevCluster
from dualwrite.kafka.client.broker_connection import Connection, Framing
from dualwrite.pool.upkeep import Upkeep
from dualwrite.stores.sql import SqlStateStore
from dualwrite.testing.proxy import TcpProxy
from fixtures.broker import make_topic

MOST: Final = 21
NewName = Callable[[str], str]


class RoundTrips:
    """Counts the round trips of the current thread to PostgreSQL, through its proxy, and to Kafka."""

    def __init__(self, proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch) -> None:
        self._proxy = proxy
        self._to_kafka = 0
        self._has_answer = True
        send, responses = Connection.send, Framing.responses

        def counted_send(connection: Connection, *args: Any) -> int:
            self._to_kafka += self._has_answer
            self._has_answer = False
            return send(connection, *args)

        def counted_responses(framing: Framing, data: bytes) -> list[Any]:
            self._has_answer = True
            return responses(framing, data)

        monkeypatch.setattr(Connection, "send", counted_send)
        monkeypatch.setattr(Framing, "responses", counted_responses)

    @contextmanager
    def counted(self) -> Iterator[list[int]]:
        """The list has one number after the block."""
        counted: list[int] = []
        before = self._proxy.exchanges + self._to_kafka
        yield counted
        counted.append(self._proxy.exchanges + self._to_kafka - before)


@pytest.fixture
def round_trips(postgres_proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch) -> RoundTrips:
    return RoundTrips(postgres_proxy, monkeypatch)


@pytest.fixture
def connected_store(proxied_store: SqlStateStore) -> SqlStateStore:
    """A store with an open connection."""
    proxied_store.check()
    return proxied_store


def opening(round_trips: RoundTrips, store: SqlStateStore, broker: DevCluster, name: str, lanes: int) -> int:
    """The round trips of opening a writer, which is then closed."""
    with round_trips.counted() as counted:
        writer = dualwrite.connect(store, kafka=broker.bootstrap_servers, transactional_id=name, lanes=lanes)
    writer.close()
    return counted[0]


def test_opening_takes_few_round_trips_however_many_lanes_there_are(
    round_trips: RoundTrips, connected_store: SqlStateStore, broker: DevCluster, new_name: NewName
) -> None:
    three, six = new_name("id"), new_name("id")
    new = [opening(round_trips, connected_store, broker, name, lanes) for name, lanes in ((three, 3), (six, 6))]
    known = [opening(round_trips, connected_store, broker, name, lanes) for name, lanes in ((three, 3), (six, 6))]
    assert max(*new, *known) <= MOST
    assert new[1] <= new[0]  # the first one finds the database without an id
    assert known[0] == known[1]


def test_lanes_that_must_be_recovered_are_recovered_side_by_side(
    round_trips: RoundTrips, connected_store: SqlStateStore, broker: DevCluster, new_name: NewName
) -> None:
    topic = new_name("topic")
    make_topic(broker, topic)

    def opening_again(lanes: int) -> int:
        name = new_name("id")
        with dualwrite.connect(connected_store, kafka=broker.bootstrap_servers, transactional_id=name, lanes=lanes) as first:
            for _ in range(lanes):
                with first.transaction() as tx:
                    tx.send(topic, b"1")
            return opening(round_trips, connected_store, broker, name, lanes)

    assert opening_again(3) == opening_again(6)


def test_another_writer_of_a_pool_takes_few_round_trips(
    round_trips: RoundTrips,
    connected_store: SqlStateStore,
    broker: DevCluster,
    new_name: NewName,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Upkeep, "start", lambda *_: None)  # its search for other ids would count
    taken = []
    for size in (1, 2):
        with round_trips.counted() as counted:
            pool = dualwrite.create_pool(connected_store, kafka=broker.bootstrap_servers, prefix=new_name("pool"), size=size)
        taken += counted
        pool.close()
    assert taken[1] - taken[0] <= MOST
