"""Chroots, ACLs, authentication, TLS, and the errors for a server that can't be reached."""

from __future__ import annotations

import gc
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from kazoo.client import KazooClient
from kazoo.security import CREATOR_ALL_ACL, make_digest_acl
from zookeeper_scene import ID, ORDER, STATE, recorded, until

from dualwrite.errors import StoreCommitFailedError, StoreError, StoreUnavailableError
from dualwrite.stores.identity import StoreIdentity
from dualwrite.stores.zookeeper import ZooKeeperStore
from fixtures.pace import LIMIT, limit
from fixtures.zookeeper_client import zookeeper_client
from fixtures.zookeeper_server import ZooKeeperServer

# --- chroot ---------------------------------------------------------------------------------------------------------------


def test_a_missing_chroot_is_created(zookeeper_server: ZooKeeperServer, chroot: str, plain: KazooClient) -> None:
    deep = zookeeper_server.url_at(zookeeper_server.port, f"{chroot}/a/b/c")
    with ZooKeeperStore.from_url(deep) as store, ZooKeeperStore.from_url(deep) as second:
        recorded(store, store.claim(ID, "tests", timeout=LIMIT)).commit()
        assert second.list() == [ID]
    assert plain.get(f"/a/b/c{ORDER}")[0] == b"chair"
    assert plain.exists(f"/a/b/c/kafka_transaction_state/{ID}")


def test_a_chroot_that_may_not_be_created(zookeeper_server: ZooKeeperServer, chroot: str, plain: KazooClient) -> None:
    plain.create("/closed", acl=[make_digest_acl("admin", "admin", all=True)])
    inside = zookeeper_server.url_at(zookeeper_server.port, f"{chroot}/closed/a/b")
    with ZooKeeperStore.from_url(inside) as store:
        for call in (store.check, lambda: store.claim(ID, "tests", timeout=LIMIT)):
            with pytest.raises(StoreError, match="not permitted to create it") as caught:
                call()
            assert f"create {chroot}/closed/a; create {chroot}/closed/a/b" in str(caught.value.next_step)


def test_a_chroot_that_is_deleted(zookeeper_server: ZooKeeperServer, chroot: str, store: ZooKeeperStore) -> None:
    store.check()  # creates it
    with zookeeper_client(zookeeper_server.hosts) as client:
        client.delete(chroot, recursive=True)
    with pytest.raises(StoreError, match="storing the database's id"):
        store.set_identity(StoreIdentity.new(""), expected=None)


# --- ACLs -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def alices(zookeeper_server: ZooKeeperServer, chroot: str, plain: KazooClient) -> Iterator[ZooKeeperStore]:
    url = f"zookeeper://alice:wonder%3Aland@{zookeeper_server.hosts}{chroot}/alice?acl=creator"
    with ZooKeeperStore.from_url(url) as made:
        yield made


def test_nodes_have_the_acl(alices: ZooKeeperStore) -> None:
    alices.claim(ID, "tests", timeout=LIMIT)
    alice = make_digest_acl("alice", "wonder:land", all=True)
    for path in ("/", "/kafka_transaction_state", f"/kafka_transaction_state/{ID}"):
        assert alices.client.get_acls(path)[0] == [alice]
    assert "wonder" not in alices.description


def test_denied_access_is_reported_with_the_next_step(
    alices: ZooKeeperStore, zookeeper_server: ZooKeeperServer, chroot: str
) -> None:
    claim = alices.claim(ID, "tests", timeout=LIMIT)
    with ZooKeeperStore.from_url(zookeeper_server.url_at(zookeeper_server.port, f"{chroot}/alice")) as other:
        for call in (
            lambda: other.read(ID),
            lambda: other.claim(ID, "other", timeout=LIMIT),
            lambda: other.claim("another", "other", timeout=LIMIT),
            other.list,
            lambda: other.begin(claim),
        ):
            with pytest.raises(StoreError, match="does not permit") as caught:
                call()
            assert not isinstance(caught.value, StoreUnavailableError)
            assert "setAcl" in str(caught.value.next_step)
    assert alices.read_claimed(claim).owner == "tests"


