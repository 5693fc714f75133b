"""Parsing of `zookeeper://` URLs: servers, chroot, credentials and options. No I/O."""

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

    Args:
        hosts: The servers and the chroot in kazoo's form.
        options: Arguments for `ZooKeeperStore.from_url`, including credentials.
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
