"""Tokens for Amazon MSK, signed with fixed credentials: their form, the settings, and what is said without credentials."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from dualwrite.errors import BrokerUnavailableError, ConfigurationError
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.logins import TokenLogin
from dualwrite.kafka.client.msk_iam import MskIam
from dualwrite.kafka.client.tokens import Token
from fixtures.tables import table

KEY_ID = "AKIAIOSFODNN7EXAMPLE"
SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"  # the example of AWS's documentation
CONFIG = "sasl.oauthbearer.config"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """An environment without credentials, and without a service that could give some."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "aws"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return monkeypatch


def token(config: str) -> Token:
    given = {
        "bootstrap.servers": "a:9098",
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.method": "msk-iam",
        CONFIG: config,
    }
    login = KafkaConfig.of(given).sasl
    assert isinstance(login, TokenLogin)
    return login.tokens.source.fetch()


def check(made: Token, region: str) -> None:
    """It is a signed request for kafka-cluster:Connect, which is valid for 15 minutes."""
    url = urlsplit(base64.urlsafe_b64decode(made.text + "=" * (-len(made.text) % 4)).decode())
    query = parse_qs(url.query)
    assert url.hostname == f"kafka.{region}.amazonaws.com"
    assert query["Action"] == ["kafka-cluster:Connect"]
    assert query["X-Amz-Credential"][0].startswith(f"{KEY_ID}/")
    assert query["X-Amz-Credential"][0].endswith(f"/{region}/kafka-cluster/aws4_request")
    assert query["X-Amz-Expires"] == ["900"]
    assert len(query["X-Amz-Signature"][0]) == 64
    assert 0 < made.seconds_left <= 900
    assert SECRET not in url.geturl()


def test_a_token_is_signed_for_the_region_with_the_credentials_of_the_environment(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    environment.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    check(token("region=eu-west-1"), "eu-west-1")
    environment.setenv("AWS_REGION", "us-east-2")
    check(token(""), "us-east-2")


def test_a_profile_can_be_chosen(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "aws").write_text(f"[shop]\naws_access_key_id={KEY_ID}\naws_secret_access_key={SECRET}\n")
    check(token("region=eu-west-1 profile=shop"), "eu-west-1")


@pytest.mark.usefixtures("environment")
def test_without_credentials_the_error_says_where_to_look() -> None:
    with pytest.raises(BrokerUnavailableError, match=r"(?s)No token from AWS IAM in eu-west-1.*finds no credentials.*aws sts"):
        token("region=eu-west-1")


@pytest.mark.usefixtures("environment")
@table(
    ("config", "says"),
    [
        ("", "needs a region"),
        ("region=", "needs a region"),
        ("zone=a", "unknown option 'zone'"),
        ("region=eu-west-1,profile=a,role=arn:aws:iam::1:role/x", "either a profile or a role"),
    ],
)
def test_settings_that_are_refused(config: str, says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        token(config)
    assert says in str(caught.value)


def test_equal_settings_are_one_source() -> None:
    assert MskIam.of({CONFIG: "region=a,role=b"}) == MskIam.of({CONFIG: "role=b region=a"}) == MskIam("a", role="b")