def test_an_operation_that_is_not_permitted(store: ZooKeeperStore, plain: KazooClient) -> None:
    plain.create("/closed", acl=[make_digest_acl("admin", "admin", all=True)])
    claim = store.claim(ID, "tests", timeout=LIMIT)
    transaction = store.begin(claim)
    transaction.handle.create(ORDER)
    transaction.handle.set_data("/closed", b"")
    transaction.record(STATE, generation=0, transaction_number=1)
    with pytest.raises(StoreCommitFailedError, match="set_data of '/closed': NoAuthError"):
        transaction.commit()
    assert plain.exists(ORDER) is None


def test_a_row_that_may_only_be_read(store: ZooKeeperStore, plain: KazooClient) -> None:
    claim = store.claim(ID, "tests", timeout=LIMIT)
    transaction = recorded(store, claim)
    admin = make_digest_acl("admin", "admin", all=True)
    everybody = make_digest_acl("x", "x", read=True)._replace(id=plain.get_acls("/")[0][0].id)
    plain.set_acls(f"/kafka_transaction_state/{ID}", [admin, everybody])
    with pytest.raises(StoreCommitFailedError, match="writing the row of the id failed: NoAuthError"):
        transaction.commit()
    assert plain.exists(ORDER) is None
    assert store.read_claimed(claim).prepared_state is None


def test_a_default_acl_of_the_client_of_the_user(zookeeper_server: ZooKeeperServer, chroot: str) -> None:
    client = KazooClient(
        f"{zookeeper_server.hosts}{chroot}", default_acl=CREATOR_ALL_ACL, auth_data=[("digest", "bob:builder")]
    )
    with ZooKeeperStore(client) as store:
        store.claim(ID, "tests", timeout=LIMIT)
        bob = [make_digest_acl("bob", "builder", all=True)]
        assert client.get_acls(f"/kafka_transaction_state/{ID}")[0] == bob
        assert client.get_acls("/")[0] == bob
    client.stop()
    client.close()


# --- authentication -------------------------------------------------------------------------------------------------------


def test_a_scheme_that_the_server_refuses(url: str) -> None:
    with ZooKeeperStore.from_url(url, auth_data=[("nonsense", "secret")], connect_timeout=LIMIT) as store:
        for _ in range(2):  # kazoo's loop has ended; it is started again
            with pytest.raises(StoreUnavailableError, match="refused the credentials") as caught:
                store.check()
            assert "sasl_options" in str(caught.value.next_step)
            assert "secret" not in str(caught.value)


def test_credentials_are_not_logged(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.DEBUG, logger="dualwrite.stores.zookeeper.client"),
        ZooKeeperStore.from_url(url.replace("://", "://alice:wonderland@")) as store,
    ):
        store.claim(ID, "tests", timeout=LIMIT)
    assert "Sending request" in caplog.text
    assert "wonderland" not in caplog.text


@pytest.fixture(scope="module")
def sasl_server() -> Iterator[ZooKeeperServer]:
    pytest.importorskip("puresasl")
    with ZooKeeperServer(sasl_users={"alice": "wonderland"}) as server:
        yield server


@pytest.mark.slow
def test_sasl(sasl_server: ZooKeeperServer) -> None:
    url = sasl_server.url.replace("://", "://alice:wonderland@") + "?sasl_mechanism=DIGEST-MD5&acl=creator"
    with ZooKeeperStore.from_url(url) as store:
        recorded(store, store.claim(ID, "tests", timeout=LIMIT)).commit()
        (acl,) = store.client.get_acls(f"/kafka_transaction_state/{ID}")[0]
        assert (acl.id.scheme, acl.id.id) == ("sasl", "alice")
        assert "wonderland" not in store.description
    with ZooKeeperStore.from_url(sasl_server.url) as other, pytest.raises(StoreError, match="does not permit"):
        other.read(ID)


