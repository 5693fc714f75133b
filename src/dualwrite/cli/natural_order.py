"""The order in which people expect ids: `shop.2` before `shop.10`."""

from __future__ import annotations

import re
from typing import Final

_NUMBER: Final = re.compile(r"([0-9]+)")


def in_natural_order(text: str) -> tuple[tuple[str | int, ...], str]:
    """The sort key of a text: its numbers count as numbers."""
    parts = _NUMBER.split(text)  # texts and numbers take turns, so that like is compared with like
    return tuple(int(part) if at % 2 else part for at, part in enumerate(parts)), text
