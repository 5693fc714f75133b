"""Writers whose connections break at random: at the end the tree contains what they know to be committed."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import KazooException
from zookeeper_scene import SHORT_SESSION, STATE

from dualwrite.errors import StoreCommitFailedError, StoreCommitUnknownError, StoreUnavailableError
from dualwrite.stores.zookeeper import ZooKeeperStore
from dualwrite.testing.proxy import Link, TcpProxy
from fixtures.pace import LIMIT
from fixtures.zookeeper_server import ZooKeeperServer

WRITERS = 4
TRANSACTIONS = 100
FAULTS: tuple[Callable[[TcpProxy], None], ...] = (
    TcpProxy.cut,
    TcpProxy.cut_with_reset,
    lambda proxy: proxy.on_client_bytes(b"/kafka_transaction_state", Link.cut),
    lambda proxy: proxy.on_client_bytes(b"/kafka_transaction_state", Link.cut, when="after"),
    lambda proxy: proxy.on_client_bytes(b"/kafka_transaction_state", Link.cut_with_reset, when="answered"),
)


class CountingWriter:
    """Does as the writer does (lane.py), with Kafka's side left out, and counts what it knows to be committed."""

    def __init__(self, store: ZooKeeperStore, number: int) -> None:
        self.counter = f"/counter-{number}"
        self.committed = self.unknown = 0
        self._store = store
        self._claim = store.claim(f"id-{number}", "storm", timeout=LIMIT)

    def run(self) -> None:
        for number in range(1, TRANSACTIONS + 1):
            try:
                self._write(number)
            except (StoreCommitFailedError, StoreUnavailableError, KazooException):  # the last: of the plain read
                continue
            except StoreCommitUnknownError:
                self.unknown += 1
                self._resolve(number)
            else:
                self.committed += 1

    def _write(self, number: int) -> None:
        transaction = self._store.begin(self._claim)
        data, stat = transaction.handle.get(self.counter)
        transaction.handle.set_data(self.counter, str(int(data) + 1).encode(), stat.version)
        transaction.record(STATE, generation=0, transaction_number=number)
        transaction.commit()

    def _resolve(self, number: int) -> None:
        claim = self._claim
        self._claim = self._store.claim(claim.transactional_id, "storm", timeout=LIMIT, expected_fence=claim.fence)
        while True:
            try:
                self.committed += self._store.read_claimed(self._claim).transaction_number == number
            except StoreUnavailableError:
                continue
            return


@contextmanager
def storm(proxy: TcpProxy) -> Iterator[None]:
    """Break connections at random within the block."""
    over = threading.Event()

    def break_connections() -> None:
        choice = random.Random(5)
        while not over.wait(choice.uniform(0.01, 0.1)):
            choice.choice(FAULTS)(proxy)
            over.wait(0.03)
            proxy.clear()  # else they accumulate, and hit every request of a writer that pauses between its attempts

    breaking = threading.Thread(target=break_connections)
    breaking.start()
    try:
        yield
    finally:
        over.set()
        breaking.join()
        proxy.clear()


@pytest.mark.soak
def test_connections_that_break_at_random(
    zookeeper_server: ZooKeeperServer, proxy: TcpProxy, chroot: str, plain: KazooClient
) -> None:
    for number in range(WRITERS):
        plain.create(f"/counter-{number}", b"0")
    url = zookeeper_server.url_at(proxy.port, chroot)
    with ZooKeeperStore.from_url(url, session_timeout=SHORT_SESSION) as store:
        writers = [CountingWriter(store, number) for number in range(WRITERS)]
        with storm(proxy), ThreadPoolExecutor(WRITERS) as threads:
            list(threads.map(CountingWriter.run, writers))
    committed, unknown = (sum(getattr(writer, name) for writer in writers) for name in ("committed", "unknown"))
    print(f"{committed} of {WRITERS * TRANSACTIONS} committed, {unknown} unknown at first")  # noqa: T201  (seen with -s)
    assert [int(plain.get(writer.counter)[0]) for writer in writers] == [writer.committed for writer in writers]
    assert committed > 0
