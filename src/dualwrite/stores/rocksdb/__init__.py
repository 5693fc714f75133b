"""The RocksDB store: a user's data and the state of the transaction in one WriteBatch over column families.

What it relies on, found by trying rocksdict 0.3.29 and by reading the source of 0.3.27:

- Raw mode belongs to a database, not to a column family or a handle: rocksdict stores it in `rocksdict-config.json` (and
  assumes raw mode if the file is missing), opens and creates all column families in it, and sets its own comparator in the
  other mode. So our column families have the mode of their database. In raw mode, which new databases get, the key of a row is
  the transactional id in UTF-8 and its value the document in UTF-8, readable by any RocksDB client. In a user's database that
  is not in raw mode, both are prefixed with a byte 1 (rocksdict's tag for bytes).
- A batch over several column families becomes visible at once, and after a crash either all or none of it is there: it is one
  record of the write-ahead log. WriteOptions given with a write replace those of the Rdict.
- `write` holds the GIL until the log is synced: writes of several threads run one after the other, and a signal is handled only
  when the write is over. It requires a batch in the database's mode, and empties it.
- After a write met an I/O error, RocksDB refuses all writes with the same error until the database is opened again. A batch
  with a dropped column family has the same effect, and part of it becomes visible.
- `close` closes one handle. Each handle of a column family, ColumnFamily and iterator keeps the database open and locked.
- LOCK is a POSIX lock of the process, so it ends with the process. Within a process RocksDB has its own list.
- After a fork the child's handles are unusable: a read or a close may hang forever, and a write goes into the parent's log.
- rocksdict writes its config file before it opens the database, even if opening then fails; it creates column families through
  a read-only handle too; and it raises a plain `Exception` for nearly all errors.
"""

from dualwrite.stores.rocksdb.rocksdb_batch import ColumnFamilyBatch, TransactionBatch
from dualwrite.stores.rocksdb.rocksdb_store import RocksDBStore

__all__ = ["ColumnFamilyBatch", "RocksDBStore", "TransactionBatch"]
