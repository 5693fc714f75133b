"""Scenes on SQL databases."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import sqlalchemy as sa

from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.registry import store_from_url
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.tables import lease_table, state_table
from dualwrite.testing.proxy import Link, TcpProxy
from dualwrite.testing.stores import ClaimsWait, StoreCapabilities, StoreScene
from fixtures.pace import LIMIT

numbers = sa.Table("numbers", sa.MetaData(), sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False))


def cut_once(proxy: TcpProxy, patterns: Iterable[bytes], *, arrives: bool) -> Callable[[], bool]:
    """Cut the connection that first sends one of these; returns whether that has happened."""
    has_cut = threading.Event()

    def cut(link: Link) -> None:
        if not has_cut.is_set():
            has_cut.set()
            link.cut()

    for pattern in patterns:
        proxy.on_client_bytes(pattern, cut, when="answered" if arrives else "before")
    return has_cut.is_set


class SqlScene(StoreScene):
    """A scene on a SQL database.

    Args:
        url: The database's address, for reading from it directly.
        proxied_url: Its address through `proxy`, for the stores; the same if there is no connection that could break.
        proxy: Breaks connections.
        commit: The bytes that pass through the proxy when a transaction commits.
    """

    def __init__(self, url: str, proxied_url: str | None = None, proxy: TcpProxy | None = None, commit: bytes = b"") -> None:
        super().__init__()
        self._url = url
        self._proxied_url = proxied_url or url
        self._proxy = proxy
        self._commit = commit
        self._connections: dict[int, list[Any]] = {}
        self._engine = sa.create_engine(url)
        numbers.create(self._engine, checkfirst=True)

    def open(self) -> SqlStateStore:
        return self._opened(lock_timeout=LIMIT)

    def open_with_short_timeout(self) -> SqlStateStore:
        return self._opened(lock_timeout=0.3)

    def _opened(self, lock_timeout: float) -> SqlStateStore:
        store = SqlStateStore.from_url(self._proxied_url, lock_timeout=lock_timeout, pool_size=10)
        connections = self._connections[id(store)] = []
        sa.event.listen(store.engine, "connect", lambda raw, _: connections.append(raw))
        return store

    def put(self, handle: sa.Connection, number: int) -> None:
        handle.execute(numbers.insert().values(number=number))

    def numbers(self) -> list[int]:
        with self._engine.connect() as connection:
            return list(connection.scalars(sa.select(numbers.c.number)))

    def corrupt(self, transactional_id: str) -> None:
        with self._engine.begin() as connection:
            row = state_table.c.transactional_id == transactional_id
            connection.execute(state_table.update().where(row).values(prepared_transaction_state="4711"))

    def ways_to_end(self, handle: sa.Connection) -> Mapping[str, Callable[[], Any]]:
        return {
            "commit()": handle.commit,
            "rollback()": handle.rollback,
            "close()": handle.close,
            "begin()": handle.begin,
            "COMMIT": lambda: handle.execute(sa.text("COMMIT")),
            "ROLLBACK": lambda: handle.execute(sa.text("/* */ rollback")),
        }

    def opener(self) -> Callable[[], TxnStateStore]:
        return partial(store_from_url, self._url)

    def cut_next_commit(self, *, arrives: bool) -> Callable[[], bool] | None:
        if self._proxy is None:
            return super().cut_next_commit(arrives=arrives)
        return cut_once(self._proxy, [self._commit], arrives=arrives)

    def cut_connections(self) -> None:
        if self._proxy is None:
            super().cut_connections()
        else:
            self._proxy.cut()

    def turn_clock_back(self, seconds: float) -> None:
        with self._engine.begin() as connection:
            for row in connection.execute(lease_table.select().where(lease_table.c.owner != "")).all():
                until = row.leased_until + timedelta(seconds=seconds)
                one = lease_table.c.transactional_id == row.transactional_id
                connection.execute(lease_table.update().where(one).values(leased_until=until))

    def remove(self, handle: sa.Connection, number: int) -> None:
        handle.execute(numbers.delete().where(numbers.c.number == number))

    def crash(self, store: TxnStateStore) -> None:
        """Close the store's driver connections: the database rolls back what was open on them."""
        assert isinstance(store, SqlStateStore)
        for raw in self._connections.pop(id(store)):
            with suppress(Exception):  # PyMySQL's, where it is closed already
                raw.close()
        store.engine.dispose(close=False)

    def close_stores(self) -> None:
        """Check that each store's pool has all its connections back after the test."""
        held = [store.engine.pool.checkedout() for store in self._stores if isinstance(store, SqlStateStore)]
        super().close_stores()
        assert not any(held), f"connections that were not returned: {held}"

    def close(self) -> None:
        self._engine.dispose()


class SqliteScene(SqlScene):
    capabilities: ClassVar[StoreCapabilities] = StoreCapabilities(
        claims_wait=ClaimsWait.FROM_BEGIN, transactions_at_once=False, crashes=True
    )


class ServerScene(SqlScene):
    """PostgreSQL, and similar servers."""

    capabilities: ClassVar[StoreCapabilities] = StoreCapabilities(
        claims_wait=ClaimsWait.FROM_RECORD, crashes=True, cuts_commits=True
    )
