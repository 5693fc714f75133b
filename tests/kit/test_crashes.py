"""`crash_at`, and the fixtures' messages: a killed service, its recovery, and what both sides have then."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa

import dualwrite
from dualwrite.devcluster import DevCluster
from dualwrite.testing.crashes import DECIDED, UNDECIDED, crash_at
from dualwrite.testing.topics import SentMessages
from fixtures.pace import LIMIT
from fixtures.tiers import thinned


def write(url: str, kafka: str, topic: str, *items: str) -> None:
    """What a service with a writer does."""
    with dualwrite.connect(url, kafka=kafka, transactional_id=topic) as writer:
        for item in items:
            with writer.transaction() as tx:
                place(tx, topic, item)


def write_in_pool(url: str, kafka: str, topic: str, *items: str) -> None:
    """What a service with a pool does."""
    with dualwrite.create_pool(url, kafka=kafka, prefix=topic) as pool:
        for item in items:
            pool.run(place, topic, item)


def place(tx: dualwrite.Transaction[sa.Connection], topic: str, item: str) -> None:
    tx.db.execute(sa.text("INSERT INTO orders VALUES (:item)"), {"item": item})
    tx.send(topic, item)


@pytest.fixture
def url(postgres_url: str) -> Iterator[str]:
    engine = sa.create_engine(postgres_url)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE orders (item TEXT)"))
    yield postgres_url
    engine.dispose()


def items(url: str) -> list[str]:
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        found = list(connection.scalars(sa.text("SELECT item FROM orders ORDER BY 1")))
    engine.dispose()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("service", [write, write_in_pool])
@pytest.mark.parametrize("failpoint", thinned([*UNDECIDED, *DECIDED], kept=["before_db_commit", "after_db_commit"]))
def test_a_crash_at_a_failpoint_of_a_transaction_is_recovered_as_its_table_says(
    broker: DevCluster, url: str, new_name: Callable[[str], str], failpoint: str, service: Callable[..., None]
) -> None:
    kafka, topic = broker.bootstrap_servers, new_name("crash")
    sent = SentMessages(kafka, timeout=LIMIT)
    crash_at(f"{failpoint}#2", service, url, kafka, topic, "chair", "lamp")
    dualwrite.recover(url, kafka=kafka, prefix=topic)
    expected = ["chair", "lamp"] if failpoint in DECIDED else ["chair"]
    assert items(url) == [message.text for message in sent(topic)] == expected


def nothing(*_: object, **__: object) -> None: ...


def failing(why: str, *, told: str = "") -> None:
    raise ValueError(why + told)


def exiting() -> None:
    os._exit(3)


def waiting() -> None:
    time.sleep(LIMIT)


@pytest.mark.slow
def test_a_function_that_does_not_reach_the_failpoint_fails_the_test() -> None:
    with pytest.raises(AssertionError, match=r"^nothing has not reached the failpoint 'after_begin', and has returned"):
        crash_at("after_begin", nothing, 1, two=2)
    with pytest.raises(AssertionError, match=r"(?s)^failing has not .* has failed\..*in failing\n.*ValueError: no database"):
        crash_at("after_begin", failing, "no ", told="database")
    with pytest.raises(AssertionError, match=r"(?s)^exiting has not .*standard error"):
        crash_at("after_begin", exiting)


@pytest.mark.slow
def test_a_function_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualwrite.testing.crashes.TIMEOUT", 2.0)
    with pytest.raises(AssertionError, match=r"^waiting has not reached the failpoint 'after_begin' within 2 s\."):
        crash_at("after_begin", waiting)


def test_what_another_process_cannot_get_is_refused() -> None:
    def local() -> None: ...

    with pytest.raises(dualwrite.ConfigurationError, match="no failpoint 'at_noon'"):
        crash_at("at_noon", nothing)
    with pytest.raises(dualwrite.UsageError, match="top level of a module"):
        crash_at("after_begin", local)
    with pytest.raises(dualwrite.UsageError, match="plain values"):
        crash_at("after_begin", nothing, sa.create_engine("sqlite://"))
