"""The benchmarks' delay proxy: it forwards bytes unaltered and not early, and ends too."""

import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from fixtures.pace import limit

Serve = Callable[[socket.socket], None]

ROUND_TRIP = 0.02
MUCH = 6_000_000
"""More than the sockets' buffers have room for."""


@pytest.fixture
def proxy(benchmark_module: Callable[[str], ModuleType]) -> Any:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    return benchmark_module("delay").DelayProxy()


@contextmanager
def through(proxy: Any, serve: Serve) -> Iterator[socket.socket]:
    """A connection through the proxy to a server that serves one client."""
    port = proxy.reserve()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)

        def accept() -> None:
            served, _ = listener.accept()
            with served:
                served.settimeout(limit(20))
                serve(served)

        server = threading.Thread(target=accept)
        server.start()
        with proxy.forwarding({port: listener.getsockname()}):
            proxy.set_round_trip(ROUND_TRIP)
            with socket.create_connection(("127.0.0.1", port), timeout=limit(20)) as client:
                yield client
            server.join(limit(20))
        assert not server.is_alive()


def read_all(end: socket.socket) -> bytes:
    return b"".join(iter(lambda: end.recv(65536), b""))


def echo(served: socket.socket) -> None:
    while received := served.recv(65536):
        served.sendall(received)


def test_bytes_arrive_in_order_and_an_end_of_one_direction_leaves_the_other_open(proxy: Any) -> None:
    sent = b"".join(number.to_bytes(4, "big") for number in range(MUCH // 4))

    def serve(served: socket.socket) -> None:
        time.sleep(5 * ROUND_TRIP)  # so that the proxy has to keep what there is no room for
        served.sendall(read_all(served))

    with through(proxy, serve) as client:
        for start in range(0, len(sent), 99_999):
            client.sendall(sent[start : start + 99_999])
        client.shutdown(socket.SHUT_WR)
        assert read_all(client) == sent


def test_nothing_is_faster_than_asked_and_a_connection_takes_a_round_trip_too(proxy: Any) -> None:
    began = time.monotonic()
    with through(proxy, echo) as client:
        for round_trips in (2, 3, 4):
            client.sendall(b"ping")
            assert client.recv(4) == b"ping"
            assert time.monotonic() - began >= round_trips * ROUND_TRIP
        (counts,) = proxy.counts().values()
        assert (counts.connections, counts.exchanges, counts.sent, counts.received) == (1, 3, 12, 12)
        proxy.set_round_trip(2 * ROUND_TRIP)
        changed = time.monotonic()
        client.sendall(b"ping")
        assert client.recv(4) == b"ping"
        assert time.monotonic() - changed >= 2 * ROUND_TRIP
        (later,) = proxy.counts().values()
        assert later.since(counts).exchanges == 1
