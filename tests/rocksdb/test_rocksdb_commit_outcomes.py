"""Does a failed commit certainly leave nothing behind, or is its outcome unknown?

I/O errors are real: RLIMIT_FSIZE makes the kernel refuse to let the write-ahead log grow.
"""

from __future__ import annotations

import gc
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from rocksdb_scene import FAMILIES, ID, STATE, make_database, recorded, run_python, stored
from rocksdict import AccessType, Rdict

from dualwrite.errors import (
    FencedError,
    StateTableMissingError,
    StoreCommitFailedError,
    StoreCommitUnknownError,
    StoreError,
    StoreUnavailableError,
)
from dualwrite.state import ProducerKind
from dualwrite.stores.base import Claim, Resolution
from dualwrite.stores.rocksdb import RocksDBStore
from fixtures.pace import LIMIT

LARGE = b"x" * 300_000


@contextmanager
def full_disk(room: int = 20_000) -> Iterator[None]:
    """Limit the size of files to `room` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def interrupt_after(seconds: float) -> Iterator[None]:
    """Ctrl-C, sent by a kernel timer."""

    def interrupt(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # in a callback of the garbage collector (Hypothesis has one) the interrupt would be swallowed
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()


def commit_on_a_full_disk(store: RocksDBStore, claim: Claim) -> StoreCommitUnknownError:
    transaction = store.begin(claim)
    transaction.handle.put(b"chair", LARGE, cf="orders")
    transaction.record(STATE, generation=0, transaction_number=1)
    with full_disk(), pytest.raises(StoreCommitUnknownError) as caught:
        transaction.commit()
    return caught.value


# --- unknown --------------------------------------------------------------------------------------------------------------


def test_after_an_io_error_the_outcome_is_unknown_until_the_next_claim(fresh: RocksDBStore, fresh_claim: Claim) -> None:
    error = commit_on_a_full_disk(fresh, fresh_claim)
    assert "File too large" in error.cause
    assert error.transactional_id == ID
    assert "claim" in error.next_step
    again = fresh.claim(ID, "tests", timeout=LIMIT, expected_fence=fresh_claim.fence)  # opens the database again
    row = fresh.read_claimed(again)
    assert (row.fence, row.transaction_number, row.prepared_state) == (2, 0, None)
    assert stored(fresh) is None
    recorded(fresh, again).commit()
    assert stored(fresh) == b"1"


@pytest.mark.slow
def test_a_claim_retries_until_the_disk_has_room(fresh: RocksDBStore, fresh_claim: Claim) -> None:
    commit_on_a_full_disk(fresh, fresh_claim)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    mend = threading.Timer(1.0, resource.setrlimit, (resource.RLIMIT_FSIZE, (soft, hard)))
    with full_disk(room=10):
        mend.start()
        assert fresh.claim(ID, "tests", timeout=LIMIT, expected_fence=fresh_claim.fence).fence == 2
        mend.join()


def test_a_claim_gives_up_on_a_disk_that_stays_full(fresh: RocksDBStore, fresh_claim: Claim) -> None:
    commit_on_a_full_disk(fresh, fresh_claim)
    with full_disk(room=10), pytest.raises(StoreUnavailableError) as caught:
        fresh.claim(ID, "tests", timeout=0.3, expected_fence=fresh_claim.fence)
    assert caught.value.retriable
    assert fresh.claim(ID, "tests", timeout=LIMIT, expected_fence=fresh_claim.fence).fence == 2


def test_the_next_write_reopens_the_database(fresh: RocksDBStore, fresh_claim: Claim) -> None:
    commit_on_a_full_disk(fresh, fresh_claim)
    recorded(fresh, fresh_claim, 2).commit()
    assert stored(fresh) == b"2"
    commit_on_a_full_disk(fresh, fresh_claim)
    fresh.record_resolution(fresh_claim, Resolution(resolved_generation=0))
    commit_on_a_full_disk(fresh, fresh_claim)
    assert fresh.acquire_generation(fresh_claim, ProducerKind.NATIVE) == 1


@pytest.mark.parametrize("claimed", [False, True])
def test_a_transaction_recorded_before_the_database_was_reopened(
    fresh: RocksDBStore, fresh_claim: Claim, path: Path, claimed: bool
) -> None:
    """Between closing and opening, another process may claim the id; if none does, the row is as it was recorded."""
    other = fresh.claim("other", "tests", timeout=LIMIT)
    transaction = recorded(fresh, other)
    commit_on_a_full_disk(fresh, fresh_claim)
    fresh.database._drop_handle()
    if claimed:
        code = "import sys; from dualwrite.stores.rocksdb import RocksDBStore; "
        code += "RocksDBStore(sys.argv[1]).claim('other', 'theirs', timeout=60)"
        ended = run_python(code, str(path))
        assert (ended.returncode, ended.stderr) == (0, "")
        with pytest.raises(FencedError, match="theirs"):
            transaction.commit()
    else:
        transaction.commit()
    assert stored(fresh) == (None if claimed else b"1")


def test_a_database_of_the_user_is_not_reopened(path: Path) -> None:
    rdict = make_database(path, raw=True)
    with RocksDBStore(rdict) as store:
        claim = store.claim(ID, "tests", timeout=LIMIT)
        error = commit_on_a_full_disk(store, claim)
        assert "owner of the Rdict" in error.next_step
        with pytest.raises(StoreUnavailableError, match="refuses writes until it is opened again"):
            store.claim(ID, "tests", timeout=0.3)
    with pytest.raises(Exception, match="File too large"):
        rdict.close()
    rdict = Rdict(str(path))
    with RocksDBStore(rdict) as store:
        again = store.claim(ID, "tests", timeout=LIMIT, expected_fence=claim.fence)
        assert store.read_claimed(again).transaction_number == 0
    rdict.close()


# --- interrupts -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_after_an_interrupt_at_any_moment_the_row_shows_the_outcome(fresh: RocksDBStore, fresh_claim: Claim) -> None:
    """Real signals, from a timer, during record and commit; then the row shows the outcome, and no lock is left behind."""
    interrupted = committed = 0
    for number in range(1, 301):
        transaction = None
        try:
            with interrupt_after(0.00003 * (1 + number % 20)):
                transaction = recorded(fresh, fresh_claim, number)
                transaction.commit()
        except KeyboardInterrupt:
            interrupted += 1
        if transaction is not None:
            transaction.rollback()
            del transaction
        fresh_claim = fresh.claim(ID, "tests", timeout=LIMIT, expected_fence=fresh_claim.fence)
        found = fresh.read_claimed(fresh_claim).transaction_number
        assert stored(fresh) == (b"%d" % found if found else None)
        assert found <= number
        committed += found == number
    assert interrupted
    assert committed


def test_an_interrupt_while_a_claim_waits(fresh: RocksDBStore, fresh_claim: Claim) -> None:
    with fresh.database.writing, pytest.raises(KeyboardInterrupt), interrupt_after(0.1):
        fresh.claim(ID, "tests", timeout=LIMIT)
    recorded(fresh, fresh_claim).commit()
    assert fresh.claim(ID, "tests", timeout=0).fence == 2


# --- certainly failed -----------------------------------------------------------------------------------------------------


def test_a_commit_after_the_store_was_closed(fresh: RocksDBStore, fresh_claim: Claim) -> None:
    transaction = recorded(fresh, fresh_claim)
    fresh.close()
    with pytest.raises(StoreCommitFailedError, match="closed"):
        transaction.commit()
    assert fresh.read_claimed(fresh_claim).transaction_number == 0  # it opens again at the next use
    assert stored(fresh) is None


def test_a_commit_after_the_owner_closed_the_rdict(path: Path) -> None:
    rdict = make_database(path, raw=False)
    store = RocksDBStore(rdict)
    claim = store.claim(ID, "tests", timeout=LIMIT)
    transaction = recorded(store, claim)
    reading = store.begin(claim).handle
    rdict.close()
    with pytest.raises(StoreCommitFailedError, match="closed"):
        transaction.commit()
    with pytest.raises(StoreUnavailableError, match="closed"):
        reading.get("a")
    for use in (
        lambda: store.read(ID),
        lambda: store.begin(claim),
        lambda: store.claim(ID, "tests", timeout=LIMIT),
        store.check,
        store.list,
    ):
        with pytest.raises(StoreUnavailableError, match="closed"):
            use()
    rdict = Rdict(str(path))  # the store has dropped its handles
    with RocksDBStore(rdict) as again:
        assert again.read_claimed(claim).transaction_number == 0
    store.close()
    rdict.close()


def test_a_column_family_that_was_dropped_meanwhile(store: RocksDBStore, claim: Claim) -> None:
    transaction = store.begin(claim)
    transaction.handle.put(b"ada", b"1", cf="customers")
    transaction.record(STATE, generation=0, transaction_number=1)
    store.rdict.drop_column_family("customers")
    with pytest.raises(StoreCommitFailedError, match="no column family 'customers'"):
        transaction.commit()
    assert stored(store) is None
    recorded(store, claim, 2).commit()  # RocksDB would refuse all writes if the batch had reached it
    assert stored(store) == b"2"


@pytest.mark.parametrize("access", ["read_only", "secondary"])
def test_a_database_opened_read_only(path: Path, tmp_path: Path, access: str) -> None:
    make_database(path, raw=True).close()
    kind = AccessType.read_only() if access == "read_only" else AccessType.secondary(str(tmp_path / "secondary"))
    rdict = Rdict(str(path), access_type=kind)
    with RocksDBStore(rdict) as store, pytest.raises(StateTableMissingError, match=r"AccessType\.read_write"):
        store.check()
    rdict.close()
    assert "kafka_transaction_state" not in Rdict.list_cf(str(path))  # rocksdict would have created it
    with RocksDBStore(path) as store:
        claim = store.claim(ID, "tests", timeout=LIMIT)
        recorded(store, claim).commit()
    rdict = Rdict(str(path), access_type=kind)
    with RocksDBStore(rdict) as store:
        store.check()
        assert store.read_claimed(claim).prepared_state == STATE
        assert store.list() == [ID]
        for use in (
            lambda: store.claim(ID, "tests", timeout=LIMIT),
            lambda: store.record_resolution(claim, Resolution(clear_state=True)),
            lambda: store.acquire_generation(claim, ProducerKind.NATIVE),
        ):
            with pytest.raises(StoreError, match="is read-only"):
                use()
        with pytest.raises(StoreCommitFailedError, match="Not implemented"):
            recorded(store, claim, 2).commit()
    rdict.close()


def test_a_process_that_ends_without_closing_anything(path: Path) -> None:
    code = """if True:
        import sys
        from dualwrite.stores.rocksdb import RocksDBStore
        store = RocksDBStore(sys.argv[1])
        claim = store.claim("orders", "child", timeout=60)
        transaction = store.begin(claim)
        transaction.handle.put(b"a", b"1")
        kept = [store.rdict, transaction.handle.items()]
        transaction.record(None, generation=0, transaction_number=1)
    """
    ended = run_python(code, str(path))
    assert (ended.returncode, ended.stderr) == (0, "")
    with RocksDBStore(path) as store:
        row = store.read(ID)
        assert row is not None
        assert (row.owner, row.transaction_number) == ("child", 0)
        assert store.claim(ID, "tests", timeout=0).fence == 2


# --- durability -----------------------------------------------------------------------------------------------------------


def test_each_write_is_synced(path: Path) -> None:
    """The number of syncs, by RocksDB's own statistics."""
    from rocksdict import Options  # noqa: PLC0415

    options = Options(raw_mode=True)
    options.enable_statistics()

    def synced() -> int:
        line = next(line for line in options.get_statistics().splitlines() if line.startswith("rocksdb.wal.synced "))
        return int(line.rpartition(" ")[2])

    with RocksDBStore(path, options=options, column_families=dict.fromkeys(FAMILIES)) as store:
        store.check()
        before = synced()
        claim = store.claim(ID, "tests", timeout=LIMIT)
        assert synced() == before + 1
        for number in range(1, 6):
            recorded(store, claim, number).commit()
            assert synced() == before + 1 + number
        store.record_resolution(claim, Resolution(clear_state=True))
        assert synced() == before + 7
        assert store.durability() == {
            "sync": "true",
            "disable_wal": "false",
            "wal_recovery_mode": "kPointInTimeRecovery",
        }


def test_durability_of_an_in_memory_database(path: Path) -> None:
    from rocksdict import Env, Options  # noqa: PLC0415

    options = Options()
    options.set_env(Env.mem_env())
    rdict = Rdict(str(path), options)
    with RocksDBStore(rdict) as store:
        assert "env" in store.durability()
        with pytest.raises(Exception, match="no column family 'x'"):
            store.begin(store.claim(ID, "tests", timeout=LIMIT)).handle.put("a", 1, cf="x")
    with suppress(Exception):  # a log in memory can't be synced
        rdict.close()
