"""The shop's tests: of its functions without servers, of the service on real ones, and of crashes.

pip install "dualwrite[postgres,testing]" fastapi httpx2
pytest examples/tested_service
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient
from shop import ORDERS, Base, Order, OrderRow, Sold, count_order, make_app, make_counter, take_order
from sqlalchemy import Engine, StaticPool, create_engine, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

import dualwrite
from dualwrite.testing.crashes import DECIDED, UNDECIDED, crash_at
from dualwrite.testing.fakes import FakeMessage, FakeTransaction
from dualwrite.testing.topics import SentMessages

LAMP = Order(id="1", item="lamp")

# --- functions, without servers ---------------------------------------------------------------------------------------


@pytest.fixture
def engine() -> Iterator[Engine]:
    """The shop's tables in memory."""
    made = create_engine("sqlite://", poolclass=StaticPool)
    Base.metadata.create_all(made)
    yield made
    made.dispose()


def test_an_order_is_a_row_and_an_event(engine: Engine) -> None:
    """A unit writes both."""
    with FakeTransaction(engine) as tx:
        take_order(tx, LAMP)
    (event,) = tx.sent
    assert (event.topic, event.key_text, event.decoded(ORDERS)) == ("orders", "1", LAMP)
    with Session(engine) as session:
        assert session.get_one(OrderRow, "1").item == "lamp"


def test_an_order_that_exists_sends_nothing(engine: Engine) -> None:
    """A unit that fails writes neither."""
    with FakeTransaction(engine) as tx:
        take_order(tx, LAMP)
    again = FakeTransaction(engine)
    with pytest.raises(IntegrityError), again:
        take_order(again, LAMP)
    assert again.sent == []


def test_the_hundredth_order_makes_a_bestseller(engine: Engine) -> None:
    """A handler gets fake messages."""
    with FakeTransaction(engine) as tx:
        tx.session.add(Sold(item="lamp", count=98))
        count_order(FakeMessage(ORDERS, None, key="cancelled"), tx)
        for number in range(2):
            count_order(FakeMessage(ORDERS, Order(id=f"{number}", item="lamp")), tx)
    assert [message.text for message in tx.sent] == ["lamp"]


# --- the service, on real servers -------------------------------------------------------------------------------------


def test_the_service_takes_each_order_once(dualwrite_postgres: str, dualwrite_kafka: str, sent: SentMessages) -> None:
    """An order that is refused leaves no event."""
    with TestClient(make_app(dualwrite_postgres, dualwrite_kafka)) as client:
        assert client.post("/orders", json=LAMP.model_dump()).status_code == 201  # noqa: PLR2004  (Created)
        assert client.post("/orders", json=LAMP.model_dump()).status_code == 409  # noqa: PLR2004  (Conflict)
    assert [message.decoded(ORDERS) for message in sent(ORDERS)] == [LAMP]


def test_the_processor_counts_what_the_service_takes(dualwrite_postgres: str, dualwrite_kafka: str) -> None:
    """The processor also reads the orders of earlier tests, so this one has an item of its own."""
    with TestClient(make_app(dualwrite_postgres, dualwrite_kafka)) as client:
        client.post("/orders", json={"id": "7", "item": "parasol"})
    engine = create_engine(dualwrite_postgres)
    with dualwrite.connect(engine, kafka=dualwrite_kafka, transactional_id="counter") as writer:
        counter = make_counter(writer, dualwrite_kafka)
        thread = threading.Thread(target=counter.run)
        thread.start()
        try:
            while thread.is_alive() and not counted(engine, "parasol"):
                thread.join(0.05)
        finally:
            counter.stop()
            thread.join()
    assert counted(engine, "parasol") == 1
    engine.dispose()


def counted(engine: Engine, item: str) -> int:
    """How often the item was counted."""
    with Session(engine) as session:
        return session.scalar(select(Sold.count).where(Sold.item == item)) or 0


# --- crashes ----------------------------------------------------------------------------------------------------------


def serve_once(database: str, kafka: str) -> None:
    """What the process does that is killed."""
    with TestClient(make_app(database, kafka)) as client:
        client.post("/orders", json=LAMP.model_dump())


@pytest.mark.parametrize("failpoint", [*UNDECIDED, *DECIDED])
def test_a_crash_leaves_an_order_on_both_sides_or_on_none(
    dualwrite_postgres: str, dualwrite_kafka: str, sent: SentMessages, failpoint: str
) -> None:
    """The rows and the topic are compared after the recovery."""
    crash_at(failpoint, serve_once, dualwrite_postgres, dualwrite_kafka)
    dualwrite.recover(dualwrite_postgres, kafka=dualwrite_kafka, prefix="shop")  # pools do so when the lease has expired
    engine = create_engine(dualwrite_postgres)
    with Session(engine) as session:
        orders = list(session.scalars(select(OrderRow.item)))
    engine.dispose()
    assert orders == [message.decoded(ORDERS).item for message in sent(ORDERS)] == (["lamp"] if failpoint in DECIDED else [])
