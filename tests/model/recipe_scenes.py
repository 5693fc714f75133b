"""Which scenes of the recipe are explored, and which of them shows that a rule is needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from model.recipe_model import successors, violated
from model.recipe_state import (
    DELAY,
    LIBRDKAFKA,
    OLD_BROKER,
    RAISES,
    REPEAT,
    SETTING,
    TIMEOUT,
    UNKNOWN,
    Scene,
    first_state,
)
from model.search import Found, explore

_TWO: Final = (("writer", 0, 0, 2), ("writer", 0, 0, 1))
_ONE_EACH: Final = (("writer", 0, 0, 1), ("writer", 0, 0, 1))
_WRONG_RECOVERER: Final = ("recoverer", 0, 1)
_WRONG_WRITER: Final = ("writer", 0, 1, 1)
_RECOVERER: Final = ("recoverer", 0, 0)
_RECOVERED_TWICE: Final = (("writer", 0, 0, 2), _RECOVERER, _RECOVERER)

SMALL: Final = {
    "two writers, a late request": Scene(_ONE_EACH, budget=(DELAY,)),
    "two writers, an unknown COMMIT": Scene(_TWO, budget=(UNKNOWN,)),
    "a writer and a recoverer": Scene((("writer", 0, 0, 2), ("recoverer", 0, 0)), budget=(DELAY, UNKNOWN)),
    "a timeout": Scene(_ONE_EACH, budget=(TIMEOUT,)),
    "recovery on another cluster": Scene((("writer", 0, 0, 2), _WRONG_RECOVERER), clusters=2, budget=(DELAY, UNKNOWN)),
    "opening on another cluster": Scene((("writer", 0, 0, 1), _WRONG_WRITER), clusters=2, budget=(DELAY,)),
    "one id in two databases": Scene((("writer", 0, 0, 1), ("writer", 1, 0, 1)), budget=(UNKNOWN,)),
    "one id in two schemas": Scene((("writer", 0, 0, 1), ("writer", 1, 0, 1)), is_merged=True, budget=(SETTING, UNKNOWN)),
    "an older row, recovered on another cluster": Scene((_WRONG_RECOVERER, ("recoverer", 0, 0)), clusters=2, older=True),
    "an older row, opened on another cluster": Scene((_WRONG_RECOVERER, _WRONG_WRITER), clusters=2, older=True),
    "slow markers": Scene((*_ONE_EACH, _RECOVERER), is_slow=True),
    "a block that raises": Scene(_TWO, budget=(RAISES, UNKNOWN)),
    "record with COMMIT, an unknown one": Scene(_TWO, is_merged=True, budget=(UNKNOWN, RAISES)),
    "record with COMMIT, a recoverer": Scene((("writer", 0, 0, 2), _RECOVERER), is_merged=True, budget=(DELAY, UNKNOWN)),
    "record with COMMIT, a timeout": Scene(_ONE_EACH, is_merged=True, budget=(TIMEOUT, UNKNOWN)),
    "an idle writer": Scene(_TWO, budget=(UNKNOWN,), idles=True),
    "an idle writer, a recoverer": Scene((("writer", 0, 0, 2), _RECOVERER), is_slow=True, budget=(DELAY,), idles=True),
    "an idle writer, record with COMMIT": Scene(_TWO, is_merged=True, budget=(UNKNOWN,), idles=True),
    "a requested commit": Scene(_TWO, is_merged=True, budget=(UNKNOWN,), requests=True),
    "a requested commit, a recoverer": Scene((("writer", 0, 0, 2), _RECOVERER), budget=(DELAY,), requests=True, idles=True),
    "a requested commit, slow markers": Scene((*_ONE_EACH, _RECOVERER), is_slow=True, requests=True),
    "librdkafka, an idle writer": Scene(_TWO, client=LIBRDKAFKA, budget=(REPEAT,), idles=True),
    "an old broker, an idle writer": Scene(_ONE_EACH, client=OLD_BROKER, budget=(DELAY,), is_slow=True, idles=True),
    "librdkafka, two writers": Scene(_TWO, client=LIBRDKAFKA, budget=(TIMEOUT,)),
    "librdkafka, a repeated request": Scene(_TWO, client=LIBRDKAFKA, budget=(REPEAT,)),
    "librdkafka, an unknown COMMIT": Scene(_TWO, client=LIBRDKAFKA, budget=(UNKNOWN,)),
    "an old broker, two recoverers": Scene(_RECOVERED_TWICE, client=OLD_BROKER, budget=(DELAY,)),
    "an old broker, slow markers": Scene(_ONE_EACH, client=OLD_BROKER, budget=(DELAY,), is_slow=True),
}
"""Each is explored completely within seconds."""

LARGE: Final = {
    "two writers, a late request and an unknown COMMIT": Scene(_TWO, budget=(DELAY, UNKNOWN)),
    "two writers and a recoverer": Scene((*_TWO, ("recoverer", 0, 0)), budget=(DELAY,)),
    "two writers, a timeout and a late request": Scene(_TWO, budget=(TIMEOUT, DELAY)),
    "a requested commit, several faults": Scene(
        _TWO, is_merged=True, budget=(DELAY, REPEAT, UNKNOWN), requests=True, idles=True
    ),
    "record with COMMIT, several faults": Scene((*_TWO, _RECOVERER), is_merged=True, budget=(DELAY, UNKNOWN)),
    "three on two clusters": Scene((("writer", 0, 0, 1), _WRONG_WRITER, _WRONG_RECOVERER), clusters=2, budget=(DELAY, UNKNOWN)),
    "two databases, recovered": Scene((("writer", 0, 0, 1), ("writer", 1, 0, 1), ("recoverer", 1, 0)), budget=(DELAY, UNKNOWN)),
    "an older row, recovered and opened on another cluster": Scene(
        (_WRONG_RECOVERER, ("recoverer", 0, 0), _WRONG_WRITER), clusters=2, older=True, budget=(DELAY,)
    ),
    "two writers, slow markers": Scene(_TWO, budget=(DELAY, TIMEOUT, RAISES), is_slow=True),
    "librdkafka, several faults": Scene(_TWO, client=LIBRDKAFKA, budget=(REPEAT, TIMEOUT, UNKNOWN)),
    "librdkafka, two writers and a recoverer": Scene((*_TWO, _RECOVERER), client=LIBRDKAFKA, budget=(REPEAT,)),
    "an old broker, several faults": Scene(_TWO, client=OLD_BROKER, budget=(DELAY, REPEAT, TIMEOUT), is_slow=True),
}
"""Minutes each."""


@dataclass(frozen=True)
class Need:
    """How a rule is shown to be needed.

    Args:
        scene: Where it is removed.
        violation: What is found then.
    """

    scene: Scene
    violation: str

    def without(self, rule: str) -> Scene:
        """The scene without the rule; the empty text stands for none."""
        return replace(self.scene, without=frozenset(filter(None, [rule])))


_ABORTED: Final = "a committed transaction is aborted without a timeout"
_MISSING: Final = "after recovery a message is missing, and it is not reported"
_PHANTOM: Final = "a message is visible, and its row is not committed"
_FALSE_LOST: Final = "a transaction is reported as lost, and its messages are visible"

NEEDS: Final = {
    "F1": Need(Scene((_RECOVERER, ("writer", 0, 0, 1)), taken=True), _ABORTED),
    "F2": Need(Scene(_TWO), "after recovery a transaction is open"),
    "F3": Need(SMALL["librdkafka, two writers"], _FALSE_LOST),
    "F5": Need(Scene(_ONE_EACH), _ABORTED),
    "F7": Need(SMALL["a timeout"], _MISSING),
    "F8": Need(SMALL["two writers, an unknown COMMIT"], "a writer says that a committed transaction was rolled back"),
    "F9": Need(SMALL["librdkafka, a repeated request"], _PHANTOM),
    "FA": Need(SMALL["an old broker, slow markers"], "after recovery a message is in the log, and no marker will follow"),
    "O2": Need(Scene(_ONE_EACH, client=LIBRDKAFKA), _ABORTED),
    "KU": Need(Scene((*_ONE_EACH, _RECOVERER)), _FALSE_LOST),
    "SA": Need(SMALL["an old broker, two recoverers"], "after recovery a committed transaction can't be verified"),
    "CL": Need(SMALL["recovery on another cluster"], "after recovery a transaction is open"),
    "ST": Need(SMALL["one id in two databases"], f"after recovery {_ABORTED}"),
    "QN": Need(SMALL["one id in two schemas"], f"after recovery {_ABORTED}"),
    "UC": Need(SMALL["an older row, recovered on another cluster"], f"after recovery {_ABORTED}"),
    "UG": Need(SMALL["an older row, opened on another cluster"], f"after recovery {_PHANTOM}"),
}

"""For each rule, the scene that breaks the promise without it."""

INSTEAD: Final = {
    "HL": ("F1", Need(Scene(_ONE_EACH, tried=frozenset({"HL"})), _ABORTED)),
    "CU": ("", Need(Scene(_ONE_EACH, tried=frozenset({"CU"}), requests=True), f"after recovery {_ABORTED}")),
}
"""For each change that was tried: the rule that it was to replace, if any, and what happens then."""


def search(scene: Scene, *, seconds: float = 600.0, wanted: str = "") -> Found:
    """Explore the scene for any violation, or for the one that is wanted."""
    return explore(
        first_state(scene), lambda s: successors(scene, s), lambda s: violated(scene, s), seconds=seconds, wanted=wanted
    )
