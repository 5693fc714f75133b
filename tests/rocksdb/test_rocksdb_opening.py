"""Opening a RocksDB database: URLs, modes, locks of other processes, forks."""

from __future__ import annotations

import ast
import os
import pickle
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from rocksdb_scene import FAMILIES, ID, STATE, STATE_FAMILY, make_database, recorded, run_python, stored
from rocksdict import Options, Rdict

from dualwrite.errors import ConfigurationError, StoreUnavailableError, UsageError
from dualwrite.stores.base import Claim
from dualwrite.stores.registry import store_from_url
from dualwrite.stores.rocksdb import RocksDBStore
from dualwrite.stores.rocksdb.opening import lock_holder
from fixtures.pace import LIMIT, ended
from fixtures.store_calls import every_call
from fixtures.tables import table

EVERY_CALL: dict[str, Callable[[RocksDBStore], Any]] = {
    **every_call(ID),
    "durability": lambda s: s.durability(),
    "rdict": lambda s: s.rdict,
    "create_column_family": lambda s: s.create_column_family("more"),
}

HOLD = """if True:
    import sys
    from dualwrite.stores.rocksdb import RocksDBStore
    store = RocksDBStore(sys.argv[1])
    store.check()
    print("open", flush=True)
    sys.stdin.read()
"""


# --- addresses ------------------------------------------------------------------------------------------------------------


def test_a_url_names_a_path_and_opens_nothing(path: Path) -> None:
    with store_from_url(f"rocksdb:///{path}") as store:
        assert isinstance(store, RocksDBStore)
        assert store.description == f"rocksdb:///{path}"
        assert not path.exists()
        store.check()
        assert path.exists()


def test_three_slashes_mean_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with RocksDBStore.from_url("rocksdb:///some db") as store:
        store.check()
        assert store.description == f"rocksdb:///{tmp_path}/some db"
    assert (tmp_path / "some db" / "CURRENT").exists()


@table("url", ["rocksdb:", "rocksdb://", "rocksdb:///", "rocksdb://host/path", "rocksdb:////path?a=b", "rocksdb:////path#a"])
def test_invalid_urls(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"rocksdb:////path/to/folder|is not a URL"):
        store_from_url(url)


def test_a_rdict_keeps_its_options(path: Path) -> None:
    rdict = make_database(path, raw=True)
    with pytest.raises(ConfigurationError, match="Rdict"):
        RocksDBStore(rdict, options=Options())
    rdict.close()
    with pytest.raises(ConfigurationError, match="closed"):
        RocksDBStore(rdict)


# --- existing databases ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "damage"),
    [*product([True, False], ["nothing", "no options"]), *product([True], ["no config", "empty config"])],
)
def test_an_existing_database_is_opened_unchanged(path: Path, raw: bool, damage: str) -> None:
    """Also after a process was killed when it had opened it: before it wrote its options, or rocksdict's config."""
    make_database(path, raw=raw).close()
    if damage == "no options":
        for file in path.glob("OPTIONS-*"):
            file.unlink()
    elif damage == "no config":
        (path / "rocksdict-config.json").unlink()
    elif damage == "empty config":
        (path / "rocksdict-config.json").write_text("")
    with RocksDBStore(path) as store:
        claim = store.claim(ID, "tests", timeout=LIMIT)
        recorded(store, claim).commit()
        assert stored(store, b"before") == b"1"
        assert sorted(Rdict.list_cf(str(path))) == ["customers", "default", STATE_FAMILY, "orders"]
    with RocksDBStore(path) as store:
        assert store.read_claimed(claim).prepared_state == STATE
        assert stored(store) == b"1"


def test_settings_of_an_existing_database_are_kept(path: Path) -> None:
    options = Options(raw_mode=True)
    options.set_write_buffer_size(1 << 20)
    rdict = Rdict(str(path), options)
    family_options = Options(raw_mode=True)
    family_options.set_write_buffer_size(2 << 20)
    rdict.create_column_family("orders", family_options)
    rdict.close()
    for _ in range(2):
        with RocksDBStore(path) as store:
            store.check()
    text = max(path.glob("OPTIONS-*")).read_text()
    sizes = {
        section.partition('"')[2].partition('"')[0]: int(section.partition("write_buffer_size=")[2].partition("\n")[0])
        for section in text.split("[CFOptions ")[1:]
    }
    assert (sizes["default"], sizes["orders"]) == (1 << 20, 2 << 20)


