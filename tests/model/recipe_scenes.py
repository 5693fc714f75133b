"""Which scenes of the recipe are explored, and which of them shows that a rule is needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from model.recipe_model import successors, violated
from model.recipe_state import (
    ACKNOWLEDGE,
    BACK,
    COPIED,
    DELAY,
    FORGETS,
    LIBRDKAFKA,
    MOVE,
    OLD_BROKER,
    RAISES,
    REPEAT,
    RETENTION,
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
    "no create-only request, a late request": Scene(_ONE_EACH, budget=(DELAY, REPEAT), is_plain=True),
    "no create-only request, an unknown COMMIT": Scene(_TWO, budget=(REPEAT, UNKNOWN), is_plain=True),
    "no create-only request, a recoverer": Scene((*_ONE_EACH, _RECOVERER), budget=(DELAY,), is_plain=True, is_slow=True),
    "an idle writer": Scene(_TWO, budget=(UNKNOWN,), idles=True),
    "an idle writer, a recoverer": Scene((("writer", 0, 0, 2), _RECOVERER), is_slow=True, budget=(DELAY,), idles=True),
    "an idle writer, record with COMMIT": Scene(_TWO, is_merged=True, budget=(UNKNOWN,), idles=True),
    "a joined transaction": Scene(_TWO, joins=True, budget=(UNKNOWN, RAISES)),
    "a joined transaction, a recoverer": Scene((("writer", 0, 0, 2), _RECOVERER), joins=True, budget=(DELAY, UNKNOWN)),
    "a joined transaction, a timeout": Scene(_ONE_EACH, joins=True, budget=(TIMEOUT, UNKNOWN)),
    "a joined transaction, slow markers": Scene(_ONE_EACH, joins=True, is_slow=True, idles=True, budget=(RAISES,)),
    "librdkafka, an idle writer": Scene(_TWO, client=LIBRDKAFKA, budget=(REPEAT,), idles=True),
    "an old broker, an idle writer": Scene(_ONE_EACH, client=OLD_BROKER, budget=(DELAY,), is_slow=True, idles=True),
    "librdkafka, two writers": Scene(_TWO, client=LIBRDKAFKA, budget=(TIMEOUT,)),
    "librdkafka, a repeated request": Scene(_TWO, client=LIBRDKAFKA, budget=(REPEAT,)),
    "librdkafka, an unknown COMMIT": Scene(_TWO, client=LIBRDKAFKA, budget=(UNKNOWN,)),
    "the database goes back": Scene((("writer", 0, 0, 3),), budget=(BACK, UNKNOWN, RAISES)),
    "the database goes back, a recoverer": Scene((("writer", 0, 0, 2), _RECOVERER), budget=(BACK, UNKNOWN), idles=True),
    "librdkafka, the database goes back": Scene((("writer", 0, 0, 3),), client=LIBRDKAFKA, budget=(BACK, UNKNOWN)),
    "an old broker, two recoverers": Scene(_RECOVERED_TWICE, client=OLD_BROKER, budget=(DELAY,)),
    "an old broker, slow markers": Scene(_ONE_EACH, client=OLD_BROKER, budget=(DELAY,), is_slow=True),
}

_LATE: Final = (("writer", 0, 0, 1), _RECOVERER)
_REPORTED: Final = (("writer", 0, 0, 2, "reports"), _RECOVERER)
_MOVED: Final = (("writer", 0, 0, 1), _WRONG_WRITER, _WRONG_RECOVERER)

REPUBLISHED: Final = {
    "published again by its writer": Scene((("writer", 0, 0, 2),), budget=(TIMEOUT, TIMEOUT, UNKNOWN, ACKNOWLEDGE)),
    "published again by a recoverer": Scene(_LATE, budget=(TIMEOUT, TIMEOUT, UNKNOWN)),
    "published again by two recoverers": Scene((("writer", 0, 0, 1), _RECOVERER, _RECOVERER), budget=(TIMEOUT,)),
    "published again by two writers": Scene(_ONE_EACH, budget=(TIMEOUT, ACKNOWLEDGE)),
    "acknowledged while it is published again": Scene(_LATE, budget=(TIMEOUT, ACKNOWLEDGE, REPEAT, UNKNOWN)),
    "published again, a late request": Scene(_LATE, budget=(TIMEOUT, TIMEOUT, DELAY)),
    "published again, slow markers": Scene(_LATE, budget=(TIMEOUT, TIMEOUT, ACKNOWLEDGE), is_slow=True),
    "published again, record with COMMIT": Scene(_LATE, budget=(TIMEOUT, UNKNOWN, UNKNOWN, ACKNOWLEDGE), is_merged=True),
    "published again, retention": Scene(_LATE, budget=(TIMEOUT, TIMEOUT, RETENTION)),
    "published again, in order": Scene(_TWO, budget=(TIMEOUT,), is_ordered=True),
    "published again, two in order": Scene(_REPORTED, budget=(TIMEOUT, TIMEOUT, TIMEOUT), is_ordered=True),
    "not published again: a forgotten id": Scene(_LATE, budget=(TIMEOUT, FORGETS)),
    "not published again: another cluster": Scene(_MOVED, budget=(TIMEOUT, MOVE), clusters=2),
    "not published again: a copied database": Scene((("writer", 0, 0, 1), ("recoverer", 1, 0)), budget=(TIMEOUT, COPIED)),
    "librdkafka, published again": Scene(_LATE, client=LIBRDKAFKA, budget=(TIMEOUT, TIMEOUT, REPEAT)),
    "librdkafka, two published again": Scene(_REPORTED, client=LIBRDKAFKA, budget=(TIMEOUT, TIMEOUT, REPEAT)),
    "an old broker, published again": Scene(_LATE, client=OLD_BROKER, budget=(TIMEOUT, TIMEOUT, ACKNOWLEDGE)),
}
"""Lost transactions are published again, or must not be; as small as the others."""

SMALL |= {name: replace(scene, republish=True) for name, scene in REPUBLISHED.items()}
"""Each is explored completely within seconds."""

_AGAIN: Final = {
    "published again: two writers and a recoverer": Scene((*_ONE_EACH, _RECOVERER), budget=(TIMEOUT,)),
    "published again: a writer and a recoverer": Scene(
        (("writer", 0, 0, 2), _RECOVERER), budget=(TIMEOUT, TIMEOUT, UNKNOWN, ACKNOWLEDGE)
    ),
    "published again: two writers in order": Scene(_TWO, budget=(TIMEOUT, TIMEOUT, UNKNOWN), is_ordered=True),
    "published again: two recoverers": Scene((*_LATE, _RECOVERER), budget=(TIMEOUT, TIMEOUT, ACKNOWLEDGE)),
    "published again: record with COMMIT": Scene(_TWO, budget=(TIMEOUT, DELAY, REPEAT), is_merged=True),
    "published again: librdkafka": Scene(_TWO, client=LIBRDKAFKA, budget=(TIMEOUT, TIMEOUT, REPEAT, UNKNOWN)),
    "published again: an old broker": Scene((*_LATE, _RECOVERER), client=OLD_BROKER, budget=(TIMEOUT, DELAY), is_slow=True),
}

LARGE: Final = {
    "two writers, a late request and an unknown COMMIT": Scene(_TWO, budget=(DELAY, UNKNOWN)),
    "two writers and a recoverer": Scene((*_TWO, ("recoverer", 0, 0)), budget=(DELAY,)),
    "two writers, a timeout and a late request": Scene(_TWO, budget=(TIMEOUT, DELAY)),
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
LARGE |= {name: replace(scene, republish=True) for name, scene in _AGAIN.items()}
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
        """The scene without the rule."""
        return replace(self.scene, without=self.scene.without | {rule})


_NG: Final = frozenset({"NG"})  # which alone prevents this trace, too
_ABORTED: Final = "a committed transaction is aborted without a timeout"
_MISSING: Final = "after recovery a message is missing, and it is not reported"
_PHANTOM: Final = "a message is visible, and its row is not committed"
_FALSE_LOST: Final = "a transaction is reported as lost, and its messages are visible"
_ORDER: Final = "messages are visible in another order than that of their database transactions"
_TWICE: Final = "a message is visible twice"
_ACKNOWLEDGED: Final = "a message is visible that an operator has acknowledged as lost"

NEEDS: Final = {
    "F1": Need(Scene((_RECOVERER, ("writer", 0, 0, 1)), taken=True), _ABORTED),
    "F2": Need(Scene(_TWO), "after recovery a transaction is open"),
    "F3": Need(SMALL["librdkafka, two writers"], _FALSE_LOST),
    "F5": Need(Scene(_ONE_EACH), _ABORTED),
    "NG": Need(SMALL["no create-only request, a late request"], _ABORTED),
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
    "UG": Need(replace(SMALL["an older row, opened on another cluster"], without=_NG), f"after recovery {_PHANTOM}"),
    "RA": Need(SMALL["published again by a recoverer"], _TWICE),
    "RE": Need(SMALL["acknowledged while it is published again"], _ACKNOWLEDGED),
    "RI": Need(SMALL["acknowledged while it is published again"], _ABORTED),
    "RS": Need(SMALL["acknowledged while it is published again"], _ACKNOWLEDGED),
    "RL": Need(SMALL["not published again: a forgotten id"], _TWICE),
    "RC": Need(replace(SMALL["not published again: another cluster"], without=_NG), _TWICE),
    "RD": Need(SMALL["not published again: a copied database"], _TWICE),
    "RO": Need(SMALL["published again, in order"], _ORDER),
    "RP": Need(SMALL["published again, two in order"], _ORDER),
    "RW": Need(SMALL["published again by its writer"], "a writer says that a lost transaction is committed"),
    "DF": Need(SMALL["the database goes back"], "a writer goes on, and does not report what the database has forgotten"),
}
"""For each rule, the scene that breaks the promise without it."""

INSTEAD: Final = {
    "HL": ("F1", Need(Scene(_ONE_EACH, without=_NG, tried=frozenset({"HL"})), _ABORTED)),
}
"""For each change that was tried: the rule that it was to replace, and what happens then."""


def search(scene: Scene, *, seconds: float = 600.0, wanted: str = "") -> Found:
    """Explore the scene for any violation, or for the one that is wanted."""
    try:
        return explore(
            first_state(scene), lambda s: successors(scene, s), lambda s: violated(scene, s), seconds=seconds, wanted=wanted
        )
    finally:
        scene.after_recovery.clear()
