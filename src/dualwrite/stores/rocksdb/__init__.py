"""The RocksDB store: a user's data and the state of the transaction in one WriteBatch over column families.

What it relies on, found by trying rocksdict 0.3.29 and by reading the source of 0.3.27:

- Raw mode belongs to a database, not to a column family or a handle: rocksdict notes it in `rocksdict-config.json` (where that
  is missing it takes raw mode for granted), has all column families opened and made in it, and in the other mode gives RocksDB
  a comparator of its own. So our column family has the mode of its database. In raw mode, which new databases get, its key is
  the transactional id in UTF-8 and its value the document in UTF-8, for any RocksDB client to read. In a database of a user's
  that is not in raw mode, both have a byte 2 (rocksdict's sign for a str) before them.
- A batch over column families becomes visible at once, and after a crash all of it is there or nothing: its records are one
  record of the write-ahead log. WriteOptions given with a write replace those of the Rdict.
- `write` keeps Python's global lock until the log is synced: writes of several threads come one after the other, and a signal
  is seen only when the write is over. It takes a batch whose raw mode is the database's, and empties it.
- A write that met an I/O error has RocksDB refuse all writes, with the same error, until the database is opened again; a batch
  with a column family that was dropped does so too, and part of it becomes visible.
- `close` closes one handle. Each handle of a column family, ColumnFamily and iterator keeps the database open, with its LOCK.
- LOCK is a POSIX lock of the process, so it is gone when the process is. Within a process RocksDB has a list of its own.
- After a fork the child's handles are of no use: a read or a close may wait for ever, a write goes into the parent's log.
- rocksdict writes its config file before it opens, also where opening fails; opened for reading only it makes column families
  all the same; and it has a plain `Exception` for nearly all errors.
"""

from dualwrite.stores.rocksdb.batch import ColumnFamilyBatch, TransactionBatch
from dualwrite.stores.rocksdb.store import RocksDBStore

__all__ = ["ColumnFamilyBatch", "RocksDBStore", "TransactionBatch"]
