"""Opening a RocksDB database by its path: an existing one as it is, or a new one in raw mode."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rocksdict import DbClosedError, Options, Rdict

from dualwrite.errors import StoreError, StoreUnavailableError, UsageError

_PROC: Final = Path("/proc")
_FIELDS: Final = 8  # "1: POSIX ADVISORY WRITE 18077 fe:00:9994485 0 EOF"


@dataclass(frozen=True, slots=True)
class LockHolder:
    """A process that holds a LOCK.

    Args:
        pid: Its process id.
        text: For messages. Never its command line, which may contain passwords.
    """

    pid: int
    text: str


def lock_holder(path: str) -> LockHolder | None:
    """The process that holds the LOCK of the database at `path`, or None if that is not visible.

    LOCK itself is never opened. If this process held the lock, opening and closing the file would drop it: POSIX locks belong
    to the process, and end when any of its descriptors of the file is closed.
    """
    with suppress(OSError, ValueError, IndexError):
        found = (Path(path) / "LOCK").stat()
        wanted = (os.major(found.st_dev), os.minor(found.st_dev), found.st_ino)
        for line in (_PROC / "locks").read_text().splitlines():
            fields = line.split()
            if len(fields) != _FIELDS or fields[1] != "POSIX":
                continue
            major, minor, inode = fields[5].split(":")
            if (int(major, 16), int(minor, 16), int(inode)) == wanted and int(fields[4]) > 0:
                return _process(int(fields[4]))
    return None


def _process(pid: int) -> LockHolder:
    name = ""
    with suppress(OSError):
        name = f" ({(_PROC / str(pid) / 'comm').read_text().strip()})"
    return LockHolder(pid, f"process {pid}{name}")


_LOCKED_HERE: Final = "lock hold by current process"
_LOCKED_ELSEWHERE: Final = ("While lock file", "Resource temporarily unavailable", "No locks available")
_BEING_CLOSED: Final = ("Already borrowed", "Already mutably borrowed")
"""PyO3's messages for a handle that another thread is closing."""
_UNDECODABLE: Final = ("Unknown value type", "utf-8 decoding error")

CLOSED: Final = "it was closed meanwhile: by its owner, or by another thread"


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
    text = sentence(error)
    if _LOCKED_HERE in text:
        return StoreUnavailableError(
            f"The RocksDB database {path} is already open in this process, by a handle that is not dualwrite's.",
            cause=text,
            next_step="pass that open Rdict to RocksDBStore(rdict); or close it with all its column family handles and "
            "iterators, since each keeps the database open",
            path=path,
            pid=None,
        )
    if any(sign in text for sign in _LOCKED_ELSEWHERE):
        holder = lock_holder(path)
        return StoreUnavailableError(
            f"The RocksDB database {path} is open in another process, and only one process can open it.",
            cause=f"its file LOCK is held by {holder.text}"
            if holder
            else f"its file LOCK is held by an unknown process ({text})",
            next_step="end that process, or do this inside it: any number of writers and recoverers in one process can share "
            "the open database",
            path=path,
            pid=None if holder is None else holder.pid,
        )
    next_step = "check that the folder is a RocksDB database that this user may read and write, on a disk with free space"
    if "comparator" in text:
        next_step = "open it with the Options(raw_mode=…) it was created with: True if a client in another language created it"
    elif text.startswith("Corruption"):
        next_step = "restore it from a backup, or try rocksdict's Rdict.repair on a copy of it"
    return StoreUnavailableError(
        f"The RocksDB database {path} can't be opened.", cause=text, next_step=next_step, path=path, pid=None
    )


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


STATE_FAMILY: Final = "kafka_transaction_state"
"""The column family of the rows; the name is KIP-939's."""
DEFAULT_FAMILY: Final = "default"

