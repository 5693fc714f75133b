"""A batch of messages as an Arrow table or a pandas DataFrame; needs pyarrow (and pandas)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from dualwrite.errors import MissingDependencyError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_WITHOUT_TIME: Final = 0
"""confluent-kafka's TIMESTAMP_NOT_AVAILABLE."""


def to_arrow(messages: Sequence[Any]) -> pa.Table:
    """The messages as a table, with one row for each message, in the same order.

    | column | type |
    | --- | --- |
    | topic, partition, offset | string, int32, int64 |
    | timestamp | timestamp (ms, UTC); null if the message has none |
    | key, value | binary; for deserialized messages, the type that Arrow infers: a struct for dictionaries, a string for text |
    | headers | list of structs (name: string, value: binary) |

    Args:
        messages: The messages that `handle_batch` was called with.

    Raises:
        MissingDependencyError: pyarrow is not installed.
        pyarrow.ArrowInvalid: The deserialized keys or values are of different types.
    """
    try:
        import pyarrow as pa  # noqa: PLC0415  (optional)
    except ImportError as error:
        raise MissingDependencyError("to_arrow needs pyarrow.", next_step="pip install pyarrow") from error
    header = pa.struct([pa.field("name", pa.string()), pa.field("value", pa.binary())])
    times = [message.timestamp() for message in messages]
    return pa.table(
        {
            "topic": pa.array([message.topic() for message in messages], pa.string()),
            "partition": pa.array([message.partition() for message in messages], pa.int32()),
            "offset": pa.array([message.offset() for message in messages], pa.int64()),
            "timestamp": pa.array([None if kind == _WITHOUT_TIME else ms for kind, ms in times], pa.timestamp("ms", tz="UTC")),
            "key": _column([message.key() for message in messages]),
            "value": _column([message.value() for message in messages]),
            "headers": pa.array([_headers(message) for message in messages], pa.list_(header)),
        }
    )


def to_pandas(messages: Sequence[Any]) -> pd.DataFrame:
    """The messages as a DataFrame, with the columns of `to_arrow`.

    Args:
        messages: The messages that `handle_batch` was called with.

    Raises:
        MissingDependencyError: pyarrow or pandas is not installed.
        pyarrow.ArrowInvalid: See `to_arrow`.
    """
    table = to_arrow(messages)
    try:
        return table.to_pandas()
    except ImportError as error:
        raise MissingDependencyError("to_pandas needs pandas.", next_step="pip install pandas") from error


def _column(contents: Sequence[Any]) -> pa.Array:
    import pyarrow as pa  # noqa: PLC0415  (optional)

    if all(content is None or isinstance(content, bytes) for content in contents):
        return pa.array(contents, pa.binary())
    return pa.array(contents)


def _headers(message: Any) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in message.headers() or ()]
