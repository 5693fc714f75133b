"""`aio.create_pool`: the arguments of `dualwrite.create_pool`, and a pool for the running event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack, overload

from dualwrite.aio.blocking import finished
from dualwrite.aio.pool import AsyncWriterPool
from dualwrite.api import Database, PoolArguments
from dualwrite.api import create_pool as create_writer_pool
from dualwrite.stores.base import TxnStateStore

if TYPE_CHECKING:
    from sqlalchemy import URL, Engine

    from dualwrite.stores.rocksdb import RocksDBStore
    from dualwrite.stores.rocksdb.batch import TransactionBatch
    from dualwrite.stores.sql.async_connection import AsyncConnection
    from dualwrite.stores.zookeeper import ZooKeeperStore
    from dualwrite.stores.zookeeper.batch import ZooKeeperBatch


@overload
async def create_pool(
    database: URL | Engine, *, prefix: str, **options: Unpack[PoolArguments]
) -> AsyncWriterPool[AsyncConnection]: ...


@overload
async def create_pool(
    database: RocksDBStore, *, prefix: str, **options: Unpack[PoolArguments]
) -> AsyncWriterPool[TransactionBatch]: ...


@overload
async def create_pool(
    database: ZooKeeperStore, *, prefix: str, **options: Unpack[PoolArguments]
) -> AsyncWriterPool[ZooKeeperBatch]: ...


@overload
async def create_pool(
    database: str | TxnStateStore | None = None, *, prefix: str, **options: Unpack[PoolArguments]
) -> AsyncWriterPool[Any]: ...


async def create_pool(database: Database | None = None, *, prefix: str, **options: Any) -> AsyncWriterPool[Any]:
    """Build a pool, as `dualwrite.create_pool` does, without blocking the event loop.

    Args:
        database: See `dualwrite.create_pool`. A URL or an Engine with a synchronous driver, which the pool's threads use.
        prefix: See `dualwrite.create_pool`.
        **options: See `dualwrite.create_pool`.

    Returns:
        A pool for the running event loop. Close it with `async with` or `await close()`.

    Raises: as for `dualwrite.create_pool`.
    """
    pool = await finished(lambda: create_writer_pool(database, prefix=prefix, **options), undo=lambda made: made.close())
    return AsyncWriterPool(pool)
