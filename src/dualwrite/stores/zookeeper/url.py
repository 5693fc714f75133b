"""What a `zookeeper://` URL says: servers, chroot, credentials and options. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qsl, unquote

from kazoo.hosts import collect_hosts
from kazoo.protocol.paths import normpath
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from dualwrite.errors import ConfigurationError

_FORM: Final = "zookeeper://host:2181,host2:2181/chroot"
_TRUTHS: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_ACLS: Final = {"open": OPEN_ACL_UNSAFE, "creator": CREATOR_ALL_ACL}


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise ValueError("not a time")
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

    Args:
        hosts: The servers and the chroot as kazoo takes them.
        options: Arguments for `ZooKeeperStore.from_url`, credentials included.
    """

    hosts: str
    options: Mapping[str, Any] = field(repr=False)


def parse_url(url: str) -> ParsedUrl:
    """Read the URL; see `ZooKeeperStore.from_url` for its parts.

    Raises:
        ConfigurationError: It can't be read. It is not quoted: it may hold a password.
    """
    scheme, _, rest = url.partition("://")
    if scheme.lower() != "zookeeper" or not rest:
        raise ConfigurationError("The ZooKeeper URL can't be read.", next_step=_FORM)
    rest, _, query = rest.partition("?")
    servers, _, chroot = rest.partition("/")
    user, _, servers = servers.rpartition("@")
    try:
        collect_hosts(servers)
        chroot = normpath(f"/{unquote(chroot)}")
    except ValueError as error:
        raise ConfigurationError(
            "The servers or the chroot in the ZooKeeper URL can't be read.",
            cause="a port is no number, a host is missing, or the chroot holds '.' or '..'",
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
                f"There is no option {name!r} for a ZooKeeper URL.", next_step=f"one of: {', '.join([*_OPTIONS, *_SASL])}"
            )
        try:
            options[name] = _OPTIONS[name](value)
        except (ValueError, KeyError) as error:
            raise ConfigurationError(f"The option {name!r} of the ZooKeeper URL has a value that it can't have.") from error
    return options, sasl


def _credentials(user: str, sasl: dict[str, str]) -> dict[str, Any]:
    if not user:
        return {"sasl_options": sasl} if sasl else {}
    name, separator, password = user.partition(":")
    if not separator:
        raise ConfigurationError("The ZooKeeper URL names a user without a password.", next_step="user:password@host")
    if sasl:
        return {"sasl_options": {**sasl, "username": unquote(name), "password": unquote(password)}}
    return {"auth_data": [("digest", f"{unquote(name)}:{unquote(password)}")]}
