"""A position as the text that RocksDB and ZooKeeper store: offset, the topic's id, the time, as a JSON array. No I/O."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from dualwrite.errors import StoredStateError
from dualwrite.stores.positions import Partition, Position


def position_text(position: Position) -> bytes:
    """The text of a position that is stored now."""
    return json.dumps([position.offset, position.topic_id, datetime.now(UTC).isoformat()]).encode()


def parse_position(partition: Partition, text: bytes) -> Position:
    """The position in a stored text.

    Raises:
        StoredStateError: It can't be read.
    """
    try:
        offset, topic_id, updated_at = json.loads(text)
        return Position(*partition, offset, topic_id, datetime.fromisoformat(updated_at))
    except (ValueError, TypeError) as error:
        raise StoredStateError(
            f"The stored position of {partition[0]}-{partition[1]} can't be read: {text!r}.",
            cause="it was changed manually or by a newer release",
            next_step="restore it, or upgrade dualwrite; nothing was changed",
            text=repr(text),
        ) from error
