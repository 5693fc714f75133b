"""An outbox, a topic with partitions, and the comparison of what was inserted with what was published."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from confluent_kafka import Message

import dualwrite
from dualwrite.devcluster import DevCluster
from dualwrite.relay import RelayOptions, create_table
from dualwrite.relay.layout import GENERIC, OutboxLayout
from fixtures.broker import make_topic, read_topic, wait_for_markers
from fixtures.pace import LIMIT

PARTITIONS = 3
KEYS = 5


class RelayScene:
    """A database with an outbox in the generic layout, and a topic.

    Args:
        url: The database, with dualwrite's tables.
        broker: The cluster.
        new_name: Makes names.
        create: Whether to create the table.
    """

    layout: OutboxLayout = GENERIC

    def __init__(self, url: str, broker: DevCluster, new_name: Callable[[str], str], *, create: bool = True) -> None:
        self.url, self.broker, self.servers = url, broker, broker.bootstrap_servers
        self.topic, self.name = new_name("relayed"), new_name("relay")
        self.engine = sa.create_engine(url)
        self.numbers = itertools.count()
        make_topic(broker, self.topic, PARTITIONS)
        if create:
            create_table(self.engine)

    def insert(self, count: int, **more: Any) -> list[int]:
        """Insert so many rows in one transaction; each has the next number as its value, and a key by that number."""
        numbers = list(itertools.islice(self.numbers, count))
        with self.engine.begin() as connection:
            self.insert_on(connection, numbers, **more)
        return numbers

    def insert_on(self, connection: sa.Connection, numbers: Iterable[int], **more: Any) -> None:
        """Insert rows with these numbers in an open transaction."""
        rows = [{"topic": self.topic, "key": key_of(each).encode(), "value": b"%d" % each, **more} for each in numbers]
        columns = ", ".join(map(self.quoted, rows[0]))
        values = ", ".join(f":{name}" for name in rows[0])
        connection.execute(sa.text(f"INSERT INTO outbox ({columns}) VALUES ({values})"), rows)

    def quoted(self, name: str) -> str:
        return self.engine.dialect.identifier_preparer.quote(name)

    def waiting(self) -> int:
        with self.engine.connect() as connection:
            return connection.scalar(sa.text("SELECT count(*) FROM outbox")) or 0

    @contextmanager
    def writer(self, **more: Any) -> Iterator[dualwrite.DualWriter[Any]]:
        with dualwrite.connect(self.url, kafka=self.servers, transactional_id=f"{self.name}.1", **more) as made:
            yield made

    @contextmanager
    def relay(self, **options: Any) -> Iterator[dualwrite.Relay]:
        """A relay with these options."""
        chosen = RelayOptions(**{"layout": self.layout, "lease": 3, "longest_poll": 0.2, **options})
        with dualwrite.Relay(self.url, kafka=self.servers, name=self.name, options=chosen) as made:
            yield made

    def messages(self) -> list[Message]:
        """The committed messages, each partition's in its order."""
        return read_topic(self.servers, self.topic)

    def message_numbers(self) -> list[int]:
        """The numbers of all messages."""
        return [int(message.value() or b"-1") for message in self.messages()]

    def published(self) -> Mapping[str, list[int]]:
        """The numbers of each key, in the order of the topic."""
        found: dict[str, list[int]] = {}
        for message in self.messages():
            found.setdefault((message.key() or b"").decode(), []).append(int(message.value() or b"-1"))
        return found

    def check(self, numbers: Iterable[int]) -> None:
        """Each of these numbers was published once, in its order within each key, and nothing else."""
        wait_for_markers(self.servers)
        expected: dict[str, list[int]] = {}
        for number in numbers:
            expected.setdefault(key_of(number), []).append(number)
        assert self.published() == expected


def key_of(number: int) -> str:
    return f"k{number % KEYS}"


@contextmanager
def running(scene: RelayScene, **options: Any) -> Iterator[dualwrite.Relay]:
    """A relay in a thread of its own; its error is raised at the end."""
    failed: list[Exception] = []
    with scene.relay(**options) as relay:

        def run() -> None:
            try:
                relay.run()
            except Exception as error:  # noqa: BLE001  (raised below)
                failed.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield relay
        finally:
            relay.stop()
            thread.join(LIMIT)
            assert not thread.is_alive()
        if failed:
            raise failed[0]
