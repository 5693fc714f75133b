"""The chunk markers of a store, whichever kind it is; and forgetting a job."""

from __future__ import annotations

from dualwrite.chunks.markers import ChunkMarkers, validate_job_id
from dualwrite.errors import ConfigurationError
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.sql import SqlStateStore


def markers_of(store: TxnStateStore) -> ChunkMarkers:
    """The markers of a store.

    Raises:
        ConfigurationError: It is a store of a third party that has none.
    """
    if isinstance(store, SqlStateStore):
        from dualwrite.chunks.sql_markers import SqlChunkMarkers  # noqa: PLC0415  (only what the store needs)

        return SqlChunkMarkers(store)
    origins = {kind.__module__ for kind in type(store).__mro__}
    if "dualwrite.stores.rocksdb.store" in origins:  # asked by name: the store's package may not be installed
        from dualwrite.chunks.rocksdb_markers import RocksDBChunkMarkers  # noqa: PLC0415  (as above)

        return RocksDBChunkMarkers(store)  # type: ignore[arg-type]
    if "dualwrite.stores.zookeeper.store" in origins:
        from dualwrite.chunks.zookeeper_markers import ZooKeeperChunkMarkers  # noqa: PLC0415  (as above)

        return ZooKeeperChunkMarkers(store)  # type: ignore[arg-type]
    made = getattr(store, "chunk_markers", None)
    if made is None:
        raise ConfigurationError(
            f"The store {type(store).__name__} ({store.description}) keeps no chunk markers.",
            cause="they are what makes a job in chunks idempotent, and each kind of store keeps them in its own way",
            next_step="give the store a method chunk_markers() that returns a dualwrite.chunks.markers.ChunkMarkers",
        )
    found = made()
    if not isinstance(found, ChunkMarkers):
        raise ConfigurationError(f"{type(store).__name__}.chunk_markers() gave a {type(found).__name__}, not a ChunkMarkers.")
    return found


def forget_job(store: TxnStateStore, job_id: str) -> int:
    """Remove the markers of a job that will not run again; how many chunks had one.

    From then on a run of the same id writes everything anew. Call it while no run is under way.

    Args:
        store: The database; `writer.store`, or `dualwrite.store_from_url(url)`.
        job_id: The job.

    Raises:
        ConfigurationError: The id can't be one, or the store has no markers.
        StoreError: The database's own errors, translated.
    """
    return markers_of(store).forget(validate_job_id(job_id))
