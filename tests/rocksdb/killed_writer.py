"""A writer to be killed: each transaction increments a number in a user's column family, and in the row.

Tests fork it (`fixtures.fork_server`) with the database as its argument. It prints the number of each transaction whose commit
has returned.
"""

from __future__ import annotations

import sys

from dualwrite.state import PreparedTxnState
from dualwrite.stores.rocksdb import RocksDBStore
from fixtures.pace import LIMIT


def main() -> None:
    store = RocksDBStore(sys.argv[1], column_families={"orders": None, "customers": None})
    claim = store.claim("orders", "killed", timeout=LIMIT)
    number = 0
    while True:
        number += 1
        transaction = store.begin(claim)
        batch = transaction.handle
        total = int(batch.get(b"total", b"0", cf="orders")) + 1
        for family in ("default", "orders", "customers"):
            batch.put(b"total", b"%d" % total, cf=family)
            batch.put(b"in claim", b"%d" % number, cf=family)
            batch.put(b"claim", b"%d" % claim.fence, cf=family)
            batch.put(b"filling", b"x" * (number * 997 % 20_000), cf=family)
        transaction.record(PreparedTxnState(claim.fence, number % 30_000), generation=0, transaction_number=number)
        transaction.commit()
        sys.stdout.write(f"{claim.fence} {number} {total}\n")
        sys.stdout.flush()
