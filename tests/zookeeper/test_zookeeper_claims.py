"""Claims on ZooKeeper: compare-and-set, rivals, lost answers, timeouts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest
from zookeeper_scene import ID, MULTI, STATE, recorded

from dualwrite.errors import ClaimTimeoutError, FencedError, StoreUnavailableError
from dualwrite.stores.base import Claim
from dualwrite.stores.zookeeper import ZooKeeperStore
from dualwrite.testing.proxy import Link, TcpProxy
from fixtures.pace import LIMIT

CHECK = b"\x00\x00\x00\x0e\x00\x00\x00\x0d"
"""How a multi begins on the wire that checks a version: its type, and that of its operation."""


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0, 1.2], ids=["between two attempts", "in an attempt"])
def test_a_claim_gives_up_if_others_always_claim_first(
    proxied_store: ZooKeeperStore, proxy: TcpProxy, store: ZooKeeperStore, claim: Claim, pause: float
) -> None:
    """A rival that is faster every time, until the claim's timeout."""
    proxied_store.check()
    attempts = itertools.count(1)

    def overtake(_: Link) -> None:
        store.claim(ID, "theirs", timeout=LIMIT)
        time.sleep(pause if next(attempts) > 1 else 0)  # the second attempt's write has no time left

    proxy.on_client_bytes(MULTI, overtake, times=1000)
    with pytest.raises(ClaimTimeoutError, match=r"others changed its row in [1-9]\d* attempts") as caught:
        proxied_store.claim(ID, "ours", timeout=1)
    assert caught.value.retriable
    assert caught.value.timeout == 1


@pytest.mark.parametrize("check", [ZooKeeperStore.read_claimed, ZooKeeperStore.begin], ids=["read_claimed", "begin"])
def test_a_check_of_the_fence_sees_a_claim_made_during_its_read(
    proxied_store: ZooKeeperStore,
    proxy: TcpProxy,
    store: ZooKeeperStore,
    claim: Claim,
    check: Callable[[ZooKeeperStore, Claim], object],
) -> None:
    """Another client changes the row between the read and the check of its version, which a quorum confirms.

    A leader that was deposed, and does not know it yet, answers the read in the same way: as before the claim.
    """
    proxied_store.check()
    proxy.on_client_bytes(CHECK, lambda _: store.claim(ID, "theirs", timeout=LIMIT))
    with pytest.raises(FencedError, match="theirs"):
        check(proxied_store, claim)


# --- connections that break -----------------------------------------------------------------------------------------------


def test_a_first_claim_whose_answer_was_lost_recognizes_itself(proxied_store: ZooKeeperStore, proxy: TcpProxy) -> None:
    proxied_store.claim("another", "ours", timeout=LIMIT)
    proxy.on_client_bytes(b"prepared_transaction_state", Link.cut, when="answered")
    assert proxied_store.claim(ID, "ours", timeout=LIMIT).fence == 1


@pytest.mark.slow
def test_a_claim_gives_up_on_an_unreachable_server(proxied_store: ZooKeeperStore, proxy: TcpProxy) -> None:
    proxy.refuse()
    with pytest.raises(StoreUnavailableError) as caught:
        proxied_store.claim(ID, "ours", timeout=1)
    assert caught.value.retriable
    assert "--url" in str(caught.value.next_step)
    proxy.refuse(refusing=False)
    assert proxied_store.claim(ID, "ours", timeout=LIMIT).fence == 1


def test_a_claim_that_timed_out_cannot_take_effect_later(
    proxied_store: ZooKeeperStore, proxy: TcpProxy, store: ZooKeeperStore, claim: Claim
) -> None:
    """A request that was in flight when the claim timed out arrives after another's claim, and is refused."""
    proxied_store.check()
    links: list[Link] = []

    def hold(link: Link) -> None:
        links.append(link)
        link.blackhole("client_to_server")

    proxy.on_client_bytes(MULTI, hold)
    with pytest.raises(StoreUnavailableError):
        proxied_store.claim(ID, "ours", timeout=0.5)
    theirs = store.claim(ID, "theirs", timeout=LIMIT)
    links[0].resume()
    assert proxied_store.read(ID) == store.read_claimed(theirs)
    recorded(store, theirs).commit()
    assert store.read_claimed(theirs).prepared_state == STATE
