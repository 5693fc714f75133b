"""The scenes of the job protocol's model, and for each rule the scene that shows that it is needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from model.job_state import KAFKA_ABORTS, STAGING_EMPTIED, TAKEN, Scene

_FIRST: Final = ("task", 1, 0, (0, 1))
_SECOND: Final = ("task", 2, 0, (0, 1))
_THIRD: Final = ("task", 3, 0, (0, 1))
_COMMITS: Final = (("commit", 1, 1), ("commit", 2, 1))
_ABORT: Final = ("abort", 1)
_BY_HAND: Final = ("recover",)

SMALL: Final = {
    "a run, committed and aborted": Scene((_FIRST, _COMMITS[0], _ABORT), numbers=1),
    "a run of two partitions": Scene((("task", 1, 0, (0,)), ("task", 1, 1, (1,)), ("commit", 1, 2)), numbers=1),
    "two attempts at once": Scene((_FIRST, _FIRST, _ABORT), strict=True),
    "two runs": Scene((_FIRST, _SECOND, *_COMMITS), strict=True, numbers=1),
    "timeouts": Scene((_FIRST, _COMMITS[0], _ABORT), budget=(KAFKA_ABORTS,), numbers=1),
    "a staging table that is emptied": Scene((_FIRST, _COMMITS[0], _ABORT), budget=(STAGING_EMPTIED,), numbers=1),
    "one id recovered": Scene((_FIRST, _COMMITS[0], ("recover id",)), numbers=1),
    "a run without rows after one with rows": Scene((_FIRST, _COMMITS[0], ("commit empty", 2, 0)), numbers=1),
    "given up without outcomes": Scene((_FIRST, _COMMITS[0], ("abort", 0)), numbers=1),
}
"""Each is explored completely within seconds."""

LARGE: Final = {
    "a run, aborted and recovered": Scene((_FIRST, _COMMITS[0], _ABORT, _BY_HAND), strict=True, numbers=1),
    "two attempts, one winner": Scene((_FIRST, _FIRST, _COMMITS[0], _ABORT), strict=True),
    "two partitions, aborted": Scene((("task", 1, 0, (0,)), ("task", 1, 1, (1,)), ("commit", 1, 2), _ABORT), numbers=1),
    "two runs, the second grouped anew": Scene(
        (_FIRST, ("task", 2, 0, (1,)), ("task", 2, 1, (0,)), _COMMITS[0], ("commit", 2, 2)), numbers=1
    ),
    "two runs, the first grouped otherwise": Scene(
        (("task", 1, 0, (0,)), ("task", 1, 1, (1,)), _SECOND, ("commit", 1, 2), _COMMITS[1]), numbers=1
    ),
    "two runs, the first aborted": Scene((_FIRST, _SECOND, *_COMMITS, _ABORT), strict=True, numbers=1),
    "two runs, recovered": Scene((_FIRST, _SECOND, *_COMMITS, _BY_HAND), numbers=1),
    "three runs": Scene((_FIRST, _SECOND, _THIRD), strict=True, numbers=1),
    "two runs, timeouts": Scene((_FIRST, _SECOND, *_COMMITS), budget=(KAFKA_ABORTS,), numbers=1),
}
"""Minutes each; all of them are complete."""


@dataclass(frozen=True)
class Need:
    """Shows that a rule is needed.

    Args:
        scene: The scene in which the rule is disabled.
        violation: The violation that is then found.
        spare: Another rule that must be disabled as well, because either of the two is enough to prevent this violation.
    """

    scene: Scene
    violation: str
    spare: str = ""

    def without(self, *rules: str) -> Scene:
        """The scene without these rules."""
        return replace(self.scene, without=frozenset(filter(None, rules)))


_OPEN: Final = "after manual recovery a transaction is open"
_NOT_IN_BOTH: Final = "commit() returns, and the batch is not in both"
_LOST: Final = "a message is reported as lost"
_NO_ROW: Final = "a message is in the topic, and its row is not in the table"
_alone: Final = Scene((_FIRST, _COMMITS[0], _ABORT), numbers=1)

NEEDS: Final = {
    "claim-open": Need(_alone, _OPEN),
    "claim-locked": Need(_alone, _OPEN),
    "close-fences": Need(_alone, _OPEN),
    "record-fence": Need(SMALL["one id recovered"], _LOST),
    "decide-open": Need(_alone, _LOST, spare="record-fence"),
    "marker-inside": Need(_alone, "commit() says that nothing was committed, and this run was"),
    "stage-fence": Need(_alone, "after manual recovery rows are staged"),
    "move-fence": Need(
        Scene((_FIRST, _SECOND, _SECOND, _COMMITS[1]), strict=True, numbers=1),
        "an open run is refused for rows of an earlier one",
    ),
    "move-count": Need(SMALL["a staging table that is emptied"], _NO_ROW),
    "token-once": Need(Scene((_FIRST, _FIRST)), _OPEN),
    "own-id": Need(Scene((_FIRST, _FIRST), strict=True), TAKEN),
    "start-fence": Need(_alone, _OPEN),
    "cleanup-fence": Need(Scene((_FIRST, _SECOND, _SECOND), strict=True), TAKEN),
    "rows-decide": Need(_alone, _LOST),
    "see-resolved": Need(LARGE["a run, aborted and recovered"], _NOT_IN_BOTH),
    "see-stored": Need(Scene((_FIRST, _SECOND, *_COMMITS, _ABORT), numbers=1), _NOT_IN_BOTH),
    "see-lost": Need(SMALL["timeouts"], _NOT_IN_BOTH),
    "note-given-up": Need(
        Scene((_FIRST, _ABORT), strict=True), "every run was given up, everybody has ended, and a transaction is open"
    ),
    "cleanup-older": Need(Scene((_FIRST, _SECOND, _THIRD), strict=True), TAKEN),
}
