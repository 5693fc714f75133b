"""A scene whose writer connects to its database through a proxy, and the ways in which the connection breaks at COMMIT."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import sqlalchemy as sa

from crash.databases import Databases
from crash.scene import Scene
from dualwrite import DualWriter, StoreCommitFailedError, StoreCommitUnknownError, Timeouts
from dualwrite.devcluster import DevCluster
from dualwrite.testing import failpoints
from dualwrite.testing.proxy import Link, TcpProxy, When
from fixtures.pace import LIMIT

OPTIONS = {"mariadb": "read_timeout=2", "zookeeper": "session_timeout=4"}
"""Time limits of the driver, after which an answer that does not come is not waited for."""


class Cut(NamedTuple):
    """What happens to the connection when the commit passes.

    Args:
        when: The moment, as defined by TcpProxy.
        action: What is done to the connection.
        committed: Whether the database commits; None if that is a race.
    """

    when: When
    action: Callable[[Link], None]
    committed: bool | None


CUTS = {
    "cut before it arrives": Cut("before", Link.cut, committed=False),
    "reset before it arrives": Cut("before", Link.cut_with_reset, committed=False),
    "cut while it runs": Cut("after", Link.cut, committed=None),
    "reset while it runs": Cut("after", Link.cut_with_reset, committed=None),
    "cut when it was answered": Cut("answered", Link.cut, committed=True),
    "reset when it was answered": Cut("answered", Link.cut_with_reset, committed=True),
}


@dataclass
class Proxied:
    """A scene whose writer connects through a proxy; the test's own checks bypass it."""

    scene: Scene
    proxy: TcpProxy
    url: str
    commit: bytes

    def connect(self, claim: float = LIMIT) -> DualWriter:
        return self.scene.connect(self.url, timeouts=Timeouts(claim=claim, kafka=LIMIT, delivery=LIMIT))

    def at_commit(self, when: When, action: Callable[[Link], None]) -> Any:
        """In the block, the next COMMIT of a transaction meets this."""
        hook = failpoints.only_at(1, lambda: self.proxy.on_client_bytes(self.commit, action, when=when))
        return failpoints.armed("before_db_commit", hook)

    def go_away(self, link: Link) -> None:
        """Cut this connection and refuse new ones, until `come_back`."""
        self.proxy.refuse()
        link.cut()

    def come_back(self) -> None:
        self.proxy.refuse(refusing=False)

    def end_backend(self) -> None:
        """End PostgreSQL's backend that executes the writer's COMMIT, and wait until it is gone and its locks are released."""
        query = sa.text(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database() "
            "AND state = 'idle in transaction' AND application_name = 'dualwrite'"
        )
        with self.scene.engine.connect() as connection:
            connection.execute(query)

    # --- what a block has reported ----------------------------------------------------------------------------------------

    def reported(self, writer: DualWriter, number: int) -> bool:
        """Write an event; whether its block says that it is committed, or else that it was rolled back."""
        failed: StoreCommitFailedError | None = None
        try:
            self.scene.event(writer, number)
        except StoreCommitFailedError as error:
            failed = error
        if failed is None:
            return True
        assert (failed.retriable, failed.transactional_id) == (True, self.scene.transactional_id)
        assert "rolled back" in str(failed)
        assert isinstance(failed.__cause__, StoreCommitUnknownError)
        return False

    def assert_told(self, writer: DualWriter, *, committed: bool) -> None:
        """Event 2 is on both sides or on none, as its block has reported; the writer continues, and nothing is left open."""
        there = [1, 2] if committed else [1]
        assert self.scene.agree() == there
        self.scene.event(writer, 3)
        writer.close()
        assert self.scene.agree() == [*there, 3]
        self.scene.assert_resolved()


@contextmanager
def through_a_proxy(databases: Databases, database: str, broker: DevCluster) -> Iterator[Proxied]:
    """A scene on a database behind a proxy."""
    scene = databases.scene(database, broker)
    commit = {
        "postgresql": b"COMMIT\0",
        "mariadb": b"\x03COMMIT",
        "zookeeper": f"/events/{scene.transactional_id}:2".encode(),
    }[database]
    found = re.search(r":(\d+)/", scene.url)
    assert found is not None
    with TcpProxy("127.0.0.1", int(found[1])) as proxy:
        url = scene.url.replace(found[0], f":{proxy.port}/")
        if database in OPTIONS:
            url += f"{'&' if '?' in url else '?'}{OPTIONS[database]}"
        yield Proxied(scene, proxy, url, commit)
