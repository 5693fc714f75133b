"""Claims on SQL databases: what they wait for, timeouts, interrupts, lost connections."""

from __future__ import annotations

import time

import pytest
import sqlalchemy as sa
from store_scene import ID, STATE, assert_nothing_is_checked_out

from dualwrite.errors import ClaimTimeoutError, FencedError, StoreUnavailableError
from dualwrite.stores.base import Claim
from dualwrite.stores.sql import SqlStateStore
from dualwrite.testing.proxy import TcpProxy
from fixtures.database import shorten_pauses
from fixtures.pace import LIMIT


@pytest.mark.slow
def test_a_claim_times_out_and_names_the_blocker(store: SqlStateStore, rival: SqlStateStore, claim: Claim) -> None:
    transaction = store.begin(claim)
    transaction.record(STATE, generation=0, transaction_number=1)
    pid, expected, way_out = None, "its holder is not known", "try again"
    if store.engine.name == "postgresql":
        pid = transaction.handle.scalar(sa.text("SELECT pg_backend_pid()"))
        expected, way_out = f"pid {pid} (application_name 'dualwrite'", f"pg_terminate_backend({pid})"
    elif store.engine.name == "sqlite":
        expected, way_out = "one write lock", "fuser"
    began = time.monotonic()
    with pytest.raises(ClaimTimeoutError) as caught:
        rival.claim(ID, "theirs", timeout=0.7)
    assert time.monotonic() - began > 0.6
    assert (caught.value.timeout, caught.value.blocker_pid) == (0.7, pid)
    assert expected in str(caught.value)
    assert way_out in caught.value.next_step
    assert_nothing_is_checked_out(rival)
    transaction.commit()
    assert rival.claim(ID, "theirs", timeout=LIMIT).fence == 2


def test_a_claim_names_the_holder_of_a_table_lock(postgres_store: SqlStateStore) -> None:
    with postgres_store.engine.connect() as connection:
        pid = connection.scalar(sa.text("SELECT pg_backend_pid()"))
        connection.execute(sa.text("LOCK TABLE kafka_transaction_state IN ACCESS EXCLUSIVE MODE"))
        with pytest.raises(ClaimTimeoutError) as caught:
            postgres_store.claim(ID, "ours", timeout=0.3)
    assert caught.value.blocker_pid == pid


def test_an_open_transaction_of_the_user_blocks_claims_on_sqlite(sqlite_url: str) -> None:
    with SqlStateStore.from_url(sqlite_url, lock_timeout=0.2) as store:
        claim = store.claim(ID, "ours", timeout=LIMIT)
        transaction = store.begin(claim)
        with pytest.raises(StoreUnavailableError, match="one write lock"):
            store.begin(claim)
        assert store.engine.pool.checkedout() == 1  # type: ignore[attr-defined]  # QueuePool
        transaction.rollback()
        store.begin(claim).rollback()


def test_a_claim_keeps_the_busy_timeout_of_the_user(sqlite_url: str) -> None:
    engine = sa.create_engine(sqlite_url, connect_args={"timeout": 1.234}, pool_size=1)
    SqlStateStore(engine).claim(ID, "ours", timeout=LIMIT)
    with engine.connect() as connection:
        assert connection.scalar(sa.text("PRAGMA busy_timeout")) == 1234
    engine.dispose()


# --- connections that break -----------------------------------------------------------------------------------------------


def test_a_claim_with_expected_fence_does_not_mistake_a_later_claim_for_its_own(
    proxied_store: SqlStateStore, postgres_proxy: TcpProxy, postgres_store: SqlStateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later one waits until the server ends our transaction, which pauses."""
    shorten_pauses(monkeypatch, 1)
    first = proxied_store.claim(ID, "ours", timeout=LIMIT)

    def claim_meanwhile(link: object) -> None:
        postgres_store.claim(ID, "ours", timeout=LIMIT)
        link.cut()  # type: ignore[attr-defined]  # Link

    postgres_proxy.on_client_bytes(b"UPDATE public.kafka_transaction_state", claim_meanwhile)
    with pytest.raises(FencedError):
        proxied_store.claim(ID, "ours", timeout=LIMIT, expected_fence=first.fence)
