"""Processors whose pool has a journal: a scene on which each message adds a link to a chain (`journal.chains`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dualwrite
from crash.events import SqlEvents
from crash.scene import Scene
from dualwrite import PoolOptions
from dualwrite.devcluster import DevCluster
from dualwrite.stores.journal import GateStatus
from dualwrite.stores.sql import SqlStateStore
from fixtures.broker import make_topic
from fixtures.pace import LIMIT, until
from journal.chains import assert_chains, begin_chains, link, until_drained
from processor.processor_scene import PARTITIONS, ProcessorScene


class JournalScene(ProcessorScene):
    """A scene whose handler, `add_link`, books each number and adds a link to a chain, which is sent to the target."""

    def __init__(self, events: SqlEvents, broker: DevCluster, new_name: Callable[[str], str]) -> None:
        super().__init__(events, broker, new_name)
        self.seen: list[dualwrite.Transaction[Any]] = []
        self.chains = Scene(events, broker.bootstrap_servers, transactional_id=self.prefix)
        self.target = self.chains.topic
        self.store = SqlStateStore(events.engine)
        make_topic(broker, self.target, PARTITIONS)
        begin_chains(self.chains)

    def add_link(self, message: Any, tx: dualwrite.Transaction[Any]) -> None:
        self.events.write(tx.db, self.group, int(message.value()))
        link(tx, self.target, self.seen)

    @contextmanager
    def pool(self, size: int = 2, **options: Any) -> Iterator[dualwrite.WriterPool[Any]]:
        """A pool with a journal; `options` are the pool's."""
        made = PoolOptions(when_kafka_is_down="journal", timeout=LIMIT, **options)
        with super().pool(size, options=made) as pool:
            yield pool

    @property
    def gate(self) -> GateStatus:
        (status,) = self.store.journal.gates(self.prefix, counts=True)
        return status

    def until_journaled(self) -> None:
        """Wait until the journal has messages."""
        until(lambda: self.gate.entries, "messages in the journal")

    def until_closed(self) -> None:
        """Wait until the journal is empty and its gate is closed."""
        until(lambda: not self.gate.is_open, "the journal's gate closed")

    def stored(self) -> int:
        """The sum of the group's positions in the database."""
        assert self.store.positions is not None
        return sum(position.offset for position in self.store.positions.read(self.group).values())

    def assert_once(self, count: int) -> None:
        """Each number is booked once, and each link is in the topic once, in the order of its chain; nothing is left over."""
        assert self.events.numbers(self.group) == list(range(count))
        assert assert_chains(self.chains) == count
        assert self.stored() == count
        assert (self.gate.is_open, self.gate.entries) == (False, 0)

    def assert_once_after_all(self, count: int) -> None:
        """The same when no process is left that empties the journal."""
        until_drained(self.chains)
        self.assert_once(count)
