"""RocksDBStore: the rows in a column family of a RocksDB database, using rocksdict."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

from rocksdict import Options, Rdict

from dualwrite.errors import ConfigurationError
from dualwrite.state import Delivery, PreparedTxnState
from dualwrite.stores.identity import StoreIdentity, file_marks
from dualwrite.stores.key_values import Attempts, BatchTransaction, KeyValueStore, RowChange
from dualwrite.stores.leases import LeaseStore
from dualwrite.stores.positions import Positions
from dualwrite.stores.rocksdb.database import Handle, OpenDatabase, databases
from dualwrite.stores.rocksdb.encoding import Encoding
from dualwrite.stores.rocksdb.families import RocksDBPositions, StateFamily
from dualwrite.stores.rocksdb.locks import LockRequest, RocksDBLeases
from dualwrite.stores.rocksdb.opening import STATE_FAMILY, Opener, sentence
from dualwrite.stores.rocksdb.rocksdb_batch import TransactionBatch
from dualwrite.stores.rows import Claim, StateRow, check_fence, recorded
from dualwrite.stores.store_transaction import StoreTransaction

DEFAULT_LOCK_TIMEOUT: Final = 30.0
_SCHEME: Final = "rocksdb:///"


class RocksDBStoreTransaction(BatchTransaction[TransactionBatch]):
    """One that is dropped without commit or rollback releases the lock when it is garbage-collected."""

    def __init__(self, rows: StateFamily, claim: Claim, batch: TransactionBatch, *, lock_timeout: float) -> None:
        super().__init__(claim, batch)
        self._request = LockRequest(claim.transactional_id, "committing a transaction", owner=claim.owner)
        self._rows = rows
        self._lock_timeout = lock_timeout
        self._recorded: tuple[StateRow, Handle] | None = None
        self._ending = threading.RLock()  # a rollback by another thread waits for a write that has begun

    def record(
        self,
        state: PreparedTxnState | None,
        *,
        generation: int,
        transaction_number: int,
        delivery: Delivery | None = None,
    ) -> None:
        _ = self.handle
        self._rows.database.locks.acquire(self._request, self._lock_timeout)
        _ = self.handle  # another thread may have rolled back meanwhile: then nothing is held
        handle = self._rows.database.handle()
        row = check_fence(self._rows.row(self._claim.transactional_id), self._claim)
        row = recorded(row, state, generation=generation, transaction_number=transaction_number, delivery=delivery)
        self._recorded = (row, handle)

    def commit(self) -> None:
        with self._ending:
            changes = self.handle.changes()
            if self._recorded is None:
                raise self._not_recorded()
            try:
                self._rows.commit(changes, *self._recorded)
            finally:
                self.rollback()

    def rollback(self) -> None:
        with self._ending:
            super().rollback()
            self._request.release()


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
        lock_timeout: Seconds that `record_resolution` and other changes wait for an id's lock; `claim` has its own timeout.
        dumps: The function passed to `Rdict.set_dumps`, if any; it can't be read back from rocksdict.
        loads: The function passed to `Rdict.set_loads`, if any.

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
        dumps: Callable[[Any], bytes] = pickle.dumps,
        loads: Callable[[bytes], Any] = pickle.loads,
    ) -> None:
        self._column_families = dict(column_families or {})
        self._lock_timeout = lock_timeout
        self._dumps = dumps
        self._loads = loads
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
        self._rows: StateFamily | None = None
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
        return self._attached().database.handle().rdict

    def create_column_family(self, name: str, options: Options | None = None) -> None:
        """Create a column family if it is missing."""
        self._attached().database.make_family(name, options)

    def check(self) -> None:
        """Opens the database, and creates the column family if it is missing."""
        self._attached().database.family(STATE_FAMILY)

    @property
    def leases(self) -> LeaseStore:
        """They are kept in memory, for this process."""
        return RocksDBLeases(lambda: self._attached().database.leases)

    @property
    def positions(self) -> Positions:
        return RocksDBPositions(lambda: self._attached().database, self._would_create)

    def durability(self) -> Mapping[str, str]:
        """`sync` and `disable_wal` are those of the store's own writes, not the Rdict's WriteOptions."""
        return self._attached().database.durability()

    def identity(self) -> StoreIdentity | None:
        """Does not create the database."""
        return None if self._would_create() else self._attached().identity()

    def set_identity(self, identity: StoreIdentity, *, expected: StoreIdentity | None) -> bool:
        return self._attached().set_identity(identity, expected, self._lock_timeout)

    def marks(self) -> frozenset[str]:
        """Path and inode of the folder."""
        return file_marks(self._path)

    def begin(self, claim: Claim) -> StoreTransaction:
        rows = self._attached()
        check_fence(rows.row(claim.transactional_id), claim)
        encoding = Encoding(raw=rows.database.handle().raw, dumps=self._dumps, loads=self._loads)
        batch = TransactionBatch(rows.database, encoding, claim.transactional_id)
        return RocksDBStoreTransaction(rows, claim, batch, lock_timeout=self._lock_timeout)

    def read(self, transactional_id: str) -> StateRow | None:
        """Does not create the database."""
        return None if self._would_create() else self._attached().row(transactional_id)

    def list(self, prefix: str = "") -> list[str]:
        """Does not create the database."""
        return [] if self._would_create() else self._attached().ids(prefix)

    def _change(
        self, transactional_id: str, change: RowChange, doing: str, *, owner: str = "", timeout: float | None = None
    ) -> Attempts:
        request = LockRequest(transactional_id, doing, owner=owner)
        return self._attached().change(request, change, self._lock_timeout if timeout is None else timeout)

    # --- the open database ------------------------------------------------------------------------------------------------

    def _attached(self) -> StateFamily:
        """The rows of the database that this process has open at our path."""
        databases.check_process()
        rows = self._rows
        if rows is not None and rows.database.is_usable:
            return rows
        with self._attaching:
            database = databases.attach(self, OpenDatabase(self._path, self._source))
            try:
                for name, options in self._column_families.items():
                    database.make_family(name, options)
                rows = self._rows = StateFamily(database)
            except BaseException:
                databases.detach(self, database)
                raise
        return rows

    def _would_create(self) -> bool:
        """Whether nothing exists at our path yet: reading from a mistyped path must not create a database there."""
        return self._rows is None and isinstance(self._source, Opener) and self._source.would_create()

    def close(self) -> None:
        """The database is closed with the last store of this process that uses it."""
        rows, self._rows = self._rows, None
        if rows is not None:
            databases.detach(self, rows.database)


def _path_of(rdict: Rdict) -> str:
    try:
        return os.path.realpath(rdict.path())
    except Exception as error:  # all that rocksdict raises
        raise ConfigurationError("The Rdict is closed.", cause=sentence(error), next_step="pass an open one") from error