def test_a_process_killed_while_it_creates_a_database(path: Path) -> None:
    make_database(path, raw=True).close()
    for file in [path / "CURRENT", *path.glob("*.log"), *path.glob("*.sst")]:  # what comes last
        file.unlink()
    with RocksDBStore(path) as store:
        store.check()


def test_a_database_without_raw_mode_whose_config_is_lost(path: Path) -> None:
    """rocksdict itself could not open it either; with the right options it can."""
    make_database(path, raw=False).close()
    (path / "rocksdict-config.json").write_text("")
    with RocksDBStore(path) as store, pytest.raises(StoreUnavailableError, match="raw_mode"):
        store.check()
    families = {name: Options(raw_mode=False) for name in FAMILIES}
    with RocksDBStore(path, options=Options(raw_mode=False), column_families=families) as store:
        store.check()
        assert stored(store, b"before") == b"1"


def test_the_wrong_mode_leaves_the_database_unchanged(path: Path) -> None:
    make_database(path, raw=False).close()
    before = (path / "rocksdict-config.json").read_bytes()
    with RocksDBStore(path, options=Options(raw_mode=True)) as store, pytest.raises(StoreUnavailableError, match="raw_mode"):
        store.check()
    assert (path / "rocksdict-config.json").read_bytes() == before
    Rdict(str(path)).close()


# --- what can't be opened -------------------------------------------------------------------------------------------------


def damage(path: Path) -> None:
    make_database(path, raw=True).close()
    (path / "CURRENT").write_text("garbage")


def write_a_thesis(path: Path) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("ten years")


