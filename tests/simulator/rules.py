"""The rules in `tests/removals` that the simulator can see: their code runs here, and they keep what is judged."""

from __future__ import annotations

from typing import Final

from promises import PROMISES
from protocol import PROTOCOL
from removal import Removal

from surroundings import SURROUNDINGS

_ABOVE: Final = ("recipe/", "recovery/", "stores/rows.py", "stores/base.py", "stores/key_value", "transaction.py", "writer.py")


def removals() -> tuple[Removal, ...]:
    """All entries whose code is above what the simulator replaces."""
    return tuple(each for each in (*PROTOCOL, *PROMISES, *SURROUNDINGS) if each.module.startswith(_ABOVE))


UNSEEN: Final = {}
VISIBLE = {each.rule for each in removals()} - set(UNSEEN)
