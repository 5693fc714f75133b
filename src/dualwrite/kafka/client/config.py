"""Kafka settings: one dict with librdkafka's names, validated once; the settings of our own connections derive from it.

The names are those of librdkafka's CONFIGURATION.md (`bootstrap.servers`, `security.protocol`, `sasl.*`, `ssl.*`). The dict
is passed to librdkafka almost unchanged; the coordinator's connections use the settings named in `KafkaConfig`.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from dualwrite.errors import ConfigurationError
from dualwrite.kafka.client.logins import Login, PasswordLogin, login_of
from dualwrite.kafka.client.tls import TRUE, tls_context
from dualwrite.settings import misspelt

PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
DEFAULT_PORT: Final = 9092

_HOST_AND_PORT: Final = re.compile(r"(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<host>[^\[\]:]+))(?::(?P<port>[0-9]+)?)?", re.ASCII)


class Address(NamedTuple):
    """Host and port of a broker."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class KafkaConfig:
    """The settings of one Kafka cluster.

    Args:
        bootstrap: The bootstrap servers.
        protocol: One of `PROTOCOLS`.
        sasl: The login, if the protocol uses SASL.
        client_id: The client id that brokers see.
        socket_timeout: Seconds that one request may take (`socket.timeout.ms`).
        connect_timeout: Seconds that connecting and logging in may take (`socket.connection.setup.timeout.ms`).
        keepalive: Whether TCP keepalive is used (`socket.keepalive.enable`; on by default).
        transaction_timeout_ms: `transaction.timeout.ms` as the user set it, or None.
        properties: All settings that the user gave, for librdkafka.
    """

    bootstrap: tuple[Address, ...]
    protocol: str
    sasl: Login | None
    client_id: str
    socket_timeout: float
    connect_timeout: float
    keepalive: bool
    transaction_timeout_ms: int | None
    properties: Mapping[str, Any] = field(repr=False)
    _tls: list[ssl.SSLContext] = field(default_factory=list, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, settings: KafkaConfig | Mapping[str, Any] | str) -> KafkaConfig:
        """Validate the user's settings; a str means `bootstrap.servers`.

        Raises:
            ConfigurationError: A setting is missing or invalid, or would break the atomicity guarantee.
        """
        if isinstance(settings, KafkaConfig):
            return settings
        if isinstance(settings, str):
            settings = {"bootstrap.servers": settings}
        if not isinstance(settings, Mapping):
            raise ConfigurationError(
                f"Kafka settings must be a dict with librdkafka's names or a 'host:port' string, not {type(settings).__name__}."
            )
        given = {str(name): value for name, value in settings.items()}
        _refuse_unsafe_settings(given)
        protocol = str(given.get("security.protocol", "PLAINTEXT")).upper()
        if protocol not in PROTOCOLS:
            raise ConfigurationError(f"Invalid security.protocol {protocol!r}.", next_step=f"use one of {', '.join(PROTOCOLS)}")
        timeout = given.get("transaction.timeout.ms")
        return cls(
            bootstrap=parse_addresses(given.get("bootstrap.servers", given.get("metadata.broker.list", "")), given),
            protocol=protocol,
            sasl=login_of(given),
            client_id=str(given.get("client.id", "dualwrite")),
            socket_timeout=_milliseconds(given, "socket.timeout.ms", 30_000) / 1000,
            connect_timeout=_milliseconds(given, "socket.connection.setup.timeout.ms", 10_000) / 1000,
            keepalive=str(given.get("socket.keepalive.enable", "true")).lower() in TRUE,
            transaction_timeout_ms=None if timeout is None else _milliseconds(given, "transaction.timeout.ms", 0),
            properties=MappingProxyType(given),
        )

    @classmethod
    def over(cls, kafka: KafkaConfig | Mapping[str, Any] | str | None, others: Mapping[str, Any]) -> KafkaConfig:
        """As `of`; an address alone replaces only the servers of `others`, whose login and TLS stay. None means `others`.

        Raises:
            ConfigurationError: As for `of`.
        """
        if isinstance(kafka, str):
            # an alias of bootstrap.servers, which would still list the other servers
            kept = {name: value for name, value in others.items() if name != "metadata.broker.list"}
            return cls.of({**kept, "bootstrap.servers": kafka})
        return cls.of(others if kafka is None else kafka)

    @property
    def servers(self) -> str:
        """The bootstrap servers, in the format of `bootstrap.servers`."""
        return ",".join(map(str, self.bootstrap))

    @property
    def client(self) -> str:
        """What the brokers' quotas are for, in words."""
        user = f", user {self.sasl.username!r}" if isinstance(self.sasl, PasswordLogin) else ""
        return f"client.id {self.client_id!r}{user}"

    def tls(self) -> ssl.SSLContext | None:
        """The TLS context from the `ssl.*` settings, created once; None if the protocol does not use TLS.

        Raises:
            ConfigurationError: See `tls_context`.
        """
        if not self.protocol.endswith("SSL"):
            return None
        if not self._tls:
            self._tls.append(tls_context(self.properties))
        return self._tls[0]


def parse_addresses(text: Any, given: Iterable[str] = ()) -> tuple[Address, ...]:
    """Parse `host:port,host:port`; `protocol://` in front and a missing port are allowed, IPv6 addresses need brackets.

    `given` are the names of the settings, of which one may be misspelt.

    Raises:
        ConfigurationError: The text is empty, or a part does not have this form.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()] if isinstance(text, str) else []
    if not parts:
        raise ConfigurationError(
            "No Kafka servers are configured.",
            cause=misspelt(given, ["bootstrap.servers"]),
            next_step="set bootstrap.servers (environment: DUALWRITE_KAFKA_BOOTSTRAP_SERVERS), for example to 'localhost:9092'",
        )
    return tuple(map(_address, parts))


def _address(text: str) -> Address:
    found = _HOST_AND_PORT.fullmatch(text.rsplit("://", 1)[-1])
    if found is None:
        raise ConfigurationError(f"bootstrap.servers contains {text!r}, which is not host:port.")
    host = found["ipv6"] or found["host"]
    number = int(found["port"] or DEFAULT_PORT)
    if not 0 < number < 65536:  # noqa: PLR2004  (the range of TCP ports)
        raise ConfigurationError(f"bootstrap.servers contains {text!r}: {number} is not a port number.")
    return Address(host, number)


def _milliseconds(given: Mapping[str, Any], name: str, default: int) -> int:
    value = given.get(name, default)
    try:
        number = int(value)
    except (TypeError, ValueError):
        raise ConfigurationError(f"{name} is {value!r}, not a number of milliseconds.") from None
    if number < 0 or (number == 0 and name in given):
        raise ConfigurationError(f"{name} is {value!r}; it must be greater than 0.")
    return number


def _refuse_unsafe_settings(given: Mapping[str, Any]) -> None:
    if "transactional.id" in given:
        raise ConfigurationError(
            "transactional.id is set in the Kafka settings.",
            next_step="pass it to dualwrite as transactional_id: the ids that Kafka sees are derived from it",
        )
    for name in ("acks", "request.required.acks"):
        if name in given and str(given[name]).lower() not in ("all", "-1"):
            raise ConfigurationError(f"{name} is {given[name]!r}; transactions require 'all'.")
    for name in ("enable.idempotence", "delivery.report.only.error"):
        wanted = name == "enable.idempotence"
        if name in given and (str(given[name]).lower() in TRUE) is not wanted:
            raise ConfigurationError(f"{name} is {given[name]!r}; transactions require {'true' if wanted else 'false'}.")
