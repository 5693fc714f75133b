"""The kazoo client behind a store: started when it is needed, waited for with a limit, and asked with a limit.

What kazoo 2.11 does with a broken connection decides what may be done here (kazoo/client.py, protocol/connection.py):

- A request whose answer is awaited when the connection breaks fails with ConnectionLoss (`_notify_pending`), as does one that
  was not sent yet. It is never sent again by itself.
- A request made while kazoo is connecting is queued, and sent once it is connected again, be that minutes later, or fails
  with SessionExpiredError when the session turns out expired. So nothing is asked here before kazoo says that it is connected.
  The connection may still break in the moment between: what then waits in the queue, or in the network on its way to a
  server that we have left, may reach a server after we have given up. Every write of ours is conditional on the version of
  the node for this reason.
- Requests of one client are sent in the order in which they were made, also from the queue.
- An expired session is replaced by a new one without our doing. After failed authentication kazoo's loop ends.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException, NoAuthError, NodeExistsError, NoNodeError, WriterNotClosedException
from kazoo.protocol.serialization import Create
from kazoo.protocol.states import KazooState, KeeperState
from kazoo.security import ACL, OPEN_ACL_UNSAFE

from dualwrite.errors import StoreError, UsageError

_ENDED: Final = frozenset({KeeperState.AUTH_FAILED, KeeperState.CLOSED})
_LOOK: Final = 0.1
_PROBE_TIMEOUT: Final = 0.5
_PROBED_HOSTS: Final = 3


class NotSentError(KazooException):  # type: ignore[misc]  # kazoo carries no types
    """There was no connection, so that nothing was sent."""


class NoAnswerError(KazooException):  # type: ignore[misc]  # as above
    """It was sent, or may have been, and nothing came back in time."""


class ZooKeeperConnection:
    """A kazoo client, and how long to wait for it.

    Args:
        client: The client; started here at the first use if it does not run.
        owns_client: Whether `close` stops it.
        connect_timeout: Seconds to wait for a connection.
        request_timeout: Seconds to wait for an answer.
        acl: For the nodes that we make; None: the client's default, or else open to everybody.

    Attributes:
        client: The client.
        acl: What the nodes that we make get.
    """

    def __init__(
        self,
        client: KazooClient,
        *,
        owns_client: bool,
        connect_timeout: float,
        request_timeout: float,
        acl: Sequence[ACL] | None,
    ) -> None:
        self.client = client
        self._owns_client = owns_client
        self._connect_timeout = connect_timeout
        self._request_timeout = request_timeout
        self.acl = list(acl) if acl else client.default_acl or OPEN_ACL_UNSAFE
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._has_chroot = not client.chroot
        self._was_running = False
        self._ended_by: KeeperState | None = None
        self._closed = False
        self._connected = client.handler.event_object()
        client.add_listener(self._state_changed)
        if client.connected:
            self._connected.set()

    @property
    def address(self) -> str:
        """The servers and the chroot, for people; without credentials."""
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.client.hosts)
        return f"zookeeper://{hosts}{self.client.chroot}"

    # --- asking -----------------------------------------------------------------------------------------------------------

    def ask(self, send: Callable[[KazooClient], Any], *, deadline: float | None = None) -> Any:
        """Send one request and wait for its answer.

        Args:
            send: Calls one of the client's `…_async` methods, or several (a list of their results), which are sent at once.
            deadline: By time.monotonic(): wait no longer, neither for the connection nor for the answer.

        Raises:
            NotSentError: There was no connection in time.
            NoAnswerError: There was no answer in time.
            KazooException: What the server answered, or what became of the connection.
            UsageError: The store is closed, or was made in another process; the client was stopped by its owner.
            StoreError: The chroot is missing and can't be made.
        """
        self.wait_until_connected(deadline)
        if not self._has_chroot:
            self._make_chroot(deadline)
        return self._asked(send, deadline)

    def _asked(self, send: Callable[[KazooClient], Any], deadline: float | None) -> Any:
        limit = _earlier(time.monotonic() + self._request_timeout, deadline)
        result = send(self.client)
        if isinstance(result, list):
            return [self._answer(each, limit) for each in result]
        return self._answer(result, limit)

    def _answer(self, result: Any, limit: float) -> Any:
        try:
            return result.get(timeout=max(0.0, limit - time.monotonic()))
        except self.client.handler.timeout_exception as error:
            raise NoAnswerError("the server did not answer in time") from error

    # --- being connected --------------------------------------------------------------------------------------------------

    def wait_until_connected(self, deadline: float | None = None) -> None:
        """Start the client if it does not run, and wait until it is connected; see `ask` for the errors."""
        self._check_usable()
        if self.client.connected:
            self._was_running = True
            return
        self._start()
        limit = _earlier(time.monotonic() + self._connect_timeout, deadline)
        while not self.client.connected:
            left = limit - time.monotonic()
            if self._ended_by is not None or left <= 0:
                raise NotSentError(self._why_not_connected())
            self._connected.wait(min(left, _LOOK))

    def _start(self) -> None:
        with self._lock:
            self._check_usable()
            client = self.client
            if client.handler.running and self._ended_by is None:
                self._was_running = True
                return  # kazoo is at it
            if not client.handler.running and self._was_running and not self._owns_client:
                raise UsageError("The KazooClient of this store was stopped.", next_step="start it again, or make a new store")
            self._ended_by = None
            self._was_running = True
            client.start_async()

    def _state_changed(self, state: str) -> None:
        """Called in kazoo's own thread."""
        if state == KazooState.CONNECTED:
            self._ended_by = None
            self._connected.set()
            return
        self._connected.clear()
        how = self.client.client_state
        if state == KazooState.LOST and how in _ENDED:
            self._ended_by = how

    def _why_not_connected(self) -> str:
        if self._ended_by == KeeperState.AUTH_FAILED:
            return "authentication failed"
        if self._ended_by is not None:
            return "kazoo's connection ended; its log has the reason"
        found = [_probed(host, port) for host, port in self.client.hosts[:_PROBED_HOSTS]]
        return f"no connection in time: {'; '.join(found)}"

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                f"The store for {self.address} was made in process {self._pid} and used in {os.getpid()}: a connection to "
                "ZooKeeper does not survive a fork.",
                next_step="make a store in each process, after the fork",
            )
        if self._closed:
            raise UsageError(f"The store for {self.address} is closed.", next_step="make a new one")

    # --- chroot -----------------------------------------------------------------------------------------------------------

    def _make_chroot(self, deadline: float | None) -> None:
        """Make the nodes of the chroot that are missing; kazoo has no call for what lies above a client's chroot."""
        if self._asked(lambda client: client.exists_async("/"), deadline) is None:
            names = self.client.chroot.strip("/").split("/")
            paths = ["/" + "/".join(names[: count + 1]) for count in range(len(names))]
            try:
                self._make_deepest(paths, deadline)
            except NoAuthError as error:
                raise StoreError(
                    f"The chroot of {self.address} is missing, and we are not permitted to make it.",
                    cause=f"{type(error).__name__}: CREATE on its parent is needed",
                    next_step=f"make it in ZooKeeper's shell (zkCli.sh): {'; '.join(f'create {path}' for path in paths)}",
                ) from error
        self._has_chroot = True

    def _make_deepest(self, paths: list[str], deadline: float | None) -> None:
        try:
            self._make_absolute(paths[-1], deadline)
        except NoNodeError:
            self._make_deepest(paths[:-1], deadline)
            self._make_absolute(paths[-1], deadline)

    def _make_absolute(self, path: str, deadline: float | None) -> None:
        request = self.client.transaction()
        request.operations.append(Create(path, b"", self.acl, 0))  # its own `create` would put the chroot in front
        (result,) = self._asked(lambda _: request.commit_async(), deadline)
        if isinstance(result, Exception) and not isinstance(result, NodeExistsError):
            raise result

    # --- the end ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the client if it is ours; a client of the user's goes on. May be called more than once."""
        if self._closed or os.getpid() != self._pid:  # kazoo's threads are the parent's
            return
        with self._lock:  # nobody starts it any more
            self._closed = True
        self.client.remove_listener(self._state_changed)
        if self._owns_client:
            with suppress(WriterNotClosedException, OSError, AttributeError):  # the last two: it was never started
                self.client.stop()
            with suppress(Exception):  # kazoo raises a bare one where its loop has not ended; it is a daemon thread
                self.client.close()


def _earlier(limit: float, deadline: float | None) -> float:
    return limit if deadline is None else min(limit, deadline)


def _probed(host: str, port: int) -> str:
    """What a plain connection to one server meets: kazoo keeps the reasons to its log."""
    name = f"{host}:{port}"
    try:
        socket.create_connection((host, port), timeout=_PROBE_TIMEOUT).close()
    except socket.gaierror as error:
        return f"the name {host!r} can't be resolved ({error.strerror})"
    except OSError as error:
        return f"{name}: {error.strerror or error}"
    return f"{name} takes connections, but gave no session (TLS on one side only, no quorum, or no ZooKeeper)"
