"""The proxy that breaks connections in tests."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from dualwrite.testing.postgres import PostgresServer
from dualwrite.testing.proxy import Link, TcpProxy

Proxied = tuple[TcpProxy, socket.socket, socket.socket]


@pytest.fixture
def proxied() -> Iterator[Proxied]:
    """A proxy, and the two ends of a connection through it: the client's and the server's."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        TcpProxy("127.0.0.1", listener.getsockname()[1]) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port)) as client,
    ):
        server, _ = listener.accept()
        with server:
            yield proxy, client, server


def conninfo(url: str) -> str:
    return url.replace("+psycopg", "")


def test_the_proxy_forwards_and_cuts(postgres_server: PostgresServer, postgres_proxy: TcpProxy) -> None:
    with psycopg.connect(conninfo(postgres_server.url_at(postgres_proxy.port)), autocommit=True) as connection:
        size = connection.execute("SELECT length(%s)", ("x" * 1_000_000,)).fetchone()
        assert size == (1_000_000,)
        postgres_proxy.cut()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    psycopg.connect(conninfo(postgres_server.url_at(postgres_proxy.port))).close()


def test_the_proxy_resets(proxied: Proxied) -> None:
    proxy, client, server = proxied
    proxy.on_client_bytes(b"SELECT 42", lambda link: link.cut_with_reset())
    client.sendall(b"SELECT ")
    assert server.recv(100) == b"SELECT "
    client.sendall(b"42")
    for side in (client, server):
        with pytest.raises(ConnectionResetError):
            side.recv(100)


def test_an_answer_does_not_overtake_the_action_after_its_request(proxied: Proxied) -> None:
    proxy, client, server = proxied
    arrived: list[socket.socket] = []

    def answer_then_cut(link: Link) -> None:
        assert server.recv(100) == b"SELECT 42"
        server.sendall(b"42")
        arrived.extend(select.select([client], [], [], 0.2)[0])
        link.cut()

    proxy.on_client_bytes(b"SELECT 42", answer_then_cut, when="after")
    client.sendall(b"SELECT 42")
    assert client.recv(100) == b""
    assert not arrived


def test_the_other_answers_pass_again_after_the_action(proxied: Proxied) -> None:
    proxy, client, server = proxied
    proxy.on_client_bytes(b"SELECT 42", lambda _: server.sendall(b"42"), when="after")
    client.sendall(b"SELECT 42")
    assert client.recv(100) == b"42"


@pytest.mark.parametrize("direction", ["client_to_server", "server_to_client", None])
def test_the_proxy_goes_silent(postgres_server: PostgresServer, postgres_proxy: TcpProxy, direction: Any) -> None:
    url = conninfo(postgres_server.url_at(postgres_proxy.port))
    with contextlib.closing(psycopg.connect(url, autocommit=True)) as connection:
        postgres_proxy.on_client_bytes(b"SELECT 42", lambda link: link.blackhole(direction))
        with pytest.raises(TimeoutError):
            _within(0.5, connection)
        postgres_proxy.cut()


def _within(seconds: float, connection: psycopg.Connection) -> None:
    def alarm(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        connection.execute("SELECT 42")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
