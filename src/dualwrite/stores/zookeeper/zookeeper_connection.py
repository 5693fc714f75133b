"""The kazoo client of a store, with a limit for connecting and for each response; and what its errors mean.

This module depends on what kazoo 2.11 does with a broken connection (kazoo/client.py, protocol/connection.py):

- If the connection breaks, requests that wait for a response fail with ConnectionLoss (`_notify_pending`), and so do those not
  sent yet. kazoo never sends them again.
- A request made while kazoo is connecting is queued, and sent once it is connected again, even minutes later; or it fails with
  SessionExpiredError if the session turns out to be expired. So no request is made here before kazoo is connected. The
  connection may still break right after that check: a request that is then in the queue, or in the network on its way to the
  old server, may reach a server after we have given up. This is why all our writes are conditional on the node's version.
- Requests of one client are sent in the order in which they were made, also from the queue.
- kazoo replaces an expired session by a new one. After failed authentication kazoo's loop ends.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any, Final

from kazoo.client import KazooClient
from kazoo.exceptions import (
    AuthFailedError,
    ConnectionDropped,
    ConnectionLoss,
    KazooException,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
    NotReadOnlyCallError,
    OperationTimeoutError,
    SASLException,
    SessionClosedRequireSaslError,
    SessionExpiredError,
    SessionMovedError,
    ThrottledOpError,
    UnknownSessionError,
    WriterNotClosedException,
)
from kazoo.protocol.serialization import Create
from kazoo.protocol.states import KazooState, KeeperState
from kazoo.security import ACL, OPEN_ACL_UNSAFE

from dualwrite import process
from dualwrite.deadline import Deadline
from dualwrite.errors import StoreError, StoreUnavailableError, UsageError
from dualwrite.stores.key_values import ROWS
from dualwrite.stores.zookeeper.paths import LEASES

_ENDED: Final = frozenset({KeeperState.AUTH_FAILED, KeeperState.CLOSED})
_POLL_INTERVAL: Final = 0.1
_PROBE_TIMEOUT: Final = 0.5
_PROBED_HOSTS: Final = 3
_CREDENTIALS: Final = "user:password in the URL, auth_data or sasl_options"


class NotSentError(KazooException):  # type: ignore[misc]  # kazoo carries no types
    """There was no connection, so nothing was sent."""


class NoAnswerError(KazooException):  # type: ignore[misc]  # as above
    """The request was or may have been sent, and no response came within the limit."""


class ZooKeeperConnection:
    """A kazoo client, and how long to wait for it.

    All limits are in seconds. Without an `acl`, the nodes that we create have the client's default, or are open to everyone.
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
        self._pid = process.pid
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
        """The servers and the chroot, for messages; without credentials."""
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.client.hosts)
        return f"zookeeper://{hosts}{self.client.chroot}"

    # --- requests ---------------------------------------------------------------------------------------------------------

    def request(
        self,
        send: Callable[[KazooClient], Any],
        *,
        deadline: Deadline | None = None,
        none_for: tuple[type[KazooException], ...] | type[KazooException] = (),
    ) -> Any:
        """Send one request and wait for its response.

        `send` calls one of the client's `…_async` methods, or several (a list of their results), which are sent at once. A
        result is None in place of an error of `none_for`.

        Raises:
            NotSentError: There was no connection within the limit.
            NoAnswerError: There was no response within the limit.
            KazooException: The server's error, or the connection's.
            UsageError: The store is closed, or was made in another process; or the client was stopped by its owner.
            StoreError: The chroot is missing and can't be created.
        """
        self.wait_until_connected(deadline)
        if not self._has_chroot:
            self._make_chroot(deadline)
        return self._send(send, deadline, none_for)

    def _send(
        self,
        send: Callable[[KazooClient], Any],
        deadline: Deadline | None,
        none_for: tuple[type[KazooException], ...] | type[KazooException] = (),
    ) -> Any:
        limit = _limit(self._request_timeout, deadline)
        result = send(self.client)
        if isinstance(result, list):
            return [self._answer(each, limit, none_for) for each in result]
        return self._answer(result, limit, none_for)

    def _answer(self, result: Any, limit: Deadline, none_for: tuple[type[KazooException], ...] | type[KazooException]) -> Any:
        try:
            return result.get(timeout=limit.left)
        except none_for:
            return None
        except self.client.handler.timeout_exception as error:
            raise NoAnswerError("the server did not answer within the limit") from error

    # --- being connected --------------------------------------------------------------------------------------------------

    def wait_until_connected(self, deadline: Deadline | None = None) -> None:
        """Start the client if it is not running, and wait until it is connected; see `request` for the errors."""
        self._check_usable()
        if self.client.connected:
            self._was_running = True
            return
        self._start()
        limit = _limit(self._connect_timeout, deadline)
        while not self.client.connected:
            if self._ended_by is not None or limit.expired:
                raise NotSentError(self._why_not_connected())
            self._connected.wait(min(limit.left, _POLL_INTERVAL))

    def server_mode(self) -> str | None:
        """`standalone`, `leader` or `follower`: the server to which the client is connected; None if it does not say."""
        self.wait_until_connected()
        try:
            answer = self.client.command(b"srvr")
        except (OSError, KazooException):  # a firewall, TLS on this port only
            return None
        lines = (line.partition(": ") for line in answer.splitlines())
        return next((value for name, _, value in lines if name == "Mode"), None)

    def _start(self) -> None:
        with self._lock:
            self._check_usable()
            client = self.client
            if client.handler.running and self._ended_by is None:
                self._was_running = True
                return  # kazoo is already connecting
            if not client.handler.running and self._was_running and not self._owns_client:
                raise UsageError(
                    "The KazooClient of this store was stopped.", next_step="start it again, or create a new store"
                )
            self._ended_by = None
            self._was_running = True
            client.start_async()

    def _state_changed(self, state: str) -> None:
        """Called in kazoo's thread."""
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
        return f"no connection within the limit: {'; '.join(found)}"

    def _check_usable(self) -> None:
        if process.pid != self._pid:
            raise UsageError(
                f"The store for {self.address} was created in process {self._pid} and used in {process.pid}: a connection to "
                "ZooKeeper does not survive a fork.",
                next_step="create a store in each process, after the fork",
            )
        if self._closed:
            raise UsageError(f"The store for {self.address} is closed.", next_step="create a new one")

    # --- chroot -----------------------------------------------------------------------------------------------------------

    def _make_chroot(self, deadline: Deadline | None) -> None:
        """Create the missing nodes of the chroot; kazoo has no call for nodes above a client's chroot."""
        if self._send(lambda client: client.exists_async("/"), deadline) is None:
            names = self.client.chroot.strip("/").split("/")
            paths = ["/" + "/".join(names[: count + 1]) for count in range(len(names))]
            try:
                self._make_deepest(paths, deadline)
            except NoAuthError as error:
                raise StoreError(
                    f"The chroot of {self.address} is missing, and we are not permitted to create it.",
                    cause=f"{type(error).__name__}: CREATE on its parent is needed",
                    next_step=f"create it in ZooKeeper's shell (zkCli.sh): {'; '.join(f'create {path}' for path in paths)}",
                ) from error
        self._has_chroot = True

    def _make_deepest(self, paths: list[str], deadline: Deadline | None) -> None:
        try:
            self._make_absolute(paths[-1], deadline)
        except NoNodeError:
            self._make_deepest(paths[:-1], deadline)
            self._make_absolute(paths[-1], deadline)

    def _make_absolute(self, path: str, deadline: Deadline | None) -> None:
        request = self.client.transaction()
        request.operations.append(Create(path, b"", self.acl, 0))  # request.create() would prepend the chroot
        (result,) = self._send(lambda _: request.commit_async(), deadline)
        if isinstance(result, Exception) and not isinstance(result, NodeExistsError):
            raise result

    # --- the end ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the client if we own it; a user's client keeps running. May be called more than once."""
        if self._closed or process.pid != self._pid:  # kazoo's threads belong to the parent
            return
        with self._lock:  # `_start` does not start it any more
            self._closed = True
        self.client.remove_listener(self._state_changed)
        if self._owns_client:
            with suppress(WriterNotClosedException, OSError, AttributeError):  # the last two: it was never started
                self.client.stop()
            with suppress(Exception):  # kazoo raises a bare Exception if its loop has not ended; it is a daemon thread
                self.client.close()


