"""Opening a RocksDB database by its path, as it is or as a new one in raw mode; and our errors for those of rocksdict."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rocksdict import DbClosedError, Options, Rdict

from dualwrite.errors import StoreError, StoreUnavailableError, UsageError

DEFAULT_FAMILY: Final = "default"

_CONFIG: Final = "rocksdict-config.json"
_OF_ROCKSDB: Final = re.compile(
    r"(CURRENT|IDENTITY|LOCK|LOG(\.old.*)?|MANIFEST-\d+|OPTIONS-\d+(\.dbtmp)?|\d+\.(log|sst|blob|dbtmp)|archive|lost|rocksdict-config\.json)"
)

_LOCKED_HERE: Final = "lock hold by current process"
_LOCKED_ELSEWHERE: Final = ("While lock file", "Resource temporarily unavailable", "No locks available")
_BEING_CLOSED: Final = ("Already borrowed", "Already mutably borrowed")
"""PyO3's messages for a handle that another thread is closing."""
_UNDECODABLE: Final = ("Unknown value type", "utf-8 decoding error")

CLOSED: Final = "it was closed meanwhile: by its owner, or by another thread"


@dataclass(frozen=True)
class Opener:
    """How a database is opened, each time.

    Options that are None are those that the database had last; a new one is in raw mode. Missing column families are created.
    """

    path: str
    options: Options | None = None
    column_families: Mapping[str, Options | None] = field(default_factory=dict)
    create_if_missing: bool = True

    def open(self) -> Rdict:
        """Open the database.

        Raises:
            StoreUnavailableError: It can't be opened; the error says why.
        """
        config = Path(self.path) / _CONFIG
        before = None
        try:
            if (Path(self.path) / "CURRENT").exists():
                before = config.read_bytes() if config.exists() else None
                options, families = self._last_options()
            else:
                self._check_new_folder()
                options = self.options or Options(raw_mode=True)
                families = {DEFAULT_FAMILY: options}
            return Rdict(self.path, options, families)
        except StoreUnavailableError:
            raise
        except Exception as error:  # all that rocksdict raises; OSError: no permission to read the folder
            if before is not None:  # rocksdict writes it first, even with options that turn out wrong
                with suppress(OSError):
                    config.write_bytes(before)
            raise not_opened(self.path, error) from error

    def would_create(self) -> bool:
        """Whether `open` would create the database, in a new folder."""
        path = Path(self.path)
        return self.create_if_missing and path.parent.is_dir() and not path.exists()

    def _check_new_folder(self) -> None:
        folder = Path(self.path)
        problem = None if self.create_if_missing else "it does not exist, and create_if_missing is False"
        if folder.is_dir():
            foreign = sorted(entry.name for entry in folder.iterdir() if not _OF_ROCKSDB.fullmatch(entry.name))
            if foreign:
                problem = f"the folder contains other files ({', '.join(foreign[:5])}) and no database"
        elif folder.exists():
            problem = "it is a file, but a RocksDB database is a folder"
        elif not folder.parent.is_dir():
            problem = f"the parent folder {folder.parent} does not exist"
        if problem is not None:
            raise StoreUnavailableError(
                f"The RocksDB database {self.path} can't be opened.",
                cause=problem,
                next_step="check the path: rocksdb:////path/to/folder, with four slashes for an absolute path",
                path=self.path,
                pid=None,
            )

    def _last_options(self) -> tuple[Options, dict[str, Options]]:
        """The options to open an existing database with: those given, and otherwise those that it had last.

        By itself rocksdict would open only the column families in the OPTIONS file, which lags behind MANIFEST after a crash.
        """
        names = Rdict.list_cf(self.path)
        raw = _is_raw(self.path)
        options, families = Options(raw_mode=raw), dict[str, Options]()
        if _options_file(self.path) is not None:  # a process may be killed before it has written one
            options, families = Options.load_latest(self.path, ignore_unknown_options=True)
        # The given options are also used for `default`: by its comparator RocksDB detects options of the wrong mode.
        given = {**self.column_families, **({} if self.options is None else {DEFAULT_FAMILY: self.options})}
        opened = {name: given.get(name) or families.get(name) or Options(raw_mode=raw) for name in names}
        return self.options or options, opened


