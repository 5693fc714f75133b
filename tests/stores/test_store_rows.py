from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
import sqlalchemy as sa
from store_scene import ID, STATE, assert_nothing_is_checked_out

from dualwrite.errors import ClaimTimeoutError, FencedError, NotSettledError, StoredStateError, StoreUnavailableError
from dualwrite.producer_kind import ProducerKind
from dualwrite.state import PreparedTxnState
from dualwrite.stores.base import Claim, LostKind, LostTransaction, Settlement
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.table import state_table
from dualwrite.testing.proxy import TcpProxy
from fixtures.pace import LIMIT

LOST = LostTransaction(LostKind.LOST, STATE, 0, datetime(2026, 11, 21, 10, 0, 0, 123456, tzinfo=UTC))
UNVERIFIED = LostTransaction(LostKind.UNVERIFIED, PreparedTxnState(1, 2, 3), 1, datetime(2026, 11, 21, 11, tzinfo=UTC))


@pytest.fixture
def recorded(store: SqlStateStore, claim: Claim) -> Claim:
    transaction = store.begin(claim)
    transaction.record(STATE, generation=0, transaction_number=1)
    transaction.commit()
    return claim


def test_settling_changes_only_what_it_names(store: SqlStateStore, recorded: Claim) -> None:
    store.settle(recorded, Settlement(settled_generation=0))
    assert store.read_claimed(recorded).prepared_state == STATE
    store.settle(recorded, Settlement(clear_state=True))
    row = store.read_claimed(recorded)
    assert (row.prepared_state, row.settled_generation, row.lost, row.transaction_number) == (None, 0, (), 1)


def test_settling_twice_is_settling_once(store: SqlStateStore, recorded: Claim) -> None:
    for _ in range(2):
        store.settle(recorded, Settlement(clear_state=True, lost=LOST))
    store.settle(recorded, Settlement(lost=UNVERIFIED))
    row = store.read_claimed(recorded)
    assert (row.prepared_state, row.lost) == (None, (LOST, UNVERIFIED))


def test_an_unanswered_settlement_is_sent_again(proxied_store: SqlStateStore, postgres_proxy: TcpProxy) -> None:
    claim = proxied_store.claim(ID, "tests", timeout=LIMIT)
    postgres_proxy.on_client_bytes(b"COMMIT\0", lambda link: link.cut(), when="answered")
    proxied_store.settle(claim, Settlement(lost=LOST, settled_generation=0))
    row = proxied_store.read_claimed(claim)
    assert (row.lost, row.settled_generation) == ((LOST,), 0)


def test_an_unanswered_generation_is_skipped(proxied_store: SqlStateStore, postgres_proxy: TcpProxy) -> None:
    claim = proxied_store.claim(ID, "tests", timeout=LIMIT)
    postgres_proxy.on_client_bytes(b"COMMIT\0", lambda link: link.cut(), when="answered")
    assert proxied_store.take_generation(claim, ProducerKind.LIBRDKAFKA) == 2


def test_an_unanswered_acknowledgement_still_returns_what_it_removed(
    proxied_store: SqlStateStore, postgres_proxy: TcpProxy
) -> None:
    claim = proxied_store.claim(ID, "tests", timeout=LIMIT)
    proxied_store.settle(claim, Settlement(lost=LOST))
    postgres_proxy.on_client_bytes(b"COMMIT\0", lambda link: link.cut(), when="answered")
    assert proxied_store.acknowledge(ID) == (LOST,)
    assert proxied_store.read_claimed(claim).lost == ()


def test_a_settlement_gives_up_on_a_database_that_stays_away(proxied_store: SqlStateStore, postgres_proxy: TcpProxy) -> None:
    claim = proxied_store.claim(ID, "tests", timeout=LIMIT)
    postgres_proxy.refuse()
    postgres_proxy.cut()
    with pytest.raises(StoreUnavailableError):
        proxied_store.settle(claim, Settlement(clear_state=True))


def test_a_settlement_waits_for_a_lock_only_so_long(postgres_url: str) -> None:
    with SqlStateStore.from_url(postgres_url, lock_timeout=0.3) as store:
        claim = store.claim(ID, "tests", timeout=LIMIT)
        with store.engine.connect() as connection:
            connection.execute(sa.select(state_table).with_for_update())
            with pytest.raises(ClaimTimeoutError, match="settling"):
                store.settle(claim, Settlement(clear_state=True))


def test_a_fenced_settlement_changes_nothing(store: SqlStateStore, rival: SqlStateStore, recorded: Claim) -> None:
    theirs = rival.claim(ID, "theirs", timeout=LIMIT)
    for settlement in (Settlement(clear_state=True), Settlement(lost=LOST), Settlement(settled_generation=5)):
        with pytest.raises(FencedError):
            store.settle(recorded, settlement)
    row = store.read_claimed(theirs)
    assert (row.prepared_state, row.lost, row.settled_generation) == (STATE, (), -1)
    assert_nothing_is_checked_out(store)


def test_generations(store: SqlStateStore, claim: Claim) -> None:
    assert [store.take_generation(claim, ProducerKind.LIBRDKAFKA, reuse=True) for _ in range(3)] == [1, 2, 3]
    assert store.read_claimed(claim).generation == 3
    assert list(store.read_claimed(claim).unsettled_generations) == [0, 1, 2, 3]


