"""ZooKeeperStore: the rows as nodes of a ZooKeeper tree (KIP-939), using kazoo; and its leases, which are ephemeral nodes."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, Self

from kazoo.client import KazooClient
from kazoo.exceptions import BadVersionError
from kazoo.exceptions import ConfigurationError as KazooConfigurationError
from kazoo.protocol.serialization import Auth
from kazoo.security import ACL

from dualwrite.deadline import Deadline
from dualwrite.errors import ConfigurationError, MissingDependencyError
from dualwrite.stores.key_value_store import KeyValueStore
from dualwrite.stores.key_values import ROWS, Write
from dualwrite.stores.leases import Lease, LeaseStore
from dualwrite.stores.rows import MAX_OWNER_LENGTH, Claim, StateRow
from dualwrite.stores.store_transaction import StoreTransaction
from dualwrite.stores.zookeeper.nodes import NodeTree
from dualwrite.stores.zookeeper.paths import DEFAULT_MAX_REQUEST_BYTES, LEASES, parse_url, path_of
from dualwrite.stores.zookeeper.zookeeper_connection import KazooErrorClass, ZooKeeperConnection, classify
from dualwrite.stores.zookeeper.zookeeper_transaction import ZooKeeperTransaction

DEFAULT_SESSION_TIMEOUT: Final = 10.0
DEFAULT_CONNECT_TIMEOUT: Final = 10.0
DEFAULT_REQUEST_TIMEOUT: Final = 10.0
DEFAULT_CHANGE_TIMEOUT: Final = 30.0

# kazoo's default doubles its pause up to an hour: after a long outage it would reconnect only then.
_CONNECTION_RETRY: Final = {"max_tries": -1, "delay": 0.05, "backoff": 2, "max_delay": 1.0}


class ZooKeeperLeases(LeaseStore):
    """They are below `/kafka_transaction_lease`; their `seconds` have no meaning.

    Args:
        nodes: The tree.
        timeout: Seconds within which changes must succeed.
    """

    def __init__(self, nodes: NodeTree, timeout: float) -> None:
        self._nodes = nodes
        self._timeout = timeout

    def acquire(self, ids: Collection[str], owner: str, *, seconds: float) -> frozenset[str]:
        del seconds
        return self._leased(ids, owner, "leasing an id", or_free=True)

    def renew(self, ids: Collection[str], owner: str, *, seconds: float) -> frozenset[str]:
        """What an expired session had leased is lost."""
        del seconds
        return self._leased(ids, owner, "renewing a lease", or_free=False)

    def _leased(self, ids: Collection[str], owner: str, doing: str, *, or_free: bool) -> frozenset[str]:
        def work(name: str, deadline: Deadline) -> bool:
            key, data = (LEASES, name), _data(owner)
            found = self._nodes.get(key, deadline)
            if found is None:
                if or_free:
                    self._nodes.multi([Write(key, None, data, ephemeral=True)], deadline)
                return or_free
            if found.data == data and found.stat.ephemeralOwner != self._nodes.connection.client.client_id[0]:
                # of an earlier session of ours, which will expire
                self._nodes.multi([Write(key, found, None), Write(key, None, data, ephemeral=True)], deadline)
            return found.data == data

        return frozenset(name for name in sorted(ids) if self._nodes.change(partial(work, name), doing, name, self._timeout))

    def release(self, ids: Collection[str], owner: str) -> None:
        def work(name: str, deadline: Deadline) -> None:
            found = self._nodes.get((LEASES, name), deadline)
            if found is not None and found.data == _data(owner):
                self._nodes.multi([Write((LEASES, name), found, None)], deadline)

        for name in sorted(ids):
            self._nodes.change(partial(work, name), "releasing an id", name, self._timeout)

    def entries(self, prefix: str = "") -> list[Lease]:
        def work() -> list[Lease]:
            names = sorted(self._nodes.children((LEASES,), prefix))
            found = zip(names, self._nodes.read([(LEASES, name) for name in names]), strict=True)
            return [Lease(name, each.data.decode(errors="replace"), None) for name, each in found if each is not None]

        return self._nodes.query(work, "listing the leases")


def _data(owner: str) -> bytes:
    return owner[:MAX_OWNER_LENGTH].encode()


class ZooKeeperStore(KeyValueStore):
    """Keeps the rows in `/kafka_transaction_state/<transactional id>`, as JSON text in UTF-8; `tx.db` is a ZooKeeperBatch.

    Characters of an id that a node's name can't contain (a slash, for instance) are percent-encoded. Every change is
    conditional on the version that the node had when it was read: no claim waits for a lock, and a transaction of an id that
    was claimed again fails when it commits, if not before. The user's operations can't cause a conflict before the commit,
    which reports it itself.

    The store and its client may be used by several threads, but not by a process forked after the store was created. kazoo
    replaces an expired session by a new one. A client can't see whether the servers write to disk before they respond
    (`forceSync`); `durability` has the `mode` of one server (standalone, leader, follower), if it shows it.

    Args:
        client: A KazooClient, started or not; it is started at the first use, and `close` does not stop it. Its
            `connection_retry` is not changed: kazoo's default pauses up to an hour between attempts.
        connect_timeout: Seconds to wait for a connection.
        request_timeout: Seconds to wait for a response.
        change_timeout: Seconds within which `record_resolution` and other changes must succeed; `claim` has its own timeout.
        acl: For the nodes that we create; None: the client's default, or open to everyone if it has none.
        max_request_bytes: The servers' limit for one request, jute.maxbuffer.
        owns_client: Whether `close` stops the client.
    """

    def __init__(
        self,
        client: KazooClient,
        *,
        connect_timeout: float = DEFAULT_CONNECT_TIMEOUT,
        request_timeout: float = DEFAULT_REQUEST_TIMEOUT,
        change_timeout: float = DEFAULT_CHANGE_TIMEOUT,
        acl: Sequence[ACL] | None = None,
        max_request_bytes: int = DEFAULT_MAX_REQUEST_BYTES,
        owns_client: bool = False,
    ) -> None:
        super().__init__(change_timeout)
        self._connection = ZooKeeperConnection(
            client, owns_client=owns_client, connect_timeout=connect_timeout, request_timeout=request_timeout, acl=acl
        )
        self._nodes = NodeTree(self._connection, max_request_bytes=max_request_bytes)

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        session_timeout: float | None = None,
        connect_timeout: float | None = None,
        request_timeout: float | None = None,
        change_timeout: float | None = None,
        acl: Sequence[ACL] | None = None,
        max_request_bytes: int | None = None,
        **client_options: Any,
    ) -> Self:
        """A store with its own client; nothing connects yet. Arguments override the URL.

        Args:
            url: `zookeeper://host:2181,host2:2181/chroot`. `user:password@` before the hosts authenticates with the scheme
                digest, or with SASL if the query has `sasl_mechanism` (and `sasl_service`, `sasl_principal`). The query may
                contain the arguments below, `acl` as `open` or `creator`, and `use_ssl`, `certfile`, `keyfile`,
                `keyfile_password`, `ca`, `verify_certs` and `check_hostname` of KazooClient. A missing chroot is created.
            session_timeout: Seconds without contact after which the servers expire the session; 10 if not given.
            connect_timeout: Seconds to wait for a connection; 10 if not given.
            request_timeout: Seconds to wait for a response; 10 if not given.
            change_timeout: Seconds within which `record_resolution` and other changes must succeed; 30 if not given.
            acl: For the nodes that we create, including the chroot; open to everyone if not given.
            max_request_bytes: The servers' limit for one request, jute.maxbuffer; 1,048,575 if not given.
            client_options: More arguments for KazooClient, such as `sasl_options`, `auth_data` or `default_acl`.

        Raises:
            ConfigurationError: The URL or an option can't be used.
            MissingDependencyError: SASL is used, and the package for it is not installed.
        """
        parsed = parse_url(url)
        given = {
            "session_timeout": session_timeout,
            "connect_timeout": connect_timeout,
            "request_timeout": request_timeout,
            "change_timeout": change_timeout,
            "acl": acl,
            "max_request_bytes": max_request_bytes,
            **client_options,
        }
        options = {**parsed.options, **{name: value for name, value in given.items() if value is not None}}
        ours = {
            name: options.pop(name)
            for name in ("connect_timeout", "request_timeout", "change_timeout", "acl", "max_request_bytes")
            if name in options
        }
        client = _make_client(parsed.hosts, options.pop("session_timeout", DEFAULT_SESSION_TIMEOUT), options)
        return cls(client, owns_client=True, **ours)

    @property
    def client(self) -> KazooClient:
        """The client, for reads and writes outside of transactions; `check` starts it."""
        return self._connection.client

    @property
    def acl(self) -> Sequence[ACL]:
        """The ACL of this store's nodes, also to be used for nodes next to them."""
        return self._connection.acl

    @property
    def description(self) -> str:
        return self._connection.address

    def durability(self) -> Mapping[str, str]:
        mode = self._connection.server_mode()
        return {"forceSync": "not visible", **({} if mode is None else {"mode": mode})}

    def check(self) -> None:
        """There is no table: the first claim creates the nodes."""
        path = path_of((ROWS,))
        self._nodes.query(lambda: self._connection.request(lambda client: client.exists_async(path)), "checking the connection")

    @property
    def leases(self) -> LeaseStore:
        """A lease lasts as long as the client's session, whatever its length."""
        return ZooKeeperLeases(self._nodes, self._change_timeout)

    def is_conflict(self, error: BaseException) -> bool:
        """Also that a node of the user's has another version; that one exists already is a conflict of the data."""
        return super().is_conflict(error) or isinstance(error, BadVersionError)

    def is_outage(self, error: BaseException) -> bool:
        return classify(error) in (KazooErrorClass.CONNECTION, KazooErrorClass.READ_ONLY)

    @property
    def _keys(self) -> NodeTree:
        return self._nodes

    def _transaction(self, claim: Claim, row: StateRow) -> StoreTransaction:
        return ZooKeeperTransaction.begun(self._nodes, claim, row)

    def close(self) -> None:
        """A multi that is still in flight may be applied later, as after any unknown commit."""
        self._connection.close()


