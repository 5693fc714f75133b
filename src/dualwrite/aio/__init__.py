"""The pool for asyncio: its units are plain functions, or coroutines that run on the event loop (docs/guides/asyncio.md)."""

from dualwrite.aio.async_pool import AsyncWriterPool, create_pool
from dualwrite.aio.async_transaction import AsyncTransaction
from dualwrite.stores.sql.async_handles import AsyncConnection, AsyncSavepoint, AsyncSession

__all__ = ["AsyncConnection", "AsyncSavepoint", "AsyncSession", "AsyncTransaction", "AsyncWriterPool", "create_pool"]