def _limit(seconds: float, deadline: Deadline | None) -> Deadline:
    return Deadline(seconds) if deadline is None else deadline.within(seconds)


def _probed(host: str, port: int) -> str:
    """The result of a plain TCP connection to one server: kazoo reports its reasons only in its log."""
    name = f"{host}:{port}"
    try:
        socket.create_connection((host, port), timeout=_PROBE_TIMEOUT).close()
    except socket.gaierror as error:
        return f"the name {host!r} can't be resolved ({error.strerror})"
    except OSError as error:
        return f"{name}: {error.strerror or error}"
    return f"{name} accepts connections, but did not open a session (TLS on one side only, no quorum, or not ZooKeeper)"


class KazooErrorClass(Enum):
    """What some of kazoo's errors mean to us: their types, our error, what it says, and the next step."""

    CONNECTION = (
        (
            NotSentError,
            NoAnswerError,
            ConnectionLoss,
            SessionExpiredError,  # and ConnectionClosedError
            SessionMovedError,
            UnknownSessionError,
            OperationTimeoutError,
            ConnectionDropped,
            ThrottledOpError,
        ),
        StoreUnavailableError,
        "ZooKeeper at {where} can't be reached, or ended the connection, while {doing}.",
        (
            "check that it is running and that the address is right: `--url` or DUALWRITE_DATABASE_URL (or the client that you "
            "passed); then try again"
        ),
    )
    REFUSED = (
        (AuthFailedError, SASLException, SessionClosedRequireSaslError),
        StoreUnavailableError,
        "ZooKeeper at {where} refused the credentials while {doing}.",
        f"check the credentials: {_CREDENTIALS}",
    )
    DENIED = (
        (NoAuthError,),
        StoreError,
        "ZooKeeper at {where} does not permit {doing}.",
        (
            f"grant READ, WRITE and CREATE on /{ROWS} and the nodes in it, for pools also with DELETE on /{LEASES} "
            f"(getAcl and setAcl in zkCli.sh), or use other credentials: {_CREDENTIALS}"
        ),
    )
    READ_ONLY = (
        (NotReadOnlyCallError,),
        StoreUnavailableError,
        "ZooKeeper at {where} is read-only at the moment; {doing} failed.",
        "the server that we reached has no quorum; try again",
    )
    OTHER = ((BaseException,), StoreError, "ZooKeeper at {where} failed while {doing}.", None)


def classify(error: BaseException) -> KazooErrorClass:
    """What the error means."""
    return next(kind for kind in KazooErrorClass if isinstance(error, kind.value[0]))


def translated(error: BaseException, where: str, doing: str, transactional_id: str | None = None) -> StoreError:
    """Our error for kazoo's.

    `doing` completes "… failed while <doing>".
    """
    found = classify(error)
    if isinstance(error, NotSentError) and "authentication failed" in str(error):
        found = KazooErrorClass.REFUSED
    _, kind, what, next_step = found.value
    translation: StoreError = kind(
        what.format(where=where, doing=doing),
        transactional_id=transactional_id,
        cause=sentence(error),
        next_step=next_step,
    )
    return translation


def sentence(error: BaseException) -> str:
    """The error's kind and text, to be used as a cause; most of kazoo's errors have no text."""
    text = " ".join(str(error).split())
    if isinstance(error, NotSentError | NoAnswerError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