class _NoCredentials(logging.Filter):
    """Keeps requests with credentials out of kazoo's log, which has every request at the level DEBUG."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record may be logged."""
        return not (isinstance(record.args, tuple) and any(isinstance(each, Auth) for each in record.args))


def _make_client(hosts: str, session_timeout: float, options: dict[str, Any]) -> KazooClient:
    if options.get("sasl_options") is not None:
        options["sasl_options"] = dict(options["sasl_options"])  # kazoo writes into it
        if importlib.util.find_spec("puresasl") is None:
            raise MissingDependencyError(
                "The Python package 'pure-sasl' is not installed; kazoo needs it for SASL.",
                next_step='pip install "kazoo[sasl]"',
            )
    log = logging.getLogger("dualwrite.stores.zookeeper.client")
    if not any(isinstance(each, _NoCredentials) for each in log.filters):
        log.addFilter(_NoCredentials())
    defaults: dict[str, Any] = {"connection_retry": dict(_CONNECTION_RETRY), "logger": log}
    try:
        return KazooClient(hosts, timeout=session_timeout, **{**defaults, **options})
    except (TypeError, ValueError, KazooConfigurationError) as error:
        raise ConfigurationError(
            "KazooClient does not accept these options.",
            cause=f"{type(error).__name__}" if "auth_data" in options else f"{type(error).__name__}: {error}",
            next_step="compare them with the arguments of kazoo.client.KazooClient",
        ) from error
