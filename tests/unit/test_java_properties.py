"""Files for Apache's tools: java.util.Properties' syntax, and what becomes of each setting."""

from __future__ import annotations

import pytest

from dualwrite.cli.java_properties import mapped, properties
from dualwrite.cli.tool_group import in_our_order
from dualwrite.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a=1\nb : 2\nc 3\nd", {"a": "1", "b": "2", "c": "3", "d": ""}),
        ("# a=1\n! b=2\n\n  c = d = e \n", {"c": "d = e "}),
        ("a = one, \\\n    two\nb=3", {"a": "one, two", "b": "3"}),
        ("a=x\\\\\nb=\\u00e9\\t\\q", {"a": "x\\", "b": "\u00e9\tq"}),
        ("a\\=b=c", {"a=b": "c"}),
        ("a=1\na=2", {"a": "2"}),
    ],
)
def test_the_syntax_of_properties_files(text: str, found: dict[str, str]) -> None:
    assert properties(text) == found


def test_settings_with_an_equivalent() -> None:
    login = 'org.apache.kafka.common.security.scram.ScramLoginModule required username="alice" password="a\\"b;c";'
    assert mapped({"security.protocol": "SASL_SSL", "sasl.mechanism": "SCRAM-SHA-512", "sasl.jaas.config": login}) == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "alice",
        "sasl.password": 'a"b;c',
    }
    pem = {"ssl.truststore.type": "PEM", "ssl.truststore.location": "/ca.pem", "ssl.keystore.type": "PEM"}
    assert mapped({**pem, "ssl.keystore.location": "/me.pem", "ssl.key.password": "p"}) == {
        "ssl.ca.location": "/ca.pem",
        "ssl.certificate.location": "/me.pem",
        "ssl.key.location": "/me.pem",
        "ssl.key.password": "p",
    }
    assert mapped({"request.timeout.ms": "5000", "ssl.endpoint.identification.algorithm": ""}) == {
        "socket.timeout.ms": "5000",
        "ssl.endpoint.identification.algorithm": "none",
    }


@pytest.mark.parametrize(
    "given",
    [
        {"ssl.truststore.location": "/trust.jks"},
        {"ssl.truststore.type": "PKCS12", "ssl.truststore.location": "/trust.p12"},
        {"ssl.truststore.password": "p"},
        {"sasl.jaas.config": "com.sun.security.auth.module.Krb5LoginModule required useKeyTab=true;"},
        {"sasl.login.callback.handler.class": "Other"},
    ],
)
def test_settings_without_an_equivalent_are_refused(given: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="--command-config"):
        mapped(given)


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("--bootstrap-server x list --state y", "list --bootstrap-server x --state y"),
        ("--bootstrap-server=x --json list", "list --bootstrap-server=x --json"),
        ("list --kafka x", "list --kafka x"),
        ("--kafka list describe id", "describe --kafka list id"),
        ("--help", "--help"),
        ("--kafka x unknown", "--kafka x unknown"),
        ("", ""),
    ],
)
def test_options_before_the_command(given: str, ours: str) -> None:
    assert in_our_order(given.split(), {"list", "describe"}) == ours.split()
