"""What `delay.c` does, in Python, for machines without a C compiler or without Linux: the delays are less exact.

The arguments and commands are those of `delay.c`. Bytes are delayed from when this process has read them.
"""

from __future__ import annotations

import heapq
import itertools
import select
import selectors
import socket
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from typing import Any, Final

from counts import NANO, Counts

_READ_SIZE: Final = 256 * 1024
_SELECTED: Final = 1e-3
"""Shorter waits use select, whose timeout has microseconds; epoll's has milliseconds."""
_RESET_AT_CLOSE: Final = struct.pack("ii", 1, 0)

_END: Final = b""
_RESET: Final = None


@dataclass
class _Forward:
    listener: socket.socket
    server: tuple[str, int]
    passed: Counts = field(default_factory=Counts)


@dataclass
class _Direction:
    """Bytes are read from `source`, and written to the opposite direction's; see `delay.c`."""

    source: socket.socket
    forward: _Forward
    is_clients: bool
    earliest: float
    opposite: _Direction = field(init=False, repr=False)
    chunks: deque[tuple[float, bytes | None]] = field(default_factory=deque)
    last_due: float = 0.0
    spoke_last: bool = False
    read_all: bool = False
    written_all: bool = False
    blocked: bool = False
    closed: bool = False


class DelayLoop:
    """Accepts, reads, and writes what is due.

    Args:
        forwards: Where to forward connections to.
    """

    def __init__(self, forwards: list[_Forward]) -> None:
        self._forwards = forwards
        self._selector = selectors.DefaultSelector()
        self._heap: list[tuple[float, int, _Direction]] = []
        self._number = itertools.count()
        self._delay = 0.0
        for forward in forwards:
            forward.listener.setblocking(False)
            self._selector.register(forward.listener, selectors.EVENT_READ, forward)
        self._selector.register(sys.stdin, selectors.EVENT_READ)

    def run(self) -> None:
        """Until stdin ends."""
        while True:
            for key, events in self._selector.select(self._time_left()):
                if isinstance(key.data, _Forward):
                    self._accept(key.data)
                elif isinstance(key.data, _Direction):
                    self._handle(key.data, events)
                elif not self._obey(sys.stdin.readline()):
                    return
            now = time.monotonic()
            while self._heap and self._heap[0][0] <= now:
                self._deliver(heapq.heappop(self._heap)[2], now)

    def _time_left(self) -> float | None:
        """The timeout for the selector, after having waited for the part that is too short for it."""
        if not self._heap:
            return None
        left = self._heap[0][0] - time.monotonic()
        if left > _SELECTED:
            return left - _SELECTED
        if left > 0:
            select.select([self._selector], [], [], left)
        return 0.0

    def _obey(self, line: str) -> bool:
        command, _, argument = line.strip().partition(" ")
        if command == "delay":
            self._delay = int(argument) / NANO
            print("ok", flush=True)
        elif command == "counts":
            print(*(number for one in self._forwards for number in astuple(one.passed)), flush=True)
        return bool(line)

    def _accept(self, forward: _Forward) -> None:
        with suppress(BlockingIOError, ConnectionAbortedError):
            client, _ = forward.listener.accept()
            now = time.monotonic()
            server = socket.socket()
            forward.passed.connections += 1
            up = _Direction(client, forward, is_clients=True, earliest=now + 2 * self._delay)
            down = _Direction(server, forward, is_clients=False, earliest=now + 3 * self._delay)
            up.opposite, down.opposite = down, up
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                end.setblocking(False)
            with suppress(BlockingIOError, ConnectionError):  # a failure is reported to the first read
                server.connect(forward.server)
            for one in (up, down):
                self._watch(one)

    def _watch(self, one: _Direction) -> None:
        wanted = (0 if one.read_all else selectors.EVENT_READ) | (selectors.EVENT_WRITE if one.opposite.blocked else 0)
        known: Any = self._selector.get_map().get(one.source)
        if known is None:
            if wanted:
                self._selector.register(one.source, wanted, one)
        elif not wanted:
            self._selector.unregister(one.source)
        elif wanted != known.events:
            self._selector.modify(one.source, wanted, one)

    def _handle(self, one: _Direction, events: int) -> None:
        if one.closed:  # by an event of the same wake-up
            return
        if events & selectors.EVENT_WRITE and one.opposite.blocked:
            one.opposite.blocked = False
            self._watch(one)
            self._schedule(one.opposite)
        if events & selectors.EVENT_READ and not one.read_all:
            self._receive(one)

    def _receive(self, one: _Direction) -> None:
        try:
            read = one.source.recv(_READ_SIZE)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._end_reading(one, _RESET)
            return
        if not read:
            self._end_reading(one, _END)
            return
        self._enqueue(one, read)
        passed = one.forward.passed
        if one.is_clients:
            passed.sent += len(read)
            passed.exchanges += not one.spoke_last
        else:
            passed.received += len(read)
        one.spoke_last, one.opposite.spoke_last = True, False

    def _end_reading(self, one: _Direction, how: bytes | None) -> None:
        one.read_all = True
        self._watch(one)
        self._enqueue(one, how)

    def _enqueue(self, one: _Direction, what: bytes | None) -> None:
        one.last_due = max(one.last_due, max(time.monotonic(), one.earliest) + self._delay)
        one.chunks.append((one.last_due, what))
        if len(one.chunks) == 1 and not one.blocked:
            self._schedule(one)

    def _schedule(self, one: _Direction) -> None:
        if one.chunks:
            heapq.heappush(self._heap, (one.chunks[0][0], next(self._number), one))

    def _deliver(self, one: _Direction, now: float) -> None:
        target = one.opposite.source
        while not one.closed and one.chunks and one.chunks[0][0] <= now:
            due, what = one.chunks.popleft()
            if what is _RESET:
                target.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
                self._close(one)
            elif what == _END:
                with suppress(OSError):
                    target.shutdown(socket.SHUT_WR)
                one.written_all = True
            elif what:
                try:
                    done = target.send(what)
                except (BlockingIOError, InterruptedError):
                    done = 0
                except OSError:  # reset by the receiver: the sender hears of it after the delay
                    one.chunks.clear()
                    one.read_all = True
                    self._watch(one)
                    self._end_reading(one.opposite, _RESET)
                    return
                one.forward.passed.delivered += 1
                one.forward.passed.late += int((time.monotonic() - due) * NANO)
                if done < len(what):
                    one.chunks.appendleft((due, what[done:]))
                    one.blocked = True
                    self._watch(one.opposite)
                    return
        if one.closed:
            return
        if one.written_all and one.opposite.written_all:
            self._close(one)
        else:
            self._schedule(one)

    def _close(self, one: _Direction) -> None:
        for each in (one, one.opposite):
            each.closed = True
            each.chunks.clear()
            with suppress(KeyError):
                self._selector.unregister(each.source)
            each.source.close()


def main() -> None:
    """Forward until stdin ends; the arguments are those of `delay.c`."""
    given = sys.argv[1:]
    forwards = [
        _Forward(socket.socket(fileno=int(given[at])), (given[at + 1], int(given[at + 2]))) for at in range(0, len(given), 3)
    ]
    loop = DelayLoop(forwards)
    print("ready", flush=True)
    loop.run()


if __name__ == "__main__":
    main()
