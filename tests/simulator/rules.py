"""The rules in `tests/removals` that the simulator finds when they are taken out, and why it can't find the others."""

from __future__ import annotations

from typing import Final

from promises import PROMISES
from protocol import PROTOCOL
from removal import Removal

from surroundings import SURROUNDINGS

_REPLACED: Final = ("kafka/", "stores/sql/")
"""What has the code of rules and is replaced in memory."""

UNSEEN: Final = {
    "DF a writer that is closed sees it, too": "what a writer that is closed says is not judged",
    "DF a writer that is closed, and whose claim is forgotten, reports it": "what a writer that is closed says is not judged",
    "SG resolved generations are not described again": "it saves requests",
    "UC an UNVERIFIED transaction that is found ongoing is committed": "it needs a row that names no cluster",
    "UC the log of another cluster proves nothing": "it needs an id that has moved",
    "UG a generation with an UNVERIFIED entry is not used again": "NG alone prevents its trace, too",
    "RC only on the cluster that the entry names": "NG alone prevents its trace, too",
    "RL only what is proven lost is published again": "who looks for the messages in the log sees the marker behind them, too",
}
"""Rules of the protocol that run here, and why no run can show that one is missing."""

_PROMISES: Final = (
    "the log proves what its coordinator has forgotten",
    "a transaction that was found committed is reported as committed",
)
"""The other entries that are about what is judged; most are about messages for people, waiting, and journals."""


def visible() -> list[Removal]:
    """The entries that are found within 100,000 seeds."""
    protocol = [each for each in PROTOCOL if not each.module.startswith(_REPLACED) and each.rule not in UNSEEN]
    return [*protocol, *(each for each in (*PROMISES, *SURROUNDINGS) if each.rule in _PROMISES)]
