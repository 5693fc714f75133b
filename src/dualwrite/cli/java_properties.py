"""Converts the Java properties file of Apache's tools (`--command-config`) to settings with librdkafka's names.

A setting without an equivalent is refused instead of ignored, because the security of the connection may depend on it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from dualwrite.errors import ConfigurationError

_ENTRY: Final = re.compile(r"((?:\\.|[^\s:=\\])+)(?:\s*[:=]\s*|\s+|$)(.*)", re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPED: Final = MappingProxyType({"t": "\t", "n": "\n", "r": "\r", "f": "\f"})
_LOGIN: Final = re.compile(r"""\s*[\w.]+\.(PlainLoginModule|ScramLoginModule)\s+required\b(.*?);\s*""", re.DOTALL)
_LOGIN_OPTION: Final = re.compile(r"""\s*(\w+)\s*=\s*("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^\s;]+)""", re.DOTALL)

_SAME: Final = frozenset(
    {"bootstrap.servers", "client.id", "sasl.mechanism", "security.protocol", "ssl.key.password", "ssl.cipher.suites"}
)
_OTHER_NAMES: Final = MappingProxyType(
    {
        "request.timeout.ms": "socket.timeout.ms",
        "socket.connection.setup.timeout.ms": "socket.connection.setup.timeout.ms",
        "ssl.truststore.certificates": "ssl.ca.pem",
        "ssl.keystore.certificate.chain": "ssl.certificate.pem",
        "ssl.keystore.key": "ssl.key.pem",
    }
)
_STORES: Final = MappingProxyType(
    {"ssl.truststore": ("ssl.ca.location",), "ssl.keystore": ("ssl.certificate.location", "ssl.key.location")}
)
_PEM: Final = "use PEM files, with ssl.truststore.type=PEM and ssl.keystore.type=PEM; or give ssl.ca.location by --kafka-config"


def settings_in_file(path: str) -> dict[str, str]:
    """The settings of a properties file, with librdkafka's names.

    Raises:
        ConfigurationError: The file can't be read, or has a setting without an equivalent.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"The file {path} of --command-config can't be read.",
            cause=str(error),
            next_step="check the path; the file must be a Java properties file in UTF-8",
        ) from error
    return mapped(properties(text))


def properties(text: str) -> dict[str, str]:
    """The entries of a properties file, as java.util.Properties reads them."""
    found: dict[str, str] = {}
    whole = ""
    for line in text.splitlines():
        stripped = line.lstrip()
        if not whole and (not stripped or stripped[0] in "#!"):
            continue
        whole += stripped
        if (len(whole) - len(whole.rstrip("\\"))) % 2:  # continued on the next line
            whole = whole[:-1]
            continue
        _add(found, whole)
        whole = ""
    if whole:
        _add(found, whole)
    return found


def mapped(given: Mapping[str, str]) -> dict[str, str]:
    """The settings with librdkafka's names.

    Raises:
        ConfigurationError: A setting has no equivalent.
    """
    found: dict[str, str] = {}
    for name, value in given.items():
        if name in _SAME:
            found[name] = value
        elif name in _OTHER_NAMES:
            found[_OTHER_NAMES[name]] = value
        elif name == "sasl.jaas.config":
            found |= _login(value)
        elif name == "ssl.endpoint.identification.algorithm":
            found[name] = value or "none"
        elif name.rpartition(".")[0] in _STORES and name.endswith((".type", ".location")):
            found |= _store(name.rpartition(".")[0], given)
        else:
            raise ConfigurationError(
                f"{name} of --command-config is not supported.",
                cause="dualwrite's own connections have no equivalent setting",
                next_step=_PEM if name.startswith("ssl.") else "remove it from the file, or use a file without it",
            )
    return found


def _add(found: dict[str, str], line: str) -> None:
    entry = _ENTRY.fullmatch(line)
    if entry is not None:
        found[_unescaped(entry[1])] = _unescaped(entry[2])


def _unescaped(text: str) -> str:
    def character(match: re.Match[str]) -> str:
        escape = match[1]
        return chr(int(escape[1:], 16)) if len(escape) > 1 else _ESCAPED.get(escape, escape)

    return _ESCAPE.sub(character, text)


def _login(value: str) -> dict[str, str]:
    module = _LOGIN.fullmatch(value)
    options = {} if module is None else {one[1]: _unquoted(one[2]) for one in _LOGIN_OPTION.finditer(module[2])}
    if "username" not in options or "password" not in options:
        raise ConfigurationError(
            "sasl.jaas.config of --command-config is not supported.",
            cause="its login module is neither PlainLoginModule nor ScramLoginModule, or username or password is missing",
            next_step="use PLAIN or SCRAM, with username and password in the file",
        )
    return {"sasl.username": options["username"], "sasl.password": options["password"]}


def _unquoted(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text[1:-1]) if text[:1] in "\"'" else text


def _store(kind: str, given: Mapping[str, str]) -> dict[str, str]:
    if given.get(f"{kind}.type", "JKS").upper() != "PEM":
        raise ConfigurationError(f"{kind}.location of --command-config is a Java key store.", next_step=_PEM)
    location = given.get(f"{kind}.location")
    return dict.fromkeys(_STORES[kind], location) if location else {}
