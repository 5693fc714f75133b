"""Chunk markers in RocksDB: keys in the column family `kafka_job_chunk`, written in the same batch as their chunk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from rocksdict import WriteOptions

from dualwrite.chunks.markers import WHOLE_JOB, ChunkMarker, ChunkMarkers, committed_meanwhile
from dualwrite.errors import StoreError
from dualwrite.stores.rocksdb import RocksDBStore
from dualwrite.transaction import Transaction

FAMILY: Final = "kafka_job_chunk"

_SEPARATOR: Final = b"\0"  # can't occur in a job id
_DIGITS: Final = 10
_ZERO: Final = b"0" * _DIGITS


class RocksDBChunkMarkers(ChunkMarkers):
    """See ChunkMarkers. A key is the job's id, partition and chunk. Keys and values are bytes in either mode of rocksdict.

    Args:
        store: The store.
    """

    def __init__(self, store: RocksDBStore) -> None:
        self._store = store

    def prepare(self) -> None:
        """See ChunkMarkers; creates the column family."""
        self._store.create_column_family(FAMILY)

    def read(self, transaction: Transaction, job_id: str, partition: int) -> Mapping[int, ChunkMarker]:
        """See ChunkMarkers."""
        start = _partition_key(job_id, partition)
        found = {}
        for key, value in transaction.db.items(FAMILY, from_key=start):
            if not key.startswith(start):
                break
            number, (rows, digest) = int(key[len(start) :]), json.loads(value)
            found[number] = ChunkMarker(number, rows, digest)
        return found

    def write(self, transaction: Transaction, job_id: str, partition: int, marker: ChunkMarker) -> None:
        """See ChunkMarkers; only one process can open the database, so a check before the write is enough."""
        key = _partition_key(job_id, partition) + b"%0*d" % (_DIGITS, marker.number)
        family = transaction.db.column_family(FAMILY)
        if key in family:
            raise committed_meanwhile(job_id, partition, marker)
        family.put(key, json.dumps([marker.rows, marker.digest]).encode())

    def forget(self, job_id: str) -> int:
        """See ChunkMarkers; the plan is removed last."""
        self.prepare()
        store = self._store
        family = store.rdict.get_column_family(FAMILY)
        start, plan = job_id.encode() + _SEPARATOR, _partition_key(job_id, WHOLE_JOB)
        counted = 0
        try:
            for key in family.keys(from_key=start):
                if not isinstance(key, bytes) or not key.startswith(start):
                    break
                if not key.startswith(plan):
                    family.delete(key)
                    counted += 1
            family.delete(plan + _ZERO, _synced())  # syncs RocksDB's whole log, so the deletions before it are durable, too
        except Exception as error:  # rocksdict has no exception class of its own
            raise StoreError(
                f"The markers of the job {job_id!r} in {store.description} can't be removed.",
                cause=str(error),
                next_step="fix the cause, then call forget_job again",
            ) from error
        finally:
            family.close()
        return counted


def _partition_key(job_id: str, partition: int) -> bytes:
    """The common prefix of a partition's keys."""
    return _SEPARATOR.join((job_id.encode(), b"%0*d" % (_DIGITS, partition), b""))


def _synced() -> WriteOptions:
    options = WriteOptions()
    options.sync = True
    return options
