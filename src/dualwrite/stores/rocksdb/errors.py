"""The one place where rocksdict's errors are translated into ours.

rocksdict raises a plain `Exception` with RocksDB's own text for nearly everything, and DbClosedError for a closed handle.
"""

from __future__ import annotations

from typing import Final

from rocksdict import DbClosedError

from dualwrite.errors import StoreError, StoreUnavailableError, UsageError
from dualwrite.stores.rocksdb.lock_holder import lock_holder

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
