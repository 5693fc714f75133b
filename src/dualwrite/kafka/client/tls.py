"""TLS from the `ssl.*` settings, for our own connections: Python's `ssl`, with librdkafka's meaning of each setting."""

from __future__ import annotations

import ssl
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from dualwrite.errors import ConfigurationError

_HONOURED: Final = frozenset(
    {
        "ssl.ca.location",
        "ssl.ca.pem",
        "ssl.certificate.location",
        "ssl.certificate.pem",
        "ssl.cipher.suites",
        "ssl.crl.location",
        "ssl.endpoint.identification.algorithm",
        "ssl.key.location",
        "ssl.key.password",
        "ssl.key.pem",
    }
)
_STORES: Final = ("ssl.keystore.location", "ssl.keystore.password", "ssl.engine.location", "ssl.engine.id", "ssl.providers")
TRUE: Final = ("true", "1", "yes", "t")
"""How librdkafka writes that a setting is on."""


def tls_context(given: Mapping[str, Any]) -> ssl.SSLContext:
    """The context for these settings.

    As with librdkafka: if `ssl.ca.location` or `ssl.ca.pem` is given, only those authorities are trusted, else the system's.

    Raises:
        ConfigurationError: A file can't be read, a value is invalid, or Python's `ssl` does not support a setting.
    """
    _refuse_what_python_lacks(given)
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _load_authorities(context, given)
        _load_revocations(context, given)
        _load_own_certificate(context, given)
        if given.get("ssl.cipher.suites"):
            context.set_ciphers(str(given["ssl.cipher.suites"]))
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigurationError(
            f"No TLS context can be created from the ssl.* settings: {error}.",
            next_step="check ssl.ca.location, ssl.certificate.location, ssl.key.location, ssl.key.password, ssl.crl.location "
            "and ssl.cipher.suites",
        ) from error
    if str(given.get("ssl.endpoint.identification.algorithm", "https")).lower() == "none":
        context.check_hostname = False
    if str(given.get("enable.ssl.certificate.verification", "true")).lower() not in TRUE:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _refuse_what_python_lacks(given: Mapping[str, Any]) -> None:
    lacking = sorted(name for name in given if name.startswith("ssl") and name not in _HONOURED and given[name])
    if not lacking:
        return
    instead = (
        "use PEM files: ssl.ca.location, ssl.certificate.location, ssl.key.location"
        if any(name in _STORES for name in lacking)
        else "remove it, or set it for the whole process in OpenSSL's configuration file (OPENSSL_CONF)"
    )
    raise ConfigurationError(
        f"{', '.join(lacking)}: not supported by Python's ssl module, which dualwrite uses with either producer.",
        next_step=instead,
    )


def _load_authorities(context: ssl.SSLContext, given: Mapping[str, Any]) -> None:
    trust(context, given.get("ssl.ca.location"), given.get("ssl.ca.pem"))


def trust(context: ssl.SSLContext, location: Any, text: Any) -> None:
    """Trust the authorities of a file or folder and of a PEM text; without them, or with "probe", those of the system.

    Raises:
        OSError: They can't be read, or are no certificates.
    """
    if text:
        context.load_verify_locations(cadata=str(text))
    if location and location != "probe":
        path = Path(str(location))
        if path.is_dir():
            context.load_verify_locations(capath=str(path))
        else:
            context.load_verify_locations(cafile=str(path))
    elif not text:
        context.load_default_certs()


def _load_revocations(context: ssl.SSLContext, given: Mapping[str, Any]) -> None:
    if given.get("ssl.crl.location"):
        context.load_verify_locations(cafile=str(given["ssl.crl.location"]))
        context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF


def _load_own_certificate(context: ssl.SSLContext, given: Mapping[str, Any]) -> None:
    password = given.get("ssl.key.password")
    certificate, key = given.get("ssl.certificate.location"), given.get("ssl.key.location")
    if certificate and not given.get("ssl.key.pem"):
        context.load_cert_chain(str(certificate), str(key) if key else None, password)
        return
    texts = [str(given["ssl.certificate.pem"])] if given.get("ssl.certificate.pem") else []
    if certificate and not texts:
        texts.append(Path(str(certificate)).read_text(encoding="ascii"))
    if not texts:
        return
    if given.get("ssl.key.pem"):
        texts.append(str(given["ssl.key.pem"]))
    elif key:
        texts.append(Path(str(key)).read_text(encoding="ascii"))
    # Python loads certificates from files only; this file is readable by its owner only, and deleted at once.
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as together:
        together.write("\n".join((*texts, "")))
        together.flush()
        context.load_cert_chain(together.name, None, password)
