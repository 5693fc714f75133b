"""URLs of ZooKeeper stores: hosts, options, passwords."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.security import CREATOR_ALL_ACL

from dualwrite.errors import ConfigurationError
from dualwrite.stores.registry import store_from_url
from dualwrite.stores.zookeeper import ZooKeeperStore
from dualwrite.stores.zookeeper.paths import parse_url
from fixtures.tables import table


def test_a_store_from_a_url_connects_lazily() -> None:
    with store_from_url("zookeeper://nowhere.invalid:1,[::1]:2,third/a/b") as store:
        assert isinstance(store, ZooKeeperStore)
        assert store.description == "zookeeper://nowhere.invalid:1,[::1]:2,third:2181/a/b"
        assert not store.client.connected
        assert not store.client.handler.running


@table(
    ("url", "hosts", "options"),
    [
        ("zookeeper://a", "a", {}),
        ("zookeeper://a:1,b:2/", "a:1,b:2", {}),
        ("ZooKeeper://a//c/d/", "a/c/d", {}),
        ("zookeeper://a/c%20d", "a/c d", {}),
        ("zookeeper://u:p%40%2F@a", "a", {"auth_data": [("digest", "u:p@/")]}),
        ("zookeeper://u:p:q@a", "a", {"auth_data": [("digest", "u:p:q")]}),
        ("zookeeper://a?session_timeout=3&connect_timeout=0.5", "a", {"session_timeout": 3.0, "connect_timeout": 0.5}),
        ("zookeeper://a?acl=creator&max_request_bytes=1000", "a", {"acl": CREATOR_ALL_ACL, "max_request_bytes": 1000}),
        ("zookeeper://a?use_ssl=true&ca=/x.pem&verify_certs=no", "a", {"use_ssl": True, "ca": "/x.pem", "verify_certs": False}),
        (
            "zookeeper://u:p@a?sasl_mechanism=DIGEST-MD5",
            "a",
            {"sasl_options": {"mechanism": "DIGEST-MD5", "username": "u", "password": "p"}},
        ),
        (
            "zookeeper://a?sasl_mechanism=GSSAPI&sasl_service=zk",
            "a",
            {"sasl_options": {"mechanism": "GSSAPI", "service": "zk"}},
        ),
    ],
)
def test_hosts_and_options_of_a_url(url: str, hosts: str, options: dict[str, Any]) -> None:
    parsed = parse_url(url)
    assert (parsed.hosts, dict(parsed.options)) == (hosts, options)


@table(
    "url",
    [
        "zookeeper:a",
        "zookeeper://",
        "zookeeper:///chroot",
        "zookeeper://u:secret@a:port",
        "zookeeper://u:secret@a/../b",
        "zookeeper://secret@a",
        "zookeeper://a?keyfile_pasword=secret",
        "zookeeper://a?session_timeout=secret",
        "zookeeper://a?session_timeout=-1",
        "zookeeper://a?acl=secret",
        "zookeeper://a?use_ssl=secret",
    ],
)
def test_an_invalid_url_is_not_quoted(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ZooKeeperStore.from_url(url)
    assert "secret" not in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_passwords_are_not_shown() -> None:
    with ZooKeeperStore.from_url("zookeeper://u:secret@a?keyfile_password=secret") as store:
        assert store.description == "zookeeper://a:2181"
    assert "secret" not in repr(parse_url("zookeeper://u:secret@a"))


def test_arguments_win_over_the_url() -> None:
    with ZooKeeperStore.from_url("zookeeper://a?session_timeout=3&use_ssl=true", session_timeout=7, use_ssl=False) as store:
        assert store.client._session_timeout == 7000
        assert store.client.use_ssl is False


def test_an_option_unknown_to_kazoo() -> None:
    with pytest.raises(ConfigurationError, match="retries"):
        ZooKeeperStore.from_url("zookeeper://a", retries=3)


def test_a_client_of_the_user_is_described_by_its_hosts() -> None:
    client = KazooClient("a:1/b", auth_data=[("digest", "u:secret")])
    assert ZooKeeperStore(client).description == "zookeeper://a:1/b"
    client.close()
