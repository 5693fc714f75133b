"""ZooKeeperStore: the rows as nodes of a ZooKeeper tree (KIP-939), using kazoo."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

from kazoo.client import KazooClient
from kazoo.exceptions import BadVersionError
from kazoo.exceptions import ConfigurationError as KazooConfigurationError
from kazoo.protocol.serialization import Auth
from kazoo.security import ACL

from dualwrite.errors import ConfigurationError, MissingDependencyError, StoreCommitFailedError
from dualwrite.stores.identity import StoreIdentity
from dualwrite.stores.key_values import Attempts, KeyValueStore, RowChange
from dualwrite.stores.leases import LeaseStore
from dualwrite.stores.positions import Positions
from dualwrite.stores.rows import Claim, StateRow, check_fence
from dualwrite.stores.store_transaction import StoreTransaction
from dualwrite.stores.zookeeper.nodes import CONCURRENT_CHANGES, Nodes
from dualwrite.stores.zookeeper.paths import DEFAULT_MAX_REQUEST_BYTES, STATE_ROOT, parse_url
from dualwrite.stores.zookeeper.zookeeper_connection import ErrorClass, ZooKeeperConnection, classify
from dualwrite.stores.zookeeper.zookeeper_keeping import POSITION_ROOT, ZooKeeperLeases, ZooKeeperPositions
from dualwrite.stores.zookeeper.zookeeper_transaction import ZooKeeperTransaction

DEFAULT_SESSION_TIMEOUT: Final = 10.0
DEFAULT_CONNECT_TIMEOUT: Final = 10.0
DEFAULT_REQUEST_TIMEOUT: Final = 10.0
DEFAULT_CHANGE_TIMEOUT: Final = 30.0

# kazoo's default doubles its pause up to an hour: after a long outage it would reconnect only then.
_CONNECTION_RETRY: Final = {"max_tries": -1, "delay": 0.05, "backoff": 2, "max_delay": 1.0}


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
        self._connection = ZooKeeperConnection(
            client, owns_client=owns_client, connect_timeout=connect_timeout, request_timeout=request_timeout, acl=acl
        )
        self._nodes = Nodes(self._connection, max_request_bytes=max_request_bytes, change_timeout=change_timeout)

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
        self._nodes.query(
            lambda: self._connection.request(lambda client: client.exists_async(STATE_ROOT)), "checking the connection"
        )

    @property
    def leases(self) -> LeaseStore:
        """A lease lasts as long as the client's session, whatever its length."""
        return ZooKeeperLeases(self._nodes)

    @property
    def positions(self) -> Positions:
        return ZooKeeperPositions(self._nodes)

    def identity(self) -> StoreIdentity | None:
        return self._nodes.query(self._nodes.identity, "reading the database's id")

    def set_identity(self, identity: StoreIdentity, *, expected: StoreIdentity | None) -> bool:
        return self._nodes.query(lambda: self._nodes.set_identity(identity, expected), "storing the database's id")

    def begin(self, claim: Claim) -> StoreTransaction:
        return ZooKeeperTransaction.begun(self._nodes, claim)

    def is_conflict(self, error: BaseException) -> bool:
        """See TxnStateStore: a node's version has changed; the `__cause__` of what the commit then raises.

        Also that a node of a group's first position exists already. For a node of the user's, that is a conflict of the data.
        """
        if isinstance(error, StoreCommitFailedError):
            return str(error.facts.get("path", "")).startswith(f"{POSITION_ROOT}/")
        return isinstance(error, BadVersionError)

    def is_outage(self, error: BaseException) -> bool:
        return classify(error) in (ErrorClass.CONNECTION, ErrorClass.READ_ONLY)

    # --- reading ----------------------------------------------------------------------------------------------------------

    def read(self, transactional_id: str) -> StateRow | None:
        node = self._nodes.query(lambda: self._nodes.read(transactional_id), "reading the row", transactional_id)
        return None if node is None else node.row

    def read_claimed(self, claim: Claim) -> StateRow:
        node = self._nodes.query(
            lambda: self._nodes.read_from_quorum(claim.transactional_id), "reading the row", claim.transactional_id
        )
        return check_fence(None if node is None else node.row, claim)

    def list(self, prefix: str = "") -> list[str]:
        rows = self._nodes.query(lambda: list(self._nodes.rows(prefix)), "listing the ids")
        return sorted(row.transactional_id for row in rows if not row.forgotten)

    def _change(
        self, transactional_id: str, change: RowChange, doing: str, *, owner: str = "", timeout: float | None = None
    ) -> Attempts:
        """Does not wait for a transaction that is recorded and not committed yet.

        Once the node's version has changed, that transaction can't commit any more, wherever its multi is: in its writer,
        kazoo's queue or the network.
        """
        del owner
        attempts: list[tuple[StateRow | None, StateRow | None]] = []

        def once(deadline: float) -> None:
            read = self._nodes.read(transactional_id, deadline)
            before = None if read is None else read.row
            after = change(before)
            attempts.append((before, after))
            if after is None or after is before:
                return
            try:
                self._nodes.write(after, read, deadline)
            except CONCURRENT_CHANGES:  # this attempt has written nothing
                attempts.pop()
                raise

        self._nodes.change(once, doing, transactional_id, timeout)
        return attempts

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
