"""The chunk markers for each kind of store, and `forget_job`."""

from __future__ import annotations

from dualwrite.chunks.markers import ChunkMarkers, validate_job_id
from dualwrite.errors import ConfigurationError
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.sql import SqlStateStore


def markers_of(store: TxnStateStore) -> ChunkMarkers:
    """The chunk markers of a store.

    Raises:
        ConfigurationError: A third-party store has no `chunk_markers()`, or the method returns something else.
    """
    if isinstance(store, SqlStateStore):
        from dualwrite.chunks.sql_markers import SqlChunkMarkers  # noqa: PLC0415  (only what the store needs)

        return SqlChunkMarkers(store)
    origins = {kind.__module__ for kind in type(store).__mro__}
    if "dualwrite.stores.rocksdb.store" in origins:  # compared by name: the store's package may not be installed
        from dualwrite.chunks.rocksdb_markers import RocksDBChunkMarkers  # noqa: PLC0415  (as above)

        return RocksDBChunkMarkers(store)  # type: ignore[arg-type]
    if "dualwrite.stores.zookeeper.store" in origins:
        from dualwrite.chunks.zookeeper_markers import ZooKeeperChunkMarkers  # noqa: PLC0415  (as above)

        return ZooKeeperChunkMarkers(store)  # type: ignore[arg-type]
    made = getattr(store, "chunk_markers", None)
    if made is None:
        raise ConfigurationError(
            f"The store {type(store).__name__} ({store.description}) does not support chunk markers.",
            cause="a job in chunks needs them to be idempotent, and each kind of store has its own implementation",
            next_step="give the store a method chunk_markers() that returns a dualwrite.chunks.markers.ChunkMarkers",
        )
    found = made()
    if not isinstance(found, ChunkMarkers):
        raise ConfigurationError(
            f"{type(store).__name__}.chunk_markers() returned a {type(found).__name__}, not a ChunkMarkers.",
            next_step="return a dualwrite.chunks.markers.ChunkMarkers from it",
        )
    return found


def forget_job(store: TxnStateStore, job_id: str) -> int:
    """Remove the markers of a job that will not run again.

    Afterwards a run with the same id writes everything again. Call it while the job is not running.

    Args:
        store: The database; `writer.store`, or `dualwrite.store_from_url(url)`.
        job_id: The job.

    Returns:
        How many chunks had a marker.

    Raises:
        ConfigurationError: The id is not valid, or the store does not support chunk markers.
        StoreError: The database's own errors, translated.
    """
    return markers_of(store).forget(validate_job_id(job_id))