REFUSED: dict[str, tuple[Callable[[Path], Any], str, dict[str, Any]]] = {
    "a file": (lambda path: path.write_text("no database"), "is a file", {}),
    "a folder with other files": (write_a_thesis, r"thesis\.txt", {}),
    "a missing parent folder": (lambda path: path.parent.rmdir(), "parent folder", {}),
    "a database that must not be created": (lambda _: None, "create_if_missing", {"create_if_missing": False}),
    "a damaged database": (damage, "Corruption", {}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_opened_is_left_alone(tmp_path: Path, what: str) -> None:
    prepare, why, options = REFUSED[what]
    path = tmp_path / "parent" / "db"
    path.parent.mkdir()
    prepare(path)
    before = {file for file in tmp_path.rglob("*") if not file.name.startswith("LOG")}
    with RocksDBStore(path, **options) as store:
        for call in EVERY_CALL.values():
            with pytest.raises(StoreUnavailableError, match=why) as caught:
                call(store)
            assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert {file for file in tmp_path.rglob("*") if not file.name.startswith("LOG")} == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("mode", [0o000, 0o500])
def test_a_missing_permission(path: Path, mode: int) -> None:
    make_database(path, raw=True).close()
    path.chmod(mode)
    try:
        with RocksDBStore(path) as store, pytest.raises(StoreUnavailableError, match=r"[Pp]ermission"):
            store.check()
    finally:
        path.chmod(0o700)


# --- one process at a time ------------------------------------------------------------------------------------------------


@pytest.fixture
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the database open."""
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process
        process.kill()


def test_a_second_process_is_refused_until_the_holder_has_ended(path: Path, holder: subprocess.Popen[str]) -> None:
    with RocksDBStore(path) as store:
        for call in EVERY_CALL.values():
            with pytest.raises(StoreUnavailableError) as caught:
                call(store)
            error = pickle.loads(pickle.dumps(caught.value))
            assert str(path) in error.what
            assert (error.path, error.pid) == (str(path), holder.pid)
            assert f"process {holder.pid} (" in error.cause
            assert "end that process" in error.next_step
        holder.send_signal(signal.SIGSTOP)  # a paused one keeps it
        with pytest.raises(StoreUnavailableError):
            store.check()
        holder.kill()
        ended(holder)
        store.check()
        assert lock_holder(str(path)) == os.getpid()
    assert lock_holder(str(path)) is None


def test_a_rdict_opened_elsewhere(path: Path) -> None:
    rdict = make_database(path, raw=True)
    with RocksDBStore(path) as store:
        with pytest.raises(StoreUnavailableError, match="RocksDBStore\\(rdict\\)"):
            store.check()
        with RocksDBStore(rdict) as other:
            other.check()
            store.check()  # by the path, which is known now
        rdict.close()
        with pytest.raises(StoreUnavailableError, match="closed"):
            other.check()


def test_stores_on_one_path_share_the_open_database(path: Path, tmp_path: Path) -> None:
    one = RocksDBStore(path, column_families=dict.fromkeys(FAMILIES))
    (tmp_path / "link").symlink_to(path)
    two = RocksDBStore(tmp_path / "link", column_families={"more": None})
    claim = one.claim(ID, "one", timeout=LIMIT)
    transaction = recorded(one, claim)
    assert two.read_claimed(claim).transaction_number == 0
    assert one.rdict is two.rdict
    one.close()
    one.close()
    transaction.commit()  # the other one keeps it open
    assert two.read_claimed(claim).transaction_number == 1
    assert "more" in Rdict.list_cf(str(path))
    two.close()
    Rdict(str(path)).close()  # the last one has closed it
    assert one.read_claimed(claim).transaction_number == 1
    one.close()


def test_a_garbage_collected_store_does_not_lock_the_database(path: Path) -> None:
    RocksDBStore(path).check()
    with RocksDBStore(path) as store:
        store.check()
    Rdict(str(path)).close()


def test_a_folder_that_was_removed_and_recreated(path: Path) -> None:
    with RocksDBStore(path) as store:
        store.claim(ID, "tests", timeout=LIMIT)
    shutil.rmtree(path)
    with RocksDBStore(path) as store:
        assert store.read(ID) is None


# --- fork -----------------------------------------------------------------------------------------------------------------


def in_a_fork(use: Callable[[], Any]) -> str:
    """The result of `use` in a forked child that exits normally, running all finalizers."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork of a process with threads
        pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        try:
            result = repr(use())
        except BaseException as error:  # noqa: BLE001  (all that ends it)
            result = f"{type(error).__name__}: {error}"
        os.write(writing, result.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        result = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0
    return result


def test_a_forked_child_is_refused_and_leaves_the_parent_alone(store: RocksDBStore, claim: Claim, tmp_path: Path) -> None:
    transaction = recorded(store, claim)
    batch = store.begin(claim).handle

    def refused() -> list[str]:
        calls = [partial(call, store) for call in EVERY_CALL.values()]
        return [why(call) for call in (*calls, lambda: batch.get(b"a"), lambda: RocksDBStore(tmp_path / "another").check())]

    assert set(ast.literal_eval(in_a_fork(refused))) == {"UsageError: RocksDB can't be used in a process that was forked"}
    assert "forked" in in_a_fork(transaction.commit)
    assert in_a_fork(transaction.rollback) == "None"
    assert in_a_fork(store.close) == "None"
    transaction.commit()
    assert stored(store) == b"1"


def why(call: Callable[[], Any]) -> str:
    try:
        return f"returned {call()!r}"
    except UsageError as error:
        return f"{type(error).__name__}: {error}"[:62]


def test_a_forked_child_ends_as_usual(path: Path) -> None:
    code = """if True:
        import os, sys
        from dualwrite.errors import UsageError
        from dualwrite.stores.rocksdb import RocksDBStore
        store = RocksDBStore(sys.argv[1], column_families={"orders": None})
        claim = store.claim("orders", "parent", timeout=60)
        store.begin(claim).handle.get(b"a", cf="orders")
        pid = os.fork()
        if pid == 0:
            try:
                store.check()
            except UsageError:
                store.close()
                del store
                sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert store.read_claimed(claim).owner == "parent"
        store.close()
    """
    ended = run_python(code, str(path))
    assert (ended.returncode, ended.stderr) == (0, "")


def test_reading_creates_no_database(tmp_path: Path) -> None:
    path = tmp_path / "mistyped"
    with RocksDBStore(path) as store:
        assert store.list() == []
        assert store.read("orders") is None
        assert not path.exists()
        store.claim("orders", "tests", timeout=LIMIT)
        assert store.list() == ["orders"]