def _is_raw(path: str) -> bool:
    """Whether an existing database is in raw mode, by rocksdict's config file; raw mode without one, as rocksdict assumes."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        return bool(json.loads((Path(path) / _CONFIG).read_text())["raw_mode"])
    return True


def wal_recovery_mode(path: str) -> str | None:
    """The setting, by the newest OPTIONS file."""
    file = _options_file(path)
    found = None if file is None else re.search(r"^\s*wal_recovery_mode=(\w+)$", file.read_text(errors="replace"), re.MULTILINE)
    return found[1] if found else None


def _options_file(path: str) -> Path | None:
    files = [file for file in Path(path).glob("OPTIONS-*") if file.suffix != ".dbtmp"]
    return max(files, key=lambda file: int(file.name.partition("-")[2]), default=None)


# --- errors -------------------------------------------------------------------------------------------------------------------


def sentence(error: BaseException) -> str:
    """The error's text, on one line."""
    text = " ".join(str(error).split())
    return text if type(error) is Exception else f"{type(error).__name__}: {text}"


def is_closed(error: BaseException) -> bool:
    """Whether the handle was closed, so that the call did nothing."""
    return isinstance(error, DbClosedError) or str(error) in _BEING_CLOSED


def is_read_only(error: BaseException) -> bool:
    """Whether the database was opened read-only, so that the call did nothing."""
    return str(error).startswith("Not implemented")


def is_undecodable(error: BaseException) -> bool:
    """Whether rocksdict read a value but could not decode it; RocksDB's own errors have the plain type too."""
    return not is_closed(error) and (type(error) is not Exception or str(error) in _UNDECODABLE)


def not_opened(path: str, error: BaseException) -> StoreUnavailableError:
    """The error of a database that can't be opened."""
    what, text, pid = f"The RocksDB database {path} can't be opened.", sentence(error), None
    cause = text
    if _LOCKED_HERE in text:
        what = f"The RocksDB database {path} is already open in this process, by a handle that is not dualwrite's."
        next_step = (
            "pass that open Rdict to RocksDBStore(rdict); or close it with all its column family handles and iterators, since "
            "each keeps the database open"
        )
    elif any(sign in text for sign in _LOCKED_ELSEWHERE):
        pid = lock_holder(path)
        what = f"The RocksDB database {path} is open in another process, and only one process can open it."
        cause = f"its file LOCK is held by {f'an unknown process ({text})' if pid is None else _named(pid)}"
        next_step = (
            "end that process, or do this inside it: any number of writers and recoverers in one process can share the open "
            "database"
        )
    elif "comparator" in text:
        next_step = "open it with the Options(raw_mode=…) it was created with: True if a client in another language created it"
    elif text.startswith("Corruption"):
        next_step = "restore it from a backup, or try rocksdict's Rdict.repair on a copy of it"
    else:
        next_step = "check that the folder is a RocksDB database that this user may read and write, on a disk with free space"
    return StoreUnavailableError(what, cause=cause, next_step=next_step, path=path, pid=pid)


def lock_holder(path: str) -> int | None:
    """The process that holds the LOCK of the database at `path`, or None if that is not visible.

    LOCK itself is never opened. If this process held the lock, opening and closing the file would drop it: POSIX locks belong
    to the process, and end when any of its descriptors of the file is closed.
    """
    with suppress(OSError, ValueError):
        found = (Path(path) / "LOCK").stat()
        lock = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():  # "1: POSIX ADVISORY WRITE 18077 fe:00:9994485 0 EOF"
            _, kind, _, _, pid, file, *_ = line.split()
            if kind == "POSIX" and file == lock and int(pid) > 0:
                return int(pid)
    return None


def _named(pid: int) -> str:
    """The process, for messages; never its command line, which may contain passwords."""
    name = ""
    with suppress(OSError):
        name = f" ({Path(f'/proc/{pid}/comm').read_text().strip()})"
    return f"process {pid}{name}"


def call_failed(where: str, doing: str, error: BaseException, transactional_id: str | None = None) -> StoreError:
    """The error for a call other than a commit."""
    if is_closed(error):
        return StoreUnavailableError(
            f"The database {where} was closed while {doing}.",
            transactional_id=transactional_id,
            cause=CLOSED,
            next_step="close writers and stores before the Rdict that they use; create a new store on a new Rdict",
        )
    if is_read_only(error):
        return StoreError(
            f"The database {where} is read-only; {doing} is not possible.",
            transactional_id=transactional_id,
            cause=sentence(error),
            next_step="open the Rdict with AccessType.read_write()",
        )
    return StoreUnavailableError(
        f"The database {where} failed while {doing}.",
        transactional_id=transactional_id,
        cause=sentence(error),
        next_step="after an I/O error RocksDB refuses writes until it is opened again: fix the disk, then reopen the database "
        "(a store created from a path does that itself at its next use)",
    )


def forked() -> UsageError:
    """The error for a process that was forked from one in which RocksDB ran."""
    return UsageError(
        "RocksDB can't be used in a process that was forked from one that had it open.",
        cause="RocksDB's threads do not exist in the child, and its files and LOCK belong to the parent",
        next_step="open the store after the fork, in one process only; or start processes with spawn "
        '(multiprocessing.get_context("spawn"))',
    )