def test_sasl_with_a_wrong_password(sasl_server: ZooKeeperServer) -> None:
    options = {"mechanism": "DIGEST-MD5", "username": "alice", "password": "guessed"}
    with (
        ZooKeeperStore.from_url(sasl_server.url, sasl_options=options, connect_timeout=LIMIT) as store,
        pytest.raises(StoreUnavailableError, match="refused the credentials"),
    ):
        store.check()
    assert "service" not in options


# --- TLS ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def tls_server(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ZooKeeperServer, int]]:
    folder = tmp_path_factory.mktemp("tls")
    issued = authority.issue_cert("localhost", "127.0.0.1")
    key = load_pem_private_key(issued.private_key_pem.bytes(), None)
    pkcs8 = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())  # the only format that ZooKeeper reads
    (folder / "server.pem").write_bytes(pkcs8 + b"".join(each.bytes() for each in issued.cert_chain_pems))
    authority.cert_pem.write_to_path(folder / "ca.pem")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        "secureClientPort": str(port),
        "secureClientPortAddress": "127.0.0.1",
        "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
        "ssl.keyStore.location": str(folder / "server.pem"),
        "ssl.trustStore.location": str(folder / "ca.pem"),
        "ssl.clientAuth": "none",
    }
    with ZooKeeperServer(settings=settings) as server:
        yield server, port


@pytest.mark.slow
def test_tls(tls_server: tuple[ZooKeeperServer, int], authority: trustme.CA, tmp_path: Path) -> None:
    server, port = tls_server
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    url = f"zookeeper://localhost:{port}?use_ssl=true&ca={tmp_path / 'ca.pem'}&check_hostname=true"
    with ZooKeeperStore.from_url(url) as store:
        recorded(store, store.claim(ID, "tests", timeout=LIMIT)).commit()
    with ZooKeeperStore.from_url(server.url) as plain:
        assert plain.client.hosts
        assert plain.list() == [ID]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_tls_without_trust(tls_server: tuple[ZooKeeperServer, int], caplog: pytest.LogCaptureFixture) -> None:
    """Kazoo leaves the socket of a failed handshake to the garbage collector, and keeps it in its log records."""
    _, port = tls_server
    with (
        ZooKeeperStore.from_url(f"zookeeper://localhost:{port}?use_ssl=true&connect_timeout=1") as store,
        pytest.raises(StoreUnavailableError, match="accepts connections, but did not open a session"),
    ):
        store.check()
    caplog.clear()
    gc.collect()


# --- no server ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ("127.0.0.1:1", "127.0.0.1:1: Connection refused"),
        ("nowhere.invalid:2181", "the name 'nowhere.invalid' can't be resolved"),
    ],
)
def test_the_error_says_why_there_is_no_connection(hosts: str, said: str) -> None:
    with ZooKeeperStore.from_url(f"zookeeper://u:secret@{hosts}/a", connect_timeout=0.5) as store:
        with pytest.raises(StoreUnavailableError) as caught:
            store.check()
        assert said in str(caught.value.cause)
        assert f"zookeeper://{hosts}/a" in str(caught.value)
        assert "secret" not in str(caught.value)


def test_one_of_several_servers_is_enough(zookeeper_server: ZooKeeperServer, chroot: str) -> None:
    with ZooKeeperStore.from_url(f"zookeeper://127.0.0.1:1,{zookeeper_server.hosts}{chroot}") as store:
        assert store.claim(ID, "tests", timeout=LIMIT).fence == 1


@pytest.mark.slow
def test_a_server_that_does_not_answer(own_server: ZooKeeperServer) -> None:
    waits = {"session_timeout": limit(1), "connect_timeout": limit(2), "request_timeout": limit(1)}
    with ZooKeeperStore.from_url(own_server.url, **waits) as store:
        store.check()
        own_server.pause()
        with pytest.raises(StoreUnavailableError):
            store.check()
        own_server.resume()
        until(lambda: store.client.connected)
        store.check()


def test_durability_is_unknown_but_a_server_says_whether_it_is_alone(store: ZooKeeperStore) -> None:
    assert store.durability() == {"forceSync": "not visible", "mode": "standalone"}
