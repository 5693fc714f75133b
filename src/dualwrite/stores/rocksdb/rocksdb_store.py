"""RocksDBStore: the rows in a column family of a RocksDB database, using rocksdict."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Final, Self

from rocksdict import Options, Rdict

from dualwrite.errors import ConfigurationError, StoreCommitUnknownError
from dualwrite.stores.identity import file_marks
from dualwrite.stores.key_value_store import KeyValueStore
from dualwrite.stores.key_values import ROWS, BatchTransaction, ConflictError
from dualwrite.stores.leases import Lease, LeaseStore
from dualwrite.stores.rocksdb.database import OpenDatabase, databases
from dualwrite.stores.rocksdb.opening import CLOSED, Opener, is_closed, is_read_only, sentence
from dualwrite.stores.rocksdb.rocksdb_batch import Encoding, TransactionBatch
from dualwrite.stores.rows import MAX_OWNER_LENGTH, Claim, StateRow
from dualwrite.stores.store_transaction import StoreTransaction

DEFAULT_LOCK_TIMEOUT: Final = 30.0
_SCHEME: Final = "rocksdb:///"


class RocksDBStoreTransaction(BatchTransaction[OpenDatabase, TransactionBatch]):
    """The row and the user's changes are one synced batch."""

    next_step: ClassVar[str] = (
        "check that it is open for writing and has all column families that the transaction uses; then run the "
        "transaction again"
    )

    @property
    def title(self) -> str:
        return f"The database {self._keys.where}"

    def _write(self, batch: TransactionBatch) -> None:
        database = self._keys
        with database.writing:
            try:
                handle, made = database.checked(batch.writes.values(), batch.changes())
            except ConflictError:
                raise
            except Exception as error:
                raise self._failed(sentence(error)) from error
            try:
                database.write(handle, made)
            except Exception as error:
                if is_closed(error) or is_read_only(error):
                    raise self._failed(CLOSED if is_closed(error) else sentence(error)) from error
                by = "which the next claim does" if database.is_ours else "by the owner of the Rdict"
                raise StoreCommitUnknownError(
                    f"RocksDB failed while writing the batch to {database.where}; it may or may not be in the write-ahead log.",
                    transactional_id=self._claim.transactional_id,
                    cause=sentence(error),
                    next_step=f"RocksDB refuses writes until it is opened again, {by}: fix the disk, claim the id again with "
                    "the same expected fence, and read the row",
                ) from error


class RocksDBLeases(LeaseStore):
    """The leases of an open database: in memory, shared by all stores of the process on it.

    Args:
        store: A store on the database.
    """

    def __init__(self, store: RocksDBStore) -> None:
        self._store = store

    def acquire(self, ids: Collection[str], owner: str, *, seconds: float) -> frozenset[str]:
        return self._leased(ids, owner, seconds, or_free=True)

    def renew(self, ids: Collection[str], owner: str, *, seconds: float) -> frozenset[str]:
        return self._leased(ids, owner, seconds, or_free=False)

    def _leased(self, ids: Collection[str], owner: str, seconds: float, *, or_free: bool) -> frozenset[str]:
        """Lease those of the ids that this owner has leased, or that are free."""
        database, owner = self._store.database, owner[:MAX_OWNER_LENGTH]
        with database.writing:
            now = time.monotonic()
            found = {name: database.leases.get(name, ("", 0.0)) for name in ids}
            ours = [name for name, (holder, until) in found.items() if holder == owner or (or_free and until <= now)]
            database.leases.update(dict.fromkeys(ours, (owner, now + seconds)))
        return frozenset(ours)

    def release(self, ids: Collection[str], owner: str) -> None:
        database, owner = self._store.database, owner[:MAX_OWNER_LENGTH]
        with database.writing:
            for name in ids:
                if database.leases.get(name, ("", 0.0))[0] == owner:
                    del database.leases[name]

    def entries(self, prefix: str = "") -> list[Lease]:
        database = self._store.database
        with database.writing:
            now = time.monotonic()
            found = [(name, *entry) for name, entry in database.leases.items() if name.startswith(prefix)]
        return [Lease(name, owner, until - now) for name, owner, until in sorted(found)]


