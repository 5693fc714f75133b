"""Listeners with TLS and SASL, in addition to every node's plain one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from dualwrite.devcluster.locations import DevClusterError

_PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
_SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"
_SCRAM_MECHANISMS = ("SCRAM-SHA-256", "SCRAM-SHA-512")


@dataclass(frozen=True)
class TlsFiles:
    """The broker's certificate, as PEM files; it must be valid for `127.0.0.1`.

    Args:
        ca: The authority's certificate: clients trust it, and brokers trust client certificates that it signed.
        certificate: The broker's certificate, followed by intermediate ones if there are any.
        key: Its private key in PKCS#8 (`BEGIN PRIVATE KEY`), not encrypted; Kafka reads no other format.
    """

    ca: Path
    certificate: Path
    key: Path

    def check(self) -> None:
        """Check the files, before a broker fails because of them.

        Raises:
            DevClusterError: A file is missing, or the key is not PKCS#8.
        """
        for path in (self.ca, self.certificate, self.key):
            if not Path(path).is_file():
                raise DevClusterError(f"The TLS file {path} does not exist.", next_step="create it, or correct its path")
        if "-----BEGIN PRIVATE KEY-----" not in Path(self.key).read_text(encoding="ascii", errors="replace"):
            raise DevClusterError(
                f"The private key {self.key} is not in PKCS#8 format, the only one that Kafka reads.",
                next_step=f"convert it: openssl pkcs8 -topk8 -nocrypt -in {self.key} -out key.pem",
            )


@dataclass(frozen=True)
class Security:
    """What the additional listeners require from a client.

    Each node gets `SASL_PLAINTEXT` (PLAIN, SCRAM-SHA-256, SCRAM-SHA-512) if there are users; `SSL`, and with users
    `SASL_SSL`, if there are TLS files. A client certificate is optional; if a client sends one, it is verified.

    Args:
        users: Name to password.
        tls: The broker's certificate.
    """

    users: Mapping[str, str] = field(default_factory=dict)
    tls: TlsFiles | None = None

    def __post_init__(self) -> None:
        for text in (*self.users.keys(), *self.users.values()):
            if not text or any(character in text for character in '"\\,[]=;\n'):
                raise DevClusterError(
                    'A user name or password is empty, or contains a line break or one of the characters " \\ , [ ] = ;',
                    next_step="choose a simpler one: this is a cluster for development",
                )

    @property
    def listeners(self) -> tuple[str, ...]:
        """Names of the additional listeners; each name is also its protocol."""
        sasl = ("SASL_PLAINTEXT",) if self.users else ()
        tls = ("SSL",) if self.tls else ()
        both = ("SASL_SSL",) if self.users and self.tls else ()
        return (*sasl, *tls, *both)

    @property
    def scram_arguments(self) -> list[str]:
        """Arguments for `kafka-storage format` that create the SCRAM credentials."""
        return [
            argument
            for name, password in self.users.items()
            for mechanism in _SCRAM_MECHANISMS
            for argument in ("--add-scram", f"{mechanism}=[name={name},password={password}]")
        ]

    def properties(self, keystore: Path) -> dict[str, str]:
        """Broker properties of the additional listeners, with the file that `write_keystore` writes."""
        properties: dict[str, str] = {}
        if self.users:
            properties["sasl.enabled.mechanisms"] = ",".join(("PLAIN", *_SCRAM_MECHANISMS))
            accounts = " ".join(f'user_{name}="{password}"' for name, password in self.users.items())
            for listener in ("sasl_plaintext", "sasl_ssl") if self.tls else ("sasl_plaintext",):
                prefix = f"listener.name.{listener}"
                properties[f"{prefix}.plain.sasl.jaas.config"] = f"{_PLAIN} required {accounts};"
                for mechanism in _SCRAM_MECHANISMS:
                    properties[f"{prefix}.{mechanism.lower()}.sasl.jaas.config"] = f"{_SCRAM} required;"
        if self.tls:
            properties |= {
                "ssl.keystore.type": "PEM",
                "ssl.keystore.location": str(keystore),
                "ssl.truststore.type": "PEM",
                "ssl.truststore.location": str(Path(self.tls.ca).absolute()),
                "ssl.client.auth": "requested",
            }
        return properties

    def write_keystore(self, keystore: Path) -> None:
        """Write key and certificate into the one file that Kafka expects, readable by its owner only."""
        if self.tls is None:
            return
        self.tls.check()
        keystore.touch(mode=0o600)
        keystore.write_text(
            f"{Path(self.tls.key).read_text('ascii')}\n{Path(self.tls.certificate).read_text('ascii')}", "ascii"
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON values for the cluster's record."""
        tls = self.tls and {name: str(Path(path).absolute()) for name, path in vars(self.tls).items()}
        return {"users": dict(self.users), "tls": tls}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Restore from the cluster's record."""
        tls = data["tls"] and TlsFiles(**{name: Path(path) for name, path in data["tls"].items()})
        return cls(users=data["users"], tls=tls or None)
