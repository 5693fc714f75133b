"""ZooKeeperStore: the rows as nodes of a ZooKeeper tree (KIP-939), using kazoo."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Self

from kazoo.client import KazooClient
from kazoo.exceptions import BadVersionError
from kazoo.exceptions import ConfigurationError as KazooConfigurationError
from kazoo.protocol.serialization import Auth
from kazoo.security import ACL

from dualwrite.errors import ConfigurationError, MissingDependencyError, StoreCommitFailedError
from dualwrite.state import ProducerKind
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.identity import StoreIdentity
from dualwrite.stores.leases import LeaseStore
from dualwrite.stores.positions import Positions
from dualwrite.stores.row import (
    Claim,
    LostTransaction,
    Resolution,
    StateRow,
    acknowledged,
    check_fence,
    forgotten,
    new_token,
    with_generation,
    with_resolution,
)
from dualwrite.stores.store_transaction import StoreTransaction
from dualwrite.stores.zookeeper.nodes import CONCURRENT_CHANGES, ClaimAttempt, StateNodes
from dualwrite.stores.zookeeper.paths import DEFAULT_MAX_REQUEST_BYTES, STATE_ROOT, parse_url
from dualwrite.stores.zookeeper.zookeeper_connection import ErrorClass, ZooKeeperConnection, classify
from dualwrite.stores.zookeeper.zookeeper_keeping import ROOT as POSITIONS
from dualwrite.stores.zookeeper.zookeeper_keeping import ZooKeeperLeases, ZooKeeperPositions
from dualwrite.stores.zookeeper.zookeeper_transaction import ZooKeeperTransaction

DEFAULT_SESSION_TIMEOUT: Final = 10.0
DEFAULT_CONNECT_TIMEOUT: Final = 10.0
DEFAULT_REQUEST_TIMEOUT: Final = 10.0
DEFAULT_CHANGE_TIMEOUT: Final = 30.0

# kazoo's default doubles its pause up to an hour: after a long outage it would reconnect only then.
_CONNECTION_RETRY: Final = {"max_tries": -1, "delay": 0.05, "backoff": 2, "max_delay": 1.0}


class ZooKeeperStore(TxnStateStore):
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

    undoes_units = True

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
        self._nodes = StateNodes(self._connection, max_request_bytes=max_request_bytes)
        self._change_timeout = change_timeout

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
        return ZooKeeperLeases(self._nodes, self._change_timeout)

    @property
    def positions(self) -> Positions:
        return ZooKeeperPositions(self._nodes)

    def identity(self) -> StoreIdentity | None:
        return self._nodes.query(self._nodes.identity, "reading the database's id")

    def set_identity(self, identity: StoreIdentity, *, expected: StoreIdentity | None) -> bool:
        return self._nodes.query(lambda: self._nodes.set_identity(identity, expected), "storing the database's id")

    def claim(
        self, transactional_id: str, owner: str, *, timeout: float, expected_fence: int | None = None, token: str | None = None
    ) -> Claim:
        """Does not wait for a lock, but retries if others change the row at the same time."""
        return ClaimAttempt(self._nodes, transactional_id, owner, timeout, token or new_token(), expected_fence).make()

    def begin(self, claim: Claim) -> StoreTransaction:
        transaction = ZooKeeperTransaction(self._nodes, claim)
        transaction.begin()
        return transaction

    def is_conflict(self, error: BaseException) -> bool:
        """See TxnStateStore: a node's version has changed; the `__cause__` of what the commit then raises.

        Also that a node of a group's first position exists already. For a node of the user's, that is a conflict of the data.
        """
        if isinstance(error, StoreCommitFailedError):
            return str(error.facts.get("path", "")).startswith(f"{POSITIONS}/")
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

    # --- changing ---------------------------------------------------------------------------------------------------------

    def record_resolution(self, claim: Claim, resolution: Resolution) -> None:
        self._change(
            claim.transactional_id,
            lambda row: with_resolution(check_fence(row, claim), resolution),
            doing="resolving a transaction",
        )

    def acquire_generation(self, claim: Claim, kind: ProducerKind, *, reuse: bool = False, cluster_id: str = "") -> int:
        """A number whose response was lost is skipped, which is harmless."""

        def work(row: StateRow | None) -> StateRow:
            store_id = self._own_identity().store_id
            return with_generation(check_fence(row, claim), kind, reuse=reuse, store_id=store_id, cluster_id=cluster_id)

        row = self._change(claim.transactional_id, work, doing="acquiring a generation")
        assert row is not None  # `check_fence` raises for None
        return row.generation

    def acknowledge(
        self, transactional_id: str, *, only: Collection[LostTransaction] | None = None
    ) -> tuple[LostTransaction, ...]:
        removed: list[LostTransaction] = []  # over all attempts: the response to the one that removed them may be lost

        def once(deadline: float) -> None:
            read = self._nodes.read(transactional_id, deadline)
            if read is None or not read.row.lost:
                return
            left, known = acknowledged(read.row, only), len(removed)
            removed.extend(entry for entry in read.row.lost if entry not in (*left.lost, *removed))
            try:
                self._nodes.write(left, read, deadline)
            except CONCURRENT_CHANGES:  # this attempt has removed nothing
                del removed[known:]
                raise

        self._nodes.change(once, "acknowledging lost transactions", transactional_id, self._change_timeout)
        return tuple(removed)

    def forget(self, transactional_id: str) -> None:
        def work(row: StateRow | None) -> StateRow | None:
            return None if row is None or row.forgotten else forgotten(row)

        self._change(transactional_id, work, doing="forgetting the id")

    def _change(
        self, transactional_id: str, work: Callable[[StateRow | None], StateRow | None], *, doing: str
    ) -> StateRow | None:
        """Write the row that `work` returns; if it returns None, write nothing."""

        def once(deadline: float) -> StateRow | None:
            read = self._nodes.read(transactional_id, deadline)
            row = work(None if read is None else read.row)
            if row is not None:
                self._nodes.write(row, read, deadline)
            return row

        return self._nodes.change(once, doing, transactional_id, self._change_timeout)

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
