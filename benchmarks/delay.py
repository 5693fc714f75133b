"""A proxy process that delays what passes in each direction by half a round trip, as a network does; and what it adds itself.

::

    proxy = DelayProxy()
    port = proxy.reserve()                      # clients connect to this port
    with proxy.forwarding({port: ("127.0.0.1", 5432)}):
        proxy.set_round_trip(0.001)

It counts from when the kernel received the bytes, keeps their order, limits no rate, and forwards ends and resets. A new
connection takes a round trip before its client can send. `python benchmarks/delay.py --rtt 0,0.5,1` measures what is added.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import selectors
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from agents import Agent
from counts import NANO, Counts
from dualwrite.devcluster.locations import cache_dir, make_cache_directory
from figures import Latency
from options import round_trips
from tables import table

_SOURCE: Final = Path(__file__).with_name("delay.c")
_SLOW: Final = Path(__file__).with_name("delay_slow.py")
_BACKLOG: Final = 512
_PATIENCE: Final = 10.0
_MILLI: Final = 1e3
_AT_ONCE: Final = 32
_PINGS: Final = 1000
_MOST_SECONDS: Final = 0.3
_PING: Final = b"x" * 64


class DelayProxy:
    """Forwards connections from ports on loopback to servers, in a process of its own.

    Args:
        compiled: Whether to use the compiled program if possible, rather than the one in Python.

    Attributes:
        description: Which program it is, and whether it runs before other processes, for reports.
    """

    def __init__(self, *, compiled: bool = True) -> None:
        self._program, self.description = _program() if compiled else _in_python("as asked")
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
        with subprocess.Popen(  # noqa: S603  (our own program)
            [*self._program, *given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, pass_fds=descriptors
        ) as process:
            self._process = process
            for listener in self._listeners.values():
                listener.close()
            self._listeners.clear()
            try:
                assert process.stdout is not None
                if "first" in process.stdout.readline():
                    self.description += ", before other processes (SCHED_FIFO)"
                yield
            finally:
                self._process = None
                assert process.stdin is not None
                with suppress(OSError):
                    process.stdin.close()
                try:
                    process.wait(_PATIENCE)
                except subprocess.TimeoutExpired:
                    process.kill()

    def set_round_trip(self, seconds: float) -> None:
        """Delay what is sent from now on by half of this, in each direction."""
        self._ask(f"delay {round(seconds / 2 * NANO)}")

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


def _program() -> tuple[list[str], str]:
    """The command that runs the proxy, compiled at its first use, and what it is."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if sys.platform != "linux" or compiler is None:
        return _in_python("not on Linux" if sys.platform != "linux" else "there is no C compiler")
    folder = cache_dir() / "benchmarks"
    program = folder / f"delay-{hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]}"
    if not program.exists():
        make_cache_directory(folder)
        partial = program.with_suffix(f".{os.getpid()}")
        command = [compiler, "-O2", "-o", str(partial), str(_SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  (the command above)
        if done.returncode:
            return _in_python(f"{compiler} failed: {done.stderr.strip().splitlines()[-1:]}")
        partial.replace(program)
    return [str(program)], "compiled"


def _in_python(why: str) -> tuple[list[str], str]:
    return [sys.executable, "-S", str(_SLOW)], f"in Python, {why}"


# --- what it adds -------------------------------------------------------------------------------------------------------------


class Echo:
    """A server that sends back what it receives, in its own process."""

    def listen(self) -> int:
        """Start, and return the port."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        threading.Thread(target=self._serve, args=(listener,), daemon=True).start()
        port: int = listener.getsockname()[1]
        return port

    def _serve(self, listener: socket.socket) -> None:
        selector = selectors.DefaultSelector()
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is listener:
                    client, _ = listener.accept()
                    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    selector.register(client, selectors.EVENT_READ, client)
                    continue
                received = key.data.recv(len(_PING))
                if received:
                    key.data.sendall(received)
                else:
                    selector.unregister(key.data)
                    key.data.close()


@dataclass(frozen=True)
class Added:
    """The duration of pings, in seconds.

    Args:
        asked: The round trip that was asked for; None without the proxy.
        lone: Of a lone ping.
        together: Of each of 32 pings that are sent at the same time, on as many connections.
    """

    asked: float | None
    lone: Latency
    together: Latency


def what_is_added(round_trips: Sequence[float], *, compiled: bool = True) -> tuple[list[Added], str]:
    """Measure pings without the proxy and with it, at each round trip; also returns what the proxy is."""
    echo, proxy = Agent(Echo), DelayProxy(compiled=compiled)
    try:
        server, port = echo.call("listen"), proxy.reserve()
        found = [_measured(None, server)]
        with proxy.forwarding({port: ("127.0.0.1", server)}):
            for each in round_trips:
                proxy.set_round_trip(each)
                found.append(_measured(each, port))
        return found, proxy.description
    finally:
        echo.stop()


def _measured(asked: float | None, port: int) -> Added:
    number = min(_PINGS, int(_MOST_SECONDS / (asked or 1e-4)))
    with ExitStack() as opened:
        ends = [opened.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(_AT_ONCE)]
        for end in ends:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pings(ends, 3)
        return Added(asked, Latency.of(pings(ends[:1], number)), Latency.of(pings(ends, max(1, number // 8))))


def pings(ends: Sequence[socket.socket], number: int) -> list[float]:
    """Send a ping on every connection and wait for all answers, some times; the duration of each."""
    found = []
    with selectors.DefaultSelector() as selector:
        for end in ends:
            selector.register(end, selectors.EVENT_READ, end)
        for _ in range(number):
            began = {}
            for end in ends:
                began[end] = time.perf_counter()
                end.sendall(_PING)
            while began:
                for key, _ in selector.select():
                    key.data.recv(len(_PING))
                    found.append(time.perf_counter() - began.pop(key.data))
    return found


def added_table(found: Sequence[Added]) -> str:
    """What pings take, and how much more than asked, as Markdown."""
    lines = [
        [
            "without the proxy" if each.asked is None else f"{each.asked * _MILLI:g}",
            *(
                text
                for latency in (each.lone, each.together)
                for text in (_milliseconds(latency.p50), _more(latency.p50, each.asked), _milliseconds(latency.p99))
            ),
        ]
        for each in found
    ]
    at_once = f"{_AT_ONCE} at once"
    head = ["RTT ms", "lone ping p50 ms", "more than asked", "p99", f"{at_once} p50 ms", "more than asked", "p99"]
    return table(head, lines, names=1)


def _milliseconds(seconds: float | None) -> str:
    return f"{(seconds or 0.0) * _MILLI:.3f}"


def _more(seconds: float | None, asked: float | None) -> str:
    return _milliseconds((seconds or 0.0) - (asked or 0.0))


def main() -> None:
    """Measure and print what the proxy adds."""
    parser = argparse.ArgumentParser(description="What the delay proxy adds to a round trip, with an echo server.")
    parser.add_argument("--rtt", type=round_trips, default=[0.0, 0.0002, 0.0005, 0.001, 0.002], help="in milliseconds")
    parser.add_argument("--python", action="store_true", help="measure the proxy in Python, which is for machines without cc")
    chosen = parser.parse_args()
    found, what = what_is_added(chosen.rtt, compiled=not chosen.python)
    print(f"The proxy: {what}.\n\n{added_table(found)}")


if __name__ == "__main__":
    main()
