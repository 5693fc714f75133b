"""Chains of links: a unit reads the last link of a chain, writes the next one, and sends it.

So each link's unit has seen the data of the one before, perhaps of another process: the topic must have the links of each chain
in their order, each once.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

import dualwrite
from crash.scene import Scene, Worker
from crash.worker import say
from dualwrite import Transaction
from dualwrite.relay import journal_keeper, journal_publisher
from dualwrite.stores.sql import SqlStateStore
from dualwrite.testing import failpoints
from fixtures.broker import read_topic
from fixtures.pace import LIMIT, limit, until

CHAINS = 4

ADD = "UPDATE chains SET link = link + 1 WHERE chain = :chain AND topic = :topic"
READ = "SELECT link FROM chains WHERE chain = :chain AND topic = :topic"


def link(tx: Transaction[sa.Connection], topic: str, seen: list[Transaction[Any]]) -> None:
    """Add a link to a chain."""
    where = {"chain": random.randrange(CHAINS), "topic": topic}
    tx.db.execute(sa.text(ADD), where)
    number = tx.db.scalar(sa.text(READ), where)
    tx.send(topic, f"{where['chain']} {number}", key=str(where["chain"]))
    seen.append(tx)


CREATE = """
CREATE TABLE IF NOT EXISTS chains (topic varchar(100), chain integer, link integer, PRIMARY KEY (topic, chain))
"""


def chain_worker(scene: Scene, failpoints: str = "", **environment: str) -> Worker:
    """A process that adds links, through a pool with a journal."""
    where = [scene.url, scene.bootstrap, scene.transactional_id, scene.topic, "3"]
    return Worker(where, failpoints, module="journal.chain_worker", **environment)


def begin_chains(scene: Scene) -> None:
    """Chains without a link, for the scene's topic."""
    with scene.engine.begin() as connection:
        connection.execute(sa.text(CREATE))
        for chain in range(CHAINS):
            connection.execute(sa.text("INSERT INTO chains VALUES (:topic, :chain, 0)"), {"topic": scene.topic, "chain": chain})


def assert_chains(scene: Scene) -> int:
    """The topic has each link of the database once, in the order of its chain; return how many there are."""
    with scene.engine.begin() as connection:
        query = sa.text("SELECT chain, link FROM chains WHERE topic = :topic")
        lengths = {row.chain: row.link for row in connection.execute(query, {"topic": scene.topic})}
    found = defaultdict(list)
    for message in read_topic(scene.bootstrap, scene.topic):
        chain, link = (message.value() or b"").split()
        found[int(chain)].append(int(link))
    for chain, length in lengths.items():
        assert found[chain] == list(range(1, length + 1)), f"chain {chain}"
    return sum(lengths.values())


def until_drained(scene: Scene) -> None:
    """Open a pool, which drains the journal, and wait until the gate is closed."""
    store = SqlStateStore(scene.engine)
    journal = store.journal
    options = dualwrite.PoolOptions(when_kafka_is_down="journal", lease=2, timeout=LIMIT)
    with dualwrite.create_pool(store, prefix=scene.transactional_id, kafka=scene.settings, options=options):
        until(lambda: not journal.gates(scene.transactional_id, counts=False)[0].is_open, "the gate closed")
    dualwrite.recover(store, kafka=scene.settings, prefix=scene.transactional_id).raise_for_problems()


def shorten_leases() -> None:
    """In a process that a test kills: after its death another one empties the journal soon, instead of 15 s later."""
    for module in (journal_keeper, journal_publisher):
        pytest.MonkeyPatch().setattr(module, "_LEASE_SECONDS", limit(2))


def die_at_failpoint(has_journaled: Callable[[], bool]) -> None:
    """In a process that a test kills: once it has written into the journal, have it die at JOURNAL_FAILPOINT."""
    while not has_journaled():
        time.sleep(0.01)
    say("armed")
    failpoints.arm(os.environ["JOURNAL_FAILPOINT"], lambda: os.kill(os.getpid(), signal.SIGKILL))
