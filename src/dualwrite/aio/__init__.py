"""The pool for asyncio: its units are plain functions, or coroutines that run on the event loop (docs/guides/asyncio.md)."""

from dualwrite.aio.create import create_pool
from dualwrite.aio.pool import AsyncWriterPool
from dualwrite.aio.transaction import AsyncTransaction
from dualwrite.stores.sql.async_connection import AsyncConnection, AsyncSavepoint
from dualwrite.stores.sql.async_session import AsyncSession

__all__ = ["AsyncConnection", "AsyncSavepoint", "AsyncSession", "AsyncTransaction", "AsyncWriterPool", "create_pool"]