_CONFIG: Final = "rocksdict-config.json"
_OF_ROCKSDB: Final = re.compile(
    r"(CURRENT|IDENTITY|LOCK|LOG(\.old.*)?|MANIFEST-\d+|OPTIONS-\d+(\.dbtmp)?|\d+\.(log|sst|blob|dbtmp)|archive|lost|rocksdict-config\.json)"
)
_OPTION: Final = re.compile(r"^\s*(\w+)=(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Opener:
    """How a database is opened, each time.

    Args:
        path: Its folder.
        options: For the database; None uses those it had last, and raw mode for a new one.
        column_families: Options by column family; None uses those it had last. Missing ones are created.
        create_if_missing: Whether to create the database (its folder, but not the parent folders).
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
        if self._exists():
            return self._opened_again()
        self._check_new_folder()
        options = self.options or Options(raw_mode=True)
        return self._opened(options, {DEFAULT_FAMILY: options})

    def would_create(self) -> bool:
        """Whether `open` would create the database, in a new folder."""
        path = Path(self.path)
        return self.create_if_missing and path.parent.is_dir() and not path.exists()

    def _exists(self) -> bool:
        try:
            return (Path(self.path) / "CURRENT").exists()
        except OSError as error:  # no permission to read the folder
            raise not_opened(self.path, error) from error

    def _check_new_folder(self) -> None:
        folder = Path(self.path)
        problem = None
        try:
            if folder.is_dir():
                foreign = sorted(entry.name for entry in folder.iterdir() if not _OF_ROCKSDB.fullmatch(entry.name))
                if foreign:
                    problem = f"the folder contains other files ({', '.join(foreign[:5])}) and no database"
            elif folder.exists():
                problem = "it is a file, but a RocksDB database is a folder"
            elif not folder.parent.is_dir():
                problem = f"the parent folder {folder.parent} does not exist"
        except OSError as error:
            raise not_opened(self.path, error) from error
        if problem is None and not self.create_if_missing:
            problem = "it does not exist, and create_if_missing is False"
        if problem is not None:
            raise StoreUnavailableError(
                f"The RocksDB database {self.path} can't be opened.",
                cause=problem,
                next_step="check the path: rocksdb:////path/to/folder, with four slashes for an absolute path",
                path=self.path,
                pid=None,
            )

    def _opened_again(self) -> Rdict:
        """Open with the modes and column families that the database's files show, which rocksdict may get wrong by itself.

        If its config file is missing or empty (each opening writes it, and the process may be killed then), rocksdict assumes
        raw mode; and it opens only the column families in the OPTIONS file, which lags behind MANIFEST after a crash.
        """
        try:
            names = Rdict.list_cf(self.path)
            self._repair_config()
            options, families = self._loaded()
        except StoreUnavailableError:
            raise
        except Exception as error:  # all that rocksdict raises
            raise not_opened(self.path, error) from error
        # The given options are also used for `default`: by its comparator RocksDB detects options of the wrong mode.
        given = {**self.column_families, **({} if self.options is None else {DEFAULT_FAMILY: self.options})}
        raw = self._is_raw()
        opened = {name: given.get(name) or families.get(name) or Options(raw_mode=raw) for name in names}
        return self._opened(self.options or options, opened)

    def _loaded(self) -> tuple[Options, dict[str, Options]]:
        """The options that it had last; default ones if its OPTIONS file is gone."""
        if _options_file(self.path) is None:
            return Options(raw_mode=self._is_raw()), {}
        try:
            return Options.load_latest(self.path)
        except Exception:  # noqa: BLE001  (all that rocksdict raises; perhaps a newer RocksDB wrote the file)
            return Options.load_latest(self.path, ignore_unknown_options=True)

    def _opened(self, options: Options, families: dict[str, Options]) -> Rdict:
        with _config_kept(self.path):
            try:
                return Rdict(self.path, options, families)
            except Exception as error:  # all that rocksdict raises
                raise not_opened(self.path, error) from error

    def _is_raw(self) -> bool:
        config = _config(self.path)
        if config is not None:
            return config
        return last_options(self.path).get("comparator") != "rocksdict"

    def _repair_config(self) -> None:
        """Write the config file again if it can't be read and rocksdict would guess wrong."""
        if _config(self.path) is None and not self._is_raw():
            (Path(self.path) / _CONFIG).write_text('{"raw_mode":false,"prefix_extractors":{}}')


def last_options(path: str) -> dict[str, str]:
    """The options in the newest OPTIONS file, by name: those of the database and of its column family `default`."""
    file = _options_file(path)
    if file is None:
        return {}
    text = file.read_text(errors="replace")
    end = text.find("[CFOptions", text.find('[CFOptions "default"]') + 1)
    return dict(_OPTION.findall(text if end < 0 else text[:end]))


def _options_file(path: str) -> Path | None:
    files = [file for file in Path(path).glob("OPTIONS-*") if file.suffix != ".dbtmp"]
    return max(files, key=lambda file: int(file.name.partition("-")[2]), default=None)


def _config(path: str) -> bool | None:
    """Whether the database is in raw mode, by rocksdict's config file; None if that can't be read."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        return bool(json.loads((Path(path) / _CONFIG).read_text())["raw_mode"])
    return None


@contextmanager
def _config_kept(path: str) -> Iterator[None]:
    """Restore rocksdict's config file if opening fails: rocksdict writes it first, even with options that turn out wrong."""
    file = Path(path) / _CONFIG
    before = file.read_bytes() if file.exists() else None
    try:
        yield
    except StoreUnavailableError as error:
        try:
            if before is not None and file.read_bytes() != before:
                file.write_bytes(before)
        except OSError as restoring:
            error.add_note(f"{file} could not be restored: {sentence(restoring)}")
        raise
