"""A row of any table as JSON text, and back: for rows in the table of dead letters."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

from dualwrite.errors import StoredStateError

_TYPE: Final = "$type"
_VALUE: Final = "value"


def row_text(row: Mapping[str, Any]) -> str:
    """The row as JSON: an object with its columns. What JSON does not have is an object with `$type` and `value`."""
    return json.dumps({name: _plain(value) for name, value in row.items()}, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str | float):
        return value
    match value:
        case bytes() | bytearray() | memoryview():
            kind, plain = "bytes", base64.b64encode(bytes(value)).decode()
        case datetime() | date():
            kind, plain = "time", value.isoformat()
        case Decimal():
            kind, plain = "decimal", str(value)
        case UUID():
            kind, plain = "uuid", str(value)
        case dict() | list():
            kind, plain = "json", json.dumps(value)
        case _:
            kind, plain = "other", str(value)
    return {_TYPE: kind, _VALUE: plain}


_READ: Final[Mapping[str, Callable[[Any], Any]]] = {
    "bytes": base64.b64decode,
    "time": datetime.fromisoformat,
    "decimal": Decimal,
    "uuid": UUID,
    "json": json.loads,
    "other": str,
}


def row_from(text: str) -> dict[str, Any]:
    """The row of a text of `row_text`.

    Raises:
        StoredStateError: It is not one.
    """
    try:
        return {
            name: _READ[value[_TYPE]](value[_VALUE]) if isinstance(value, dict) else value
            for name, value in json.loads(text).items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoredStateError(
            "The row of a dead letter can't be read.",
            cause="it was changed manually, or by a newer release",
            next_step="restore it, or drop the dead letter",
            text=text[:200],
        ) from error
