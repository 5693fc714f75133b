"""What the ZooKeeper store computes without I/O: the names of nodes, the sizes of requests, and what a URL says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, unquote_to_bytes

from kazoo.hosts import collect_hosts
from kazoo.protocol.paths import normpath
from kazoo.protocol.serialization import SetData, Transaction
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from dualwrite.errors import ConfigurationError, InvalidTransactionalIdError, StoreError
from dualwrite.stores.key_values import POSITIONS, ROWS, STORE, Key

LEASES: Final = "kafka_transaction_lease"
"""The folder of the leases."""

OUR_FOLDERS: Final = (ROWS, STORE, POSITIONS, LEASES)
"""What is ours, right below the client's chroot."""

# Characters that a path can't contain (ZooKeeper's PathUtils.validatePath, in UTF-16 units), and our own escape character.
_ESCAPED: Final = re.compile("[/%\x00-\x1f\x7f-\x9f\ud800-\uf8ff\ufff0-\uffff\U00010000-\U0010ffff]")
_RELATIVE: Final = frozenset({".", ".."})

DEFAULT_MAX_REQUEST_BYTES: Final = 0xFFFFF
"""ZooKeeper's default limit for one request (jute.maxbuffer)."""

_HEADER: Final = 8  # xid and type; the four bytes of the length before them don't count
_MULTI_EMPTY: Final = _HEADER + len(Transaction([]).serialize())
_OPERATION_HEADER: Final = (
    len(Transaction([SetData("/", b"", 0)]).serialize())
    - len(Transaction([]).serialize())
    - len(SetData("/", b"", 0).serialize())
)

_FORM: Final = "zookeeper://host:2181,host2:2181/chroot"
_TRUTHS: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_ACLS: Final = {"open": OPEN_ACL_UNSAFE, "creator": CREATOR_ALL_ACL}


def node_name(transactional_id: str) -> str:
    """The name of the node of an id: the id, with characters that a path can't contain percent-encoded as UTF-8.

    Raises:
        InvalidTransactionalIdError: The id is empty, or can't be encoded in UTF-8.
    """
    if not transactional_id:
        raise InvalidTransactionalIdError("The transactional id is empty.")
    if transactional_id in _RELATIVE:
        return transactional_id.replace(".", "%2E")
    try:
        return _ESCAPED.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), transactional_id)
    except UnicodeEncodeError as error:
        raise InvalidTransactionalIdError(
            f"The transactional id {transactional_id!r} can't be encoded in UTF-8.", cause=str(error)
        ) from error


def id_of(name: str) -> str | None:
    """The id whose node has this name, or None if there is no such id: the node is not ours."""
    try:
        transactional_id = unquote_to_bytes(name).decode()
        return transactional_id if node_name(transactional_id) == name else None
    except (UnicodeError, InvalidTransactionalIdError):
        return None


def path_of(key: Key) -> str:
    """The path of a key's node, below the chroot."""
    return "/" + "/".join((key[0], *map(node_name, key[1:])))


def is_ours(path: str) -> bool:
    """Whether a normalized path, below the chroot, is one of our folders or in one."""
    return path.split("/")[1] in OUR_FOLDERS


def operation_size(operation: Any) -> int:
    """Bytes that an operation adds to a multi."""
    return _OPERATION_HEADER + len(operation.serialize())


def multi_size(operations: Iterable[Any]) -> int:
    """Size of a multi of these operations in bytes."""
    return _MULTI_EMPTY + sum(map(operation_size, operations))


def too_large(what: str, size: int, limit: int, transactional_id: str | None) -> StoreError:
    """The error for a request that the server would not accept."""
    return StoreError(
        f"{what} would take {size:,} bytes in one request to ZooKeeper; the limit is {limit:,}.",
        transactional_id=transactional_id,
        cause="a server closes the connection on a request larger than its jute.maxbuffer; nothing was sent",
        next_step="write less in one transaction; or raise jute.maxbuffer on every server (and its Java clients), and with it "
        "`max_request_bytes` of the store",
        size=size,
        limit=limit,
    )


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise ValueError("not a duration")
    return seconds


_OPTIONS: Final[Mapping[str, Callable[[str], Any]]] = {
    "session_timeout": _seconds,
    "connect_timeout": _seconds,
    "request_timeout": _seconds,
    "change_timeout": _seconds,
    "max_request_bytes": int,
    "acl": lambda text: _ACLS[text],
    "use_ssl": lambda text: _TRUTHS[text.lower()],
    "verify_certs": lambda text: _TRUTHS[text.lower()],
    "check_hostname": lambda text: _TRUTHS[text.lower()],
    "certfile": str,
    "keyfile": str,
    "keyfile_password": str,
    "ca": str,
}
_SASL: Final = {"sasl_mechanism": "mechanism", "sasl_service": "service", "sasl_principal": "principal"}


@dataclass(frozen=True, slots=True)
class ParsedUrl:
    """A `zookeeper://` URL.

    `hosts` are the servers and the chroot in kazoo's form, `options` the arguments for `ZooKeeperStore.from_url`, including
    credentials.
    """

    hosts: str
    options: Mapping[str, Any] = field(repr=False)


def parse_url(url: str) -> ParsedUrl:
    """Parse the URL; see `ZooKeeperStore.from_url` for its parts.

    Raises:
        ConfigurationError: The URL can't be parsed. The error does not quote it: it may contain a password.
    """
    scheme, _, rest = url.partition("://")
    if scheme.lower() != "zookeeper" or not rest:
        raise ConfigurationError("The ZooKeeper URL can't be parsed.", next_step=_FORM)
    rest, _, query = rest.partition("?")
    servers, _, chroot = rest.partition("/")
    user, _, servers = servers.rpartition("@")
    try:
        collect_hosts(servers)
        chroot = normpath(f"/{unquote(chroot)}")
    except ValueError as error:
        raise ConfigurationError(
            "The servers or the chroot in the ZooKeeper URL can't be parsed.",
            cause="a port is not a number, a host is missing, or the chroot contains '.' or '..'",
            next_step=_FORM,
        ) from error
    options, sasl = _read_query(query)
    options |= _credentials(user, sasl)
    return ParsedUrl(servers + (chroot if chroot != "/" else ""), options)


def _read_query(query: str) -> tuple[dict[str, Any], dict[str, str]]:
    options: dict[str, Any] = {}
    sasl: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in _SASL:
            sasl[_SASL[name]] = value
            continue
        if name not in _OPTIONS:
            raise ConfigurationError(
                f"Unknown option {name!r} in the ZooKeeper URL.", next_step=f"use one of: {', '.join([*_OPTIONS, *_SASL])}"
            )
        try:
            options[name] = _OPTIONS[name](value)
        except (ValueError, KeyError) as error:
            raise ConfigurationError(f"The option {name!r} of the ZooKeeper URL has an invalid value.") from error
    return options, sasl


def _credentials(user: str, sasl: dict[str, str]) -> dict[str, Any]:
    if not user:
        return {"sasl_options": sasl} if sasl else {}
    name, separator, password = user.partition(":")
    if not separator:
        raise ConfigurationError("The ZooKeeper URL has a user without a password.", next_step="user:password@host")
    if sasl:
        return {"sasl_options": {**sasl, "username": unquote(name), "password": unquote(password)}}
    return {"auth_data": [("digest", f"{unquote(name)}:{unquote(password)}")]}
