"""The rules in `tests/removals` that the simulator can see: their code runs here, and they keep what is judged."""

from __future__ import annotations

from typing import Final

from promises import PROMISES
from protocol import PROTOCOL
from removal import Removal

from surroundings import SURROUNDINGS

_ABOVE: Final = ("recipe/", "recovery/", "stores/rows.py", "transaction.py")
"""What has the code of rules and is not replaced in memory."""

_UNSEEN: Final = {
    "SG resolved generations are not described again": "saves requests",
    "UC the log of another cluster proves nothing": "needs an id that has moved",
    "UG a generation with an UNVERIFIED entry is not used again": "NG alone prevents its trace, too",
    "RC only on the cluster that the entry names": "NG alone prevents its trace, too",
}
"""Rules of the protocol that run here, and why no run can show that one is missing."""

_PROMISES: Final = (
    "the log proves what its coordinator has forgotten",
    "a transaction that was found committed is reported as committed",
    "an entry is added only while the row is behind: what was read may not have been the newest",
)
"""The other entries that are about what is judged; most are about messages for people, waiting, and journals."""


def visible() -> list[Removal]:
    """The entries."""
    protocol = [each for each in PROTOCOL if each.module.startswith(_ABOVE) and each.rule not in _UNSEEN]
    return [*protocol, *(each for each in (*PROMISES, *SURROUNDINGS) if each.rule in _PROMISES)]
