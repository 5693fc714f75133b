"""A TCP proxy that breaks connections on purpose: cuts, resets or silences them, at once or when certain bytes pass.

::

    with TcpProxy("127.0.0.1", server.port) as proxy:
        proxy.on_client_bytes(b"COMMIT", lambda link: link.cut())   # COMMIT never reaches the server
        ...
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Literal, Self

_CHUNK: Final = 65536
_LINGER_ZERO: Final = struct.pack("ii", 1, 0)

Direction = Literal["client_to_server", "server_to_client"]
When = Literal["before", "after", "answered"]
Action = Callable[["Link"], None]


@dataclass
class _Hook:
    pattern: bytes
    when: When
    action: Action
    times: int
    waiting_for_answer: set[Link] = field(default_factory=set)


class Link:
    """One client's connection through the proxy.

    Args:
        client: The socket to the client.
        server: The socket to the server.
        proxy: The proxy that it belongs to.
    """

    def __init__(self, client: socket.socket, server: socket.socket, proxy: TcpProxy) -> None:
        self._client = client
        self._server = server
        self._proxy = proxy
        self._open = threading.Event()
        self._flowing = {"client_to_server": threading.Event(), "server_to_client": threading.Event()}
        for event in (self._open, *self._flowing.values()):
            event.set()
        # Clear while a hook acts on what was just forwarded, so that the server's answer to it can't overtake the action.
        self._answers_may_pass = threading.Event()
        self._answers_may_pass.set()
        self._has_answered = True

    def cut(self) -> None:
        """Close both sides."""
        self._open.clear()
        for event in self._flowing.values():
            event.set()  # a silent direction wakes up and finds the link closed
        for side in (self._client, self._server):
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    def cut_with_reset(self) -> None:
        """Reset both sides (RST instead of FIN)."""
        for side in (self._client, self._server):
            with suppress(OSError):
                side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
        self._open.clear()
        for event in self._flowing.values():
            event.set()
        for side in (self._client, self._server):
            # close, not shutdown: with SO_LINGER 0 it is close that sends RST; a thread blocked in recv is woken by shutdown
            with suppress(OSError):
                side.shutdown(socket.SHUT_RD)
            side.close()

    def blackhole(self, direction: Direction | None = None) -> None:
        """Stop forwarding in one direction or in both, while the connection stays open."""
        for name, event in self._flowing.items():
            if direction in (None, name):
                event.clear()

    def resume(self) -> None:
        """Forward again what was held back, and all that follows."""
        for event in self._flowing.values():
            event.set()

    # --- inside: one thread for each direction ----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to forward; called by the proxy."""
        for direction in ("client_to_server", "server_to_client"):
            thread = threading.Thread(target=self._pump, args=(direction,), name=f"proxy {direction}", daemon=True)
            self._proxy.threads.append(thread)
            thread.start()

    def _pump(self, direction: Direction) -> None:
        source, target = self._client, self._server
        if direction == "server_to_client":
            source, target = target, source
        seen, hooks = b"", 0
        with suppress(OSError):
            while self._open.is_set():
                chunk = source.recv(_CHUNK)
                if not chunk:
                    break
                if direction == "client_to_server":
                    self._proxy.exchanges += self._has_answered
                    self._has_answered = False
                    # A pattern may be split over two chunks; a hook ignores what passed before it was set.
                    if hooks != self._proxy.hooks_set:
                        seen, hooks = b"", self._proxy.hooks_set
                    seen = seen[-self._proxy.longest_pattern :] + chunk
                    passed = self._proxy.matching(seen)
                    if passed:
                        seen = b""
                    self._act(passed, "before")
                    if any(hook.when == "after" for hook in passed):
                        self._flowing[direction].wait()  # here, so that silence towards the server does not delay answers
                        with self._holding_answers():
                            self._forward(chunk, direction, target)
                            self._act(passed, "after")
                    else:
                        self._forward(chunk, direction, target)
                else:
                    self._act(self._proxy.answered(self), "answered")
                    self._answers_may_pass.wait()
                    self._has_answered = True
                    self._forward(chunk, direction, target)
        if self._open.is_set():  # else it was cut already, and a shutdown here would turn an RST into a FIN
            self.cut()
        source.close()

    def _forward(self, chunk: bytes, direction: Direction, target: socket.socket) -> None:
        self._flowing[direction].wait()
        if self._open.is_set():
            target.sendall(chunk)

    @contextmanager
    def _holding_answers(self) -> Iterator[None]:
        self._answers_may_pass.clear()
        try:
            yield
        finally:
            self._answers_may_pass.set()

    def _act(self, hooks: list[_Hook], when: When) -> None:
        for hook in hooks:
            if hook.when == when:
                hook.action(self)
            elif when == "before" and hook.when == "answered":
                hook.waiting_for_answer.add(self)