def test_a_generation_is_used_again_by_a_producer_of_its_kind(store: SqlStateStore, claim: Claim) -> None:
    native, two_phase = ProducerKind.NATIVE, ProducerKind.NATIVE_TWO_PHASE
    taken = [store.take_generation(claim, kind, reuse=True) for kind in (native, native, two_phase, two_phase, native)]
    assert taken == [1, 1, 2, 2, 3]
    assert store.take_generation(claim, native) == 4
    row = store.read_claimed(claim)
    assert (row.generation, row.generation_kind) == (4, native)


def test_something_may_be_open_on_a_generation_that_is_used_again(store: SqlStateStore, claim: Claim) -> None:
    generation = store.take_generation(claim, ProducerKind.NATIVE)
    store.settle(claim, Settlement(settled_generation=generation))
    assert not store.read_claimed(claim).unsettled_generations
    assert store.take_generation(claim, ProducerKind.NATIVE, reuse=True) == generation
    assert list(store.read_claimed(claim).unsettled_generations) == [generation]


def test_a_kind_that_this_release_does_not_know(store: SqlStateStore, claim: Claim) -> None:
    with store.engine.begin() as connection:
        connection.execute(state_table.update().values(generation_kind="quantum"))
    with pytest.raises(StoredStateError, match="quantum"):
        store.read(ID)


def test_acknowledging(store: SqlStateStore, claim: Claim) -> None:
    store.settle(claim, Settlement(lost=LOST))
    store.settle(claim, Settlement(lost=UNVERIFIED))
    assert store.acknowledge(ID) == (LOST, UNVERIFIED)
    assert store.acknowledge(ID) == ()
    assert store.acknowledge("nobody") == ()


def test_times_are_kept_in_utc(store: SqlStateStore, claim: Claim) -> None:
    east = LOST.recorded_at.astimezone(timezone(timedelta(hours=9)))
    store.settle(claim, Settlement(lost=LostTransaction(LostKind.LOST, STATE, 0, east)))
    row = store.read_claimed(claim)
    assert row.lost[0].recorded_at == LOST.recorded_at
    assert row.updated_at.utcoffset() == timedelta(0)
    assert abs(row.updated_at - datetime.now(UTC)) < timedelta(minutes=1)


def test_listing_by_prefix(store: SqlStateStore) -> None:
    ids = ["a", "A", "a%b", "a_b", "axb", "b", "ä", "äö", "a\\b", "a'b", 'a"b']
    for transactional_id in ids:
        store.claim(transactional_id, "tests", timeout=LIMIT)
    assert store.list() == sorted(ids)
    assert store.list("a%") == ["a%b"]
    assert store.list("a_") == ["a_b"]
    assert store.list("A") == ["A"]
    assert store.list("ä") == ["ä", "äö"]
    assert store.list("a\\") == ["a\\b"]
    assert store.list("a'") == ["a'b"]
    assert store.list("c") == []


def test_ids_that_differ_in_case_only_have_rows_of_their_own(store: SqlStateStore) -> None:
    store.claim("Orders", "tests", timeout=LIMIT)
    assert store.claim("orders", "tests", timeout=LIMIT).fence == 1


def test_forgetting_keeps_the_fence(store: SqlStateStore, claim: Claim) -> None:
    store.take_generation(claim, ProducerKind.LIBRDKAFKA)
    store.settle(claim, Settlement(settled_generation=1))
    store.forget(ID)
    assert store.list() == []
    row = store.read(ID)
    assert row is not None
    assert (row.forgotten, row.fence) == (True, 2)
    store.forget(ID)
    assert store.read(ID).fence == 2  # type: ignore[union-attr]
    with pytest.raises(FencedError):
        store.begin(claim)
    revived = store.claim(ID, "tests", timeout=LIMIT)
    assert revived.fence == 3
    row = store.read_claimed(revived)
    assert (row.forgotten, row.generation, row.settled_generation) == (False, 1, 1)
    assert store.list() == [ID]
    store.forget("nobody")
    assert store.read("nobody") is None


def test_what_is_not_settled_is_not_forgotten(store: SqlStateStore, recorded: Claim) -> None:
    with pytest.raises(NotSettledError, match="`dualwrite recover --id orders` first"):
        store.forget(ID)
    store.settle(recorded, Settlement(clear_state=True))
    with pytest.raises(NotSettledError, match="generations 0 to 0"):
        store.forget(ID)
    store.settle(recorded, Settlement(settled_generation=0, lost=LOST))
    with pytest.raises(NotSettledError, match="`dualwrite recover --id orders --acknowledge` first"):
        store.forget(ID)
    assert store.read_claimed(recorded).forgotten is False
    store.acknowledge(ID)
    store.forget(ID)


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("prepared_transaction_state", "4711"),
        ("prepared_transaction_state", "1:2:3"),
        ("lost", "["),
        ("lost", '{"kind": 1}'),
        ("lost", '[{"kind": "LOST", "state": "x", "generation": 0, "recorded_at": "2026-11-21T10:00:00+00:00"}]'),
        ("lost", '[{"kind": "GONE", "state": "1:2", "generation": 0, "recorded_at": "2026-11-21T10:00:00+00:00"}]'),
        ("lost", '[{"kind": "LOST", "state": "", "generation": 0, "recorded_at": "2026-11-21T10:00:00+00:00"}]'),
        ("lost", "[null]"),
    ],
)
def test_a_row_that_cannot_be_read(store: SqlStateStore, claim: Claim, column: str, text: str) -> None:
    with store.engine.begin() as connection:
        connection.execute(state_table.update().values({column: text}))
    with pytest.raises(StoredStateError) as caught:
        store.read_claimed(claim)
    assert caught.value.transactional_id == ID
    assert caught.value.text == text
    with pytest.raises(StoredStateError):
        store.forget(ID)
    assert_nothing_is_checked_out(store)
