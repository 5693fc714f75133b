"""What a soak run stands on, behind proxies: brokers, PostgreSQL and MariaDB, and the faults that they can have."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import sqlalchemy as sa

from dualwrite.devcluster import DevCluster
from dualwrite.testing.postgres import PostgresServer
from dualwrite.testing.proxy import TcpProxy
from dualwrite.testing.server_process import DatabaseServer
from fixtures.broker import BRISK
from fixtures.broker_door import doors_in_a_row, open_to
from fixtures.histories import versions_of
from fixtures.mariadb_server import MariaDBServer
from fixtures.pace import LIMIT

Steps = Iterator[float]
"""A fault: between its steps pass so many seconds. Its last step ends it, so it may be asked for all at once."""
CONNECTIONS = 300


class Database:
    """A server and a proxy to it.

    Args:
        server: The server, which runs.
        proxy: What the clients connect to.
    """

    def __init__(self, server: DatabaseServer, proxy: TcpProxy) -> None:
        self.server, self.proxy = server, proxy

    def create(self, name: str) -> tuple[str, str]:
        """A new database: its URL for those who read it, and the one for clients."""
        url = sa.make_url(self.server.create_database(name))
        return tuple(each.render_as_string(hide_password=False) for each in (url, url.set(port=self.proxy.port)))  # type: ignore[return-value]  # two

    def killed(self, chance: random.Random) -> Steps:
        self.server.kill()
        yield chance.uniform(0, 4)
        self.server.start()

    def restarted(self, _: random.Random) -> Steps:
        self.server.restart()
        yield 0

    def cut(self, chance: random.Random) -> Steps:
        """All connections are reset, now or after nothing has passed for a while."""
        if chance.random() < 0.5:
            self.proxy.blackhole()
            yield chance.uniform(0.1, 6)
        self.proxy.cut_with_reset()

    def delayed(self, chance: random.Random) -> Steps:
        yield from slow([self.proxy], chance)


class Stage:
    """The servers; as a context manager they run inside the block. Start it in the main thread, with which they end.

    Args:
        brokers: 1 or 3.
        kafka: The version of Kafka; by default the development cluster's.
        mariadb: Whether there is a MariaDB.

    Attributes:
        servers: Kafka for clients, behind doors.
        direct: Kafka for those who read.
    """

    def __init__(self, brokers: int, *, kafka: str | None = None, mariadb: bool = True) -> None:
        self._opened = ExitStack()
        self._count, self._kafka, self._with_mariadb = brokers, kafka, mariadb
        self.databases: dict[str, Database] = {}

    def __enter__(self) -> Self:
        with self._opened:
            self._doors = doors_in_a_row(self._count)
            for door in self._doors:
                self._opened.enter_context(door)
            settings: dict[str, Any] = {"nodes": self._count, "proxy_port": self._doors[0].port, "kafka_version": self._kafka}
            self.cluster = self._opened.enter_context(DevCluster.temporary(timeout=LIMIT, config=BRISK, **settings))
            open_to(self.cluster, self._doors)
            # autovacuum: rows of ids and hot keys are changed for hours
            servers = {"postgresql": PostgresServer(settings={"max_connections": str(CONNECTIONS), "autovacuum": "on"})}
            if self._with_mariadb:
                servers["mariadb"] = MariaDBServer(settings={"max-connections": str(CONNECTIONS)})
            for name, server in servers.items():
                self._opened.enter_context(server)
                self.databases[name] = Database(server, self._opened.enter_context(TcpProxy("127.0.0.1", server.port)))
            self._kept = self._opened.pop_all()
        self.direct = self.cluster.bootstrap_servers
        self.servers = ",".join(f"127.0.0.1:{door.port}" for door in self._doors)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._kept.close()

    def versions(self, database: str) -> dict[str, str]:
        """The versions of Kafka and of a database."""
        engine = sa.create_engine(self.databases[database].server.url)
        try:
            return versions_of(self.cluster, engine)
        finally:
            engine.dispose()

    # --- faults -----------------------------------------------------------------------------------------------------------

    def faults(self) -> Iterator[tuple[str, str, Callable[[random.Random], Steps]]]:
        """What can happen to the servers and to the network: its kind, what it happens to, and how."""
        brokers, network = "the brokers", "the network to the brokers"
        yield "a broker killed", brokers, self._broker_killed
        yield "a broker paused", brokers, self._broker_paused
        yield "the network to all brokers gone", network, self._doors_shut
        yield "connections to the brokers reset", network, self._doors_cut
        yield "the network to the brokers delayed", network, lambda chance: slow(self._doors, chance)
        for name, database in self.databases.items():
            yield f"{name} killed", name, database.killed
            yield f"{name} restarted", name, database.restarted
            yield f"connections to {name} reset", f"the network to {name}", database.cut
            yield f"the network to {name} delayed", f"the network to {name}", database.delayed

    def _broker_killed(self, chance: random.Random) -> Steps:
        node = chance.randint(1, self._count)
        self.cluster.kill(node)
        yield chance.uniform(0, 8)
        self.cluster.start(node, wait=False)
        yield from self._until_ready()

    def _broker_paused(self, chance: random.Random) -> Steps:
        node = chance.randint(1, self._count)
        self.cluster.pause(node)
        yield chance.uniform(0.2, 12)
        self.cluster.resume(node)
        yield from self._until_ready()

    def _until_ready(self) -> Steps:
        while not self.cluster.status().ready:
            yield 0.5

    def _doors_shut(self, chance: random.Random) -> Steps:
        for door in self._doors:
            door.shut()
        yield chance.uniform(0.5, 12)
        for door in self._doors:
            door.open()

    def _doors_cut(self, chance: random.Random) -> Steps:
        silent = chance.random() < 0.5
        for door in self._doors if silent else ():
            door.blackhole()
        yield chance.uniform(0.1, 6) if silent else 0
        for door in self._doors:
            door.cut_with_reset()


def slow(proxies: list[Any], chance: random.Random) -> Steps:
    """For some seconds what passes is held back now and then, for up to half a second, and then passes in its order."""
    for _ in range(chance.randint(3, 15)):
        for proxy in proxies:
            proxy.blackhole()
        yield chance.uniform(0.02, 0.5)
        for proxy in proxies:
            for link in [*proxy._links]:
                link.resume()
        yield chance.uniform(0.02, 0.5)
