"""A network between clients and servers: a proxy process that delays each direction by half a round trip.

`Network` puts it in front of a database and a broker. The proxy is `delay.c`, compiled by `cc` at its first use: Linux only. It
counts from when the kernel received the bytes, keeps their order, limits no rate, and forwards ends and resets. A new
connection takes a round trip before its client can send.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, Final

from sqlalchemy import make_url

from dualwrite.devcluster.locations import cache_dir, make_cache_directory

_SOURCE: Final = Path(__file__).with_name("delay.c")
_BACKLOG: Final = 512
_PATIENCE: Final = 10.0
_NANO: Final = 1e9


@dataclass
class Counts:
    """What has passed to a server and back.

    An exchange is a client's sending something first or after an answer: a round trip that it waited for. `sent` and `received`
    are bytes; `late` is by how many nanoseconds the `delivered` writes were later than due, in total.
    """

    connections: int = 0
    exchanges: int = 0
    sent: int = 0
    received: int = 0
    delivered: int = 0
    late: int = 0

    def since(self, before: Counts) -> Counts:
        return Counts(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


class DelayProxy:
    """Forwards connections from ports on loopback to servers, in a process of its own; `description` is for reports."""

    def __init__(self) -> None:
        self._program = _compiled()
        self.description = "compiled"
        self._listeners: dict[int, socket.socket] = {}
        self._ports: list[int] = []
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def reserve(self) -> int:
        """A new port, which accepts connections once its server is known."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        port: int = listener.getsockname()[1]
        self._listeners[port] = listener
        return port

    @contextmanager
    def forwarding(self, servers: Mapping[int, tuple[str, int]]) -> Iterator[None]:
        """Forward to these servers, each given by its reserved port, inside the block; without a delay at first."""
        given: list[str] = []
        for port, (host, its_port) in servers.items():
            given += [str(self._listeners[port].fileno()), socket.gethostbyname(host), str(its_port)]
        self._ports = list(servers)
        descriptors = [self._listeners[port].fileno() for port in servers]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        with subprocess.Popen([self._program, *given], pass_fds=descriptors, **pipes) as process:  # noqa: S603  (our own)
            self._process = process
            for listener in self._listeners.values():
                listener.close()
            self._listeners.clear()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                if "first" in process.stdout.readline():
                    self.description += ", before other processes (SCHED_FIFO)"
                yield
            finally:
                self._process = None
                with suppress(OSError):
                    process.stdin.close()
                try:
                    process.wait(_PATIENCE)
                except subprocess.TimeoutExpired:
                    process.kill()

    def set_round_trip(self, seconds: float) -> None:
        """Delay what is sent from now on by half of this, in each direction."""
        self._ask(f"delay {round(seconds / 2 * _NANO)}")

    def counts(self) -> dict[int, Counts]:
        """What has passed, by the reserved port."""
        numbers = [int(text) for text in self._ask("counts").split()]
        size = len(fields(Counts))
        return {port: Counts(*numbers[size * place : size * (place + 1)]) for place, port in enumerate(self._ports)}

    def _ask(self, command: str) -> str:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise RuntimeError("the proxy is not running")
        with self._lock:
            process.stdin.write(f"{command}\n")
            answer = process.stdout.readline()
        if not answer:
            raise RuntimeError("the proxy has ended")
        return answer


def _compiled() -> str:
    """The program, compiled at its first use."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if sys.platform != "linux" or compiler is None:
        raise SystemExit(
            "a network needs Linux and a C compiler (cc, or the variable CC): install one, or measure without --rtt"
        )
    folder = cache_dir() / "benchmarks"
    program = folder / f"delay-{hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]}"
    if not program.exists():
        make_cache_directory(folder)
        partial = program.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, "-O2", "-o", str(partial), str(_SOURCE)], check=True)  # noqa: S603  (found on PATH)
        partial.replace(program)
    return str(program)


class Network:
    """The way to a database and a broker through the proxy; the broker has to tell its clients `kafka_port`."""

    def __init__(self) -> None:
        self.proxy = DelayProxy()
        self.kafka_port = self.proxy.reserve()
        self._database_port = self.proxy.reserve()
        self.url = ""
        self.kafka: Mapping[str, Any] = {}

    @contextmanager
    def to(self, url: str, broker: str, settings: Mapping[str, Any]) -> Iterator[None]:
        """Forward to a database and to a broker's listener for the proxy, inside the block."""
        there = make_url(url)
        self.url = there.set(host="127.0.0.1", port=self._database_port).render_as_string(hide_password=False)
        self.kafka = {**settings, "bootstrap.servers": f"127.0.0.1:{self.kafka_port}"}
        host, _, port = broker.partition(":")
        database = (there.host or "127.0.0.1", there.port or 5432)
        with self.proxy.forwarding({self._database_port: database, self.kafka_port: (host, int(port))}):
            yield

    def passed(self) -> tuple[Counts, Counts]:
        """What has passed until now, to and from the database, and the broker."""
        counts = self.proxy.counts()
        return counts[self._database_port], counts[self.kafka_port]

    def lateness(self, before: tuple[Counts, Counts]) -> float:
        """By how many seconds the proxy wrote later than asked since then, in the mean."""
        both = [now.since(then) for now, then in zip(self.passed(), before, strict=True)]
        return sum(each.late for each in both) / _NANO / max(1, sum(each.delivered for each in both))