class RocksDBStore(KeyValueStore):
    """Keeps the rows in the column family `kafka_transaction_state` of a RocksDB database, created if it is missing.

    Only one process can open a RocksDB database, so its writers and recoverers are threads of one process; each may have its
    own store, and the stores share the open database. Close writers and stores before you close your own Rdict, and don't open
    one with AccessType.with_ttl: RocksDB would drop the rows, and with them the fencing tokens, when they expire.

    Args:
        database: A path, opened at the first use with the column families that it has, or created in raw mode; or an open
            Rdict, which the store does not close.
        options: For a path: the database's options, instead of those that it had last. `raw_mode` must match the database.
        column_families: Column families that must exist, with the options to create (or, for a path, open) them; None for
            the default options. Those that the database already has need not be listed.
        create_if_missing: For a path: whether to create the database. Its parent folder must exist.
        lock_timeout: Seconds within which `record_resolution` and other changes must succeed; `claim` has its own timeout.

    Raises:
        ConfigurationError: `options` were given together with an Rdict.
    """

    def __init__(
        self,
        database: str | os.PathLike[str] | Rdict,
        *,
        options: Options | None = None,
        column_families: Mapping[str, Options | None] | None = None,
        create_if_missing: bool = True,
        lock_timeout: float = DEFAULT_LOCK_TIMEOUT,
    ) -> None:
        super().__init__(lock_timeout)
        self._column_families = dict(column_families or {})
        self._source: Opener | Rdict
        if isinstance(database, Rdict):
            if options is not None:
                raise ConfigurationError("Options can't be set for an open Rdict.", next_step="open the Rdict with them")
            self._source = database
            self._path = _path_of(database)
            databases.is_used = True
        else:
            self._path = os.path.realpath(os.fspath(database))
            self._source = Opener(self._path, options, self._column_families, create_if_missing)
        self._attached: OpenDatabase | None = None
        self._attaching = threading.RLock()

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        """A store for `rocksdb:////path/to/folder` (three slashes: relative to the working directory). Nothing is opened yet.

        Args:
            url: The address.
            options: More arguments for RocksDBStore.

        Raises:
            ConfigurationError: The URL can't be parsed.
        """
        path = url[len(_SCHEME) :]
        if not url.lower().startswith(_SCHEME) or not path or "?" in path or "#" in path:
            raise ConfigurationError(
                f"{url!r} is not the URL of a RocksDB database.",
                cause="it must contain a path and nothing else: no host, no parameters",
                next_step="rocksdb:////path/to/folder; RocksDBStore(path, …) accepts other settings as arguments",
            )
        return cls(path, **options)

    @property
    def description(self) -> str:
        return f"{_SCHEME}{self._path}"

    @property
    def rdict(self) -> Rdict:
        """The open database, for reads and for writes outside of transactions: it can't be opened a second time meanwhile.

        It stays open until the last store of this process on the same path is closed. Before that, close the column family
        handles and iterators that you get from it: each keeps the database open. After an I/O error this is another object.
        To drop a column family and create it again, close the stores first.
        """
        return self.database.handle().rdict

    def create_column_family(self, name: str, options: Options | None = None) -> None:
        """Create a column family if it is missing."""
        self.database.make_family(name, options)

    def check(self) -> None:
        """Opens the database, and creates the column family if it is missing."""
        self.database.family(ROWS)

    @property
    def leases(self) -> LeaseStore:
        return RocksDBLeases(self)

    def durability(self) -> Mapping[str, str]:
        """`sync` and `disable_wal` are those of the store's own writes, not the Rdict's WriteOptions."""
        return self.database.durability()

    def marks(self) -> frozenset[str]:
        """Path and inode of the folder."""
        return file_marks(self._path)

    def _transaction(self, claim: Claim, row: StateRow) -> StoreTransaction:
        database = self.database
        batch = TransactionBatch(database, Encoding(raw=database.handle().raw), claim.transactional_id)
        return RocksDBStoreTransaction(database, claim, batch, row)

    # --- the open database ------------------------------------------------------------------------------------------------

    @property
    def database(self) -> OpenDatabase:
        """The database that this process has open at our path, or will have: what only reads does not create it."""
        databases.check_process()
        attached = self._attached
        if attached is not None and attached.is_usable:
            return attached
        with self._attaching:
            database = databases.attach(self, OpenDatabase(self._path, self._source))
            try:
                database.want(self._column_families)
            except BaseException:
                databases.detach(self, database)
                raise
            self._attached = database
        return database

    @property
    def _keys(self) -> OpenDatabase:
        return self.database

    def close(self) -> None:
        """The database is closed with the last store of this process that uses it."""
        database, self._attached = self._attached, None
        if database is not None:
            databases.detach(self, database)


def _path_of(rdict: Rdict) -> str:
    try:
        return os.path.realpath(rdict.path())
    except Exception as error:  # all that rocksdict raises
        raise ConfigurationError("The Rdict is closed.", cause=sentence(error), next_step="pass an open one") from error
