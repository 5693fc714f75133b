"""Kafka settings: one dict in librdkafka's names, checked once, and what our own connections need derived from it.

The names are those of librdkafka's CONFIGURATION.md (`bootstrap.servers`, `security.protocol`, `sasl.*`, `ssl.*`). The dict
goes to librdkafka nearly as it is; the coordinator's connections use the parts named in `KafkaConfig`.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from dualwrite.errors import ConfigurationError
from dualwrite.kafka.client.tls import tls_context

PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
DEFAULT_PORT: Final = 9092

_HOST_AND_PORT: Final = re.compile(r"(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<host>[^\[\]:]+))(?::(?P<port>[0-9]+)?)?", re.ASCII)
_TRUE: Final = ("true", "1", "yes", "t")


@dataclass(frozen=True, slots=True)
class Address:
    """Host and port of a broker."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Sasl:
    """A SASL login. The password does not show in `repr`."""

    mechanism: str
    username: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class KafkaConfig:
    """The settings of one Kafka cluster.

    Args:
        bootstrap: The servers to begin with.
        protocol: One of `PROTOCOLS`.
        sasl: The login, where the protocol has SASL.
        client_id: How we present ourselves.
        socket_timeout: Seconds that one request may take (`socket.timeout.ms`).
        connect_timeout: Seconds that connecting and logging in may take (`socket.connection.setup.timeout.ms`).
        keepalive: Whether the system looks after idle connections (`socket.keepalive.enable`; on, unless switched off).
        transaction_timeout_ms: `transaction.timeout.ms` as the user set it, or None.
        properties: Everything the user gave, for librdkafka.
    """

    bootstrap: tuple[Address, ...]
    protocol: str
    sasl: Sasl | None
    client_id: str
    socket_timeout: float
    connect_timeout: float
    keepalive: bool
    transaction_timeout_ms: int | None
    properties: Mapping[str, Any] = field(repr=False)
    _tls: list[ssl.SSLContext] = field(default_factory=list, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, settings: KafkaConfig | Mapping[str, Any] | str) -> KafkaConfig:
        """Check the user's settings; a text is taken for `bootstrap.servers`.

        Raises:
            ConfigurationError: A setting is missing, of a wrong form, or one that would break the promise.
        """
        if isinstance(settings, KafkaConfig):
            return settings
        if isinstance(settings, str):
            settings = {"bootstrap.servers": settings}
        if not isinstance(settings, Mapping):
            raise ConfigurationError(
                f"Kafka's settings are a dict in librdkafka's names or a 'host:port' text, not {type(settings).__name__}."
            )
        given = {str(name): value for name, value in settings.items()}
        _refuse_what_breaks_the_promise(given)
        protocol = str(given.get("security.protocol", "PLAINTEXT")).upper()
        if protocol not in PROTOCOLS:
            raise ConfigurationError(f"security.protocol is {protocol!r}.", next_step=f"one of {', '.join(PROTOCOLS)}")
        timeout = given.get("transaction.timeout.ms")
        return cls(
            bootstrap=parse_addresses(given.get("bootstrap.servers", given.get("metadata.broker.list", ""))),
            protocol=protocol,
            sasl=_sasl(given) if protocol.startswith("SASL_") else None,
            client_id=str(given.get("client.id", "dualwrite")),
            socket_timeout=_milliseconds(given, "socket.timeout.ms", 30_000) / 1000,
            connect_timeout=_milliseconds(given, "socket.connection.setup.timeout.ms", 10_000) / 1000,
            keepalive=str(given.get("socket.keepalive.enable", "true")).lower() in _TRUE,
            transaction_timeout_ms=None if timeout is None else _milliseconds(given, "transaction.timeout.ms", 0),
            properties=MappingProxyType(given),
        )

    @property
    def servers(self) -> str:
        """The bootstrap servers, as they are written in settings."""
        return ",".join(map(str, self.bootstrap))

    def tls(self) -> ssl.SSLContext | None:
        """The TLS context by the `ssl.*` settings, made once; None where the protocol has no TLS.

        Raises:
            ConfigurationError: See `tls_context`.
        """
        if not self.protocol.endswith("SSL"):
            return None
        if not self._tls:
            self._tls.append(tls_context(self.properties))
        return self._tls[0]


def parse_addresses(text: Any) -> tuple[Address, ...]:
    """Read `host:port,host:port`; a protocol in front is allowed, IPv6 stands in brackets, the port may be left out.

    Raises:
        ConfigurationError: Nothing is there, or a part is not of this form.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()] if isinstance(text, str) else []
    if not parts:
        raise ConfigurationError(
            "No Kafka servers are given.",
            next_step="set bootstrap.servers (environment: DUALWRITE_KAFKA_BOOTSTRAP_SERVERS), for instance 'localhost:9092'",
        )
    return tuple(map(_address, parts))


def _address(text: str) -> Address:
    found = _HOST_AND_PORT.fullmatch(text.rsplit("://", 1)[-1])
    if found is None:
        raise ConfigurationError(f"bootstrap.servers holds {text!r}, which is not host:port.")
    host = found["ipv6"] or found["host"]
    number = int(found["port"] or DEFAULT_PORT)
    if not 0 < number < 65536:  # noqa: PLR2004  (the range of TCP ports)
        raise ConfigurationError(f"bootstrap.servers holds {text!r}: {number} is not a port.")
    return Address(host, number)


def _milliseconds(given: Mapping[str, Any], name: str, default: int) -> int:
    value = given.get(name, default)
    try:
        number = int(value)
    except (TypeError, ValueError):
        raise ConfigurationError(f"{name} is {value!r}, not a number of milliseconds.") from None
    if number < 0 or (number == 0 and name in given):
        raise ConfigurationError(f"{name} is {value!r}; it must be above 0.")
    return number


def _refuse_what_breaks_the_promise(given: Mapping[str, Any]) -> None:
    if "transactional.id" in given:
        raise ConfigurationError(
            "transactional.id stands among Kafka's settings.",
            next_step="give it to dualwrite as transactional_id: the ids that Kafka sees are derived from it",
        )
    for name in ("acks", "request.required.acks"):
        if name in given and str(given[name]).lower() not in ("all", "-1"):
            raise ConfigurationError(f"{name} is {given[name]!r}; a transaction needs 'all'.")
    for name in ("enable.idempotence", "delivery.report.only.error"):
        wanted = name == "enable.idempotence"
        if name in given and (str(given[name]).lower() in _TRUE) is not wanted:
            raise ConfigurationError(f"{name} is {given[name]!r}; a transaction needs it {'on' if wanted else 'off'}.")


def _sasl(given: Mapping[str, Any]) -> Sasl:
    mechanism = str(given.get("sasl.mechanism", given.get("sasl.mechanisms", ""))).upper()
    if mechanism not in MECHANISMS:
        raise ConfigurationError(
            f"sasl.mechanism is {mechanism!r}.", next_step=f"dualwrite speaks {', '.join(MECHANISMS)}", mechanism=mechanism
        )
    username, password = given.get("sasl.username"), given.get("sasl.password")
    if not username or not password:
        raise ConfigurationError(f"SASL {mechanism} needs sasl.username and sasl.password.")
    return Sasl(mechanism, str(username), str(password))
