"""How large a request is on the wire: a server silently closes the connection on one that is too large. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from kazoo.protocol.serialization import SetData, Transaction

from dualwrite.errors import StoreError

DEFAULT_MAX_REQUEST_BYTES: Final = 0xFFFFF
"""ZooKeeper's default limit for one request (jute.maxbuffer)."""

_HEADER: Final = 8  # xid and type; the four bytes of the length before them don't count
_MULTI_EMPTY: Final = _HEADER + len(Transaction([]).serialize())
_OPERATION_HEADER: Final = (
    len(Transaction([SetData("/", b"", 0)]).serialize())
    - len(Transaction([]).serialize())
    - len(SetData("/", b"", 0).serialize())
)


def request_size(request: Any) -> int:
    """Size of a single request in bytes."""
    return _HEADER + len(request.serialize())


def operation_size(operation: Any) -> int:
    """Bytes that an operation adds to a multi."""
    return _OPERATION_HEADER + len(operation.serialize())


def multi_size(operations: Iterable[Any]) -> int:
    """Size of a multi of these operations in bytes."""
    return _MULTI_EMPTY + sum(map(operation_size, operations))


def too_large(what: str, size: int, limit: int, transactional_id: str) -> StoreError:
    """The error for a request that the server would not accept."""
    return StoreError(
        f"{what} would take {size:,} bytes in one request to ZooKeeper; the limit is {limit:,}.",
        transactional_id=transactional_id,
        cause="a server closes the connection on a request larger than its jute.maxbuffer; nothing was sent",
        next_step="write less in one transaction; or raise jute.maxbuffer on every server (and its Java clients), and with it "
        "`max_request_bytes` of the store",
        size=size,
        limit=limit,
    )