class TcpProxy:
    """Forwards connections to one server; as a context manager it listens inside the block.

    Args:
        host: The server's host.
        port: The server's port.

    Attributes:
        port: The port on which the proxy listens, on the loopback interface.
        exchanges: How many times a client has sent something after an answer, or first: the round trips, if it waits for all.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._hooks: list[_Hook] = []
        self._links: list[Link] = []
        self._lock = threading.Lock()
        self._refusing = False
        self._listener: socket.socket | None = None
        self.threads: list[threading.Thread] = []
        self.hooks_set = 0
        self.exchanges = 0
        self.port = 0

    # --- faults -----------------------------------------------------------------------------------------------------------

    def on_client_bytes(self, pattern: bytes, action: Action, *, when: When = "before", times: int = 1) -> None:
        """Run an action when a client sends `pattern`.

        Args:
            pattern: What to look for in what the client sends.
            action: Called with the link, in a thread of the proxy.
            when: `before` the bytes are forwarded; `after` they were forwarded, while the server's answer is held back; or when
                the server has `answered`, before the answer is forwarded: the server has executed the request then, and the
                client does not know it.
            times: How many times the action runs.
        """
        with self._lock:
            self._hooks.append(_Hook(pattern, when, action, times))
            self.hooks_set += 1

    def clear(self) -> None:
        """Remove all hooks."""
        with self._lock:
            self._hooks.clear()

    def cut(self) -> None:
        """Close all connections; new ones are accepted."""
        for link in self._detach_links():
            link.cut()

    def cut_with_reset(self) -> None:
        """Reset all connections; new ones are accepted."""
        for link in self._detach_links():
            link.cut_with_reset()

    def blackhole(self, direction: Direction | None = None) -> None:
        """Stop forwarding on the current connections, which stay open; see `Link.blackhole`."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.blackhole(direction)

    def refuse(self, *, refusing: bool = True) -> None:
        """Close each new connection at once (or accept them again)."""
        self._refusing = refusing

    def redirect(self, host: str, port: int) -> None:
        """Forward new connections to another server, like a name that now resolves to another host."""
        self._target = (host, port)

    def _detach_links(self) -> list[Link]:
        with self._lock:
            links, self._links = self._links, []
        return links

    # --- lifecycle --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        accepting = threading.Thread(target=self._accept, args=(self._listener,), name="proxy accept", daemon=True)
        self.threads.append(accepting)
        accepting.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._listener is not None
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self.threads:
            thread.join(timeout=5)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:  # closed
                return
            if self._refusing:
                client.close()
                continue
            try:
                server = socket.create_connection(self._target, timeout=5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            for side in (client, server):
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = Link(client, server, self)
            with self._lock:
                self._links.append(link)
            link.start()

    # --- called by the links ----------------------------------------------------------------------------------------------

    @property
    def longest_pattern(self) -> int:
        """Length of the longest pattern of a hook."""
        with self._lock:
            return max((len(hook.pattern) for hook in self._hooks), default=1)

    def matching(self, data: bytes) -> list[_Hook]:
        """The hooks whose pattern is in `data`; each has then acted once more."""
        with self._lock:
            found = [hook for hook in self._hooks if hook.times > 0 and hook.pattern in data]
            for hook in found:
                hook.times -= 1
        return found

    def answered(self, link: Link) -> list[_Hook]:
        """The hooks that wait for the server's answer on this link; they stop waiting."""
        with self._lock:
            found = [hook for hook in self._hooks if link in hook.waiting_for_answer]
            for hook in found:
                hook.waiting_for_answer.discard(link)
        return found
